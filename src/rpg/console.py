"""Speaking to the user: mistakes in one line, unknown names, tables on the terminal. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100


class Mistake(Exception):
    """The user's; its text is one line for stderr."""


@contextlib.contextmanager
def one_line(prefix: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors of this kind into a Mistake of one line."""
    try:
        yield
    except kind as error:
        raise Mistake(f"{prefix}{flat_text(error)}") from error


def describe(error: BaseException) -> str:
    """KeyError: 'x', on one line of bounded length, whatever the exception's own __str__ does."""
    try:
        text = " ".join(str(error)[:1000].split())
    except Exception:
        text = "(no message: its __str__ raised)"
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def flat_text(error: BaseException) -> str:
    """All of an error's text on one line; where it has none, its kind."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for errors that go on for pages; where it has none, its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def choose(what: str, given: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Known: {', '.join(names)}"


def one_of(what: str, given: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if given not in known:
        raise ValueError(choose(what, str(given), known))


def several() -> bool:
    """Whether torchrun has started this process and others. (Without an import of torch, which takes seconds.)"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def first_of_launch() -> bool:
    """Whether this process is the one that speaks to the user."""
    return not several() or os.environ.get("RANK") == "0"


def console() -> Console:
    """The terminal at its own width; a pipe at 100 columns, without colour."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PIPE_WIDTH)


@contextmanager
def printed() -> Iterator[Console]:
    """A console whose output reaches stdout at the end, without the blanks that tables leave at the ends of lines."""
    to = console()
    with to.capture() as captured:
        yield to
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
