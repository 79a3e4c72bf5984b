"""What every part of a run is handed: its place among the ranks, and whom to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .ranks import ALONE, World


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True)
class RunContext:
    """``warn`` shows a line to the user; ``stage`` says what is being done right now."""

    world: World = ALONE
    warn: Callable[[str], None] = _ignore
    stage: Callable[[str], None] = _ignore


QUIET = RunContext()  # one process that tells nobody
