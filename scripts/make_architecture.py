"""Writes the list of files in docs/architecture.md: a line a module, the first sentence of its docstring.

    python scripts/make_architecture.py

The order of the rooms is that of tests/test_layers.py, which also holds that this page is up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- files: scripts/make_architecture.py -->\n", "<!-- end of files -->\n"


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[.?!])\s|\n\n", text.strip(), maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".:").replace("``", "`").replace("|", "\\|")


def files(rooms: dict[str, str]) -> str:
    """Markdown: a heading a room, then its modules."""
    source, lines = ROOT / "src" / "rpg", []
    for room, purpose in rooms.items():
        if not (source / room).is_dir():
            continue
        lines += [f"### `{room}/`: {purpose}", "", "| file | |", "|---|---|"]
        for path in sorted((source / room).rglob("*.py")):
            if path.name != "__init__.py":
                name = path.relative_to(source / room).as_posix()
                lines.append(f"| [{name}](../{path.relative_to(ROOT).as_posix()}) | {first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def page(rooms: dict[str, str]) -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}\n{files(rooms)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from test_layers import ROOMS

    PAGE.write_text(page(ROOMS), encoding="utf-8")
