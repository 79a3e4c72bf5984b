"""How this project's docstrings name arguments, for the API pages: lines of ``name: what it is``."""

from __future__ import annotations

import re
from typing import Any

import griffe

LINE = re.compile(r"^(\w+): ", re.MULTILINE)


class Arguments(griffe.Extension):
    """Puts such lines under "Args:", as Google's style has them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        known = {*obj.members, *(parameter.name for parameter in getattr(obj, "parameters", ()))}
        blocks = re.split(r"\n\s*\n", obj.docstring.value)
        obj.docstring.value = "\n\n".join(_arguments(block, known) for block in blocks)


def _arguments(block: str, known: set[str]) -> str:
    """The lines that name arguments, with those that go on below them; what follows is a paragraph of its own."""
    if not (first := LINE.match(block)) or first[1] not in known:
        return block
    listed = re.match(r"(?:\w+: .*\n?(?: +.*\n?)*)+", block)[0]
    return "Args:\n" + re.sub(r"^(?=.)", "    ", listed, flags=re.MULTILINE) + "\n" + block[len(listed) :]
