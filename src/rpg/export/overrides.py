"""Settings as hydra and bash read them: any value as one argument of a command, any folder as a part of one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

FOLDER = "$FOLDER"  # in run.sh: its own folder, as it stands between hydra's quotes
SAFE = re.compile(r"(?!(?:true|false|null|nan|inf|yes|no|on|off)$)[A-Za-z_/.][\w/.+-]*", re.ASCII | re.IGNORECASE)
NAME = re.compile(r"rpg:[\w+-]+", re.ASCII)
HERE = r"""HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
FOLDER="$(sed -E "s/(\\\\*)'/\1\1\\\\'/g" <<< "$HERE")"  # between hydra's quotes
"""


def text(value: Any) -> str:
    """A value as hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if SAFE.fullmatch(value) or NAME.fullmatch(value) else f"'{escaped(value)}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    return repr(value)


def escaped(value: str) -> str:
    """Between hydra's single quotes, where a backslash means something only before a quote and at the end."""
    return re.sub(r"(\\+)$", r"\1\1", re.sub(r"(\\*)'", r"\1\1\\'", value))


def quoted(argument: str) -> str:
    """For bash, with $FOLDER left to it."""
    if FOLDER not in argument:
        return shlex.quote(argument)
    before = re.sub(r'(["\\`])', r"\\\1", argument)
    return '"' + re.sub(r"\$(?!FOLDER\b)", r"\\$", before) + '"'
