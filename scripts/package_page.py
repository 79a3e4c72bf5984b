"""README.md as a package page. Hatchling calls this at every build, as relative links lead nowhere there.

With an address, project.urls.Repository in pyproject.toml, links and pictures are made absolute. Without one, links
keep their text alone, and pictures go.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


class PackagePage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": page(text, address)}


def page(text: str, address: str | None) -> str:
    """The README without a relative link; blocks of code stay as they are."""
    parts = CODE.split(text)
    parts[::2] = [_prose(part, address) for part in parts[::2]]
    return "".join(parts)


def _prose(text: str, address: str | None) -> str:
    text = PICTURE.sub(lambda m: m[0] if _leads(m[2]) else _picture(m, address), text)
    text = LINK.sub(lambda m: m[0] if _leads(m[2]) else _link(m, address), text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _leads(target: str) -> bool:
    """Somewhere, from any page: https://…, mailto:…"""
    return re.match(r"[a-z]+:", target) is not None


def _picture(match: re.Match[str], address: str | None) -> str:
    return f"![{match[1]}]({address}/raw/HEAD/{match[2]})" if address else ""


def _link(match: re.Match[str], address: str | None) -> str:
    if address is None:
        return match[1]
    return f"[{match[1]}]({address}{'' if match[2].startswith('#') else '/blob/HEAD/'}{match[2]})"
