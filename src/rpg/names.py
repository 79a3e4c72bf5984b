"""A name that is not known: say so, and which one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choose(what: str, given: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Known: {', '.join(names)}"


def one_of(what: str, given: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if given not in known:
        raise ValueError(choose(what, str(given), known))
