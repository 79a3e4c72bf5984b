"""Two processes that take turns, so that the machine's noise meets both: only one of them works at any time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from .step import WARMUP, Took, Work, peak_memory_gb, rpg_steps
from .trl_peer import trl_steps

SIDES = ("rpg", "trl")


class SideFailed(Exception):
    """What happened on the other end, in one line."""


@dataclass
class Result:
    """The steps of a side that count, and the memory its process had at most."""

    took: list[Took] = field(default_factory=list)
    peak_memory_gb: float = 0.0


# ---- in a side's own process -----------------------------------------------------------------------------------------


def work_on(side: str, work: Work, pipe: Connection) -> None:
    """A side's process: a step whenever it is told to, then what it took."""
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere  # other people's progress lines
        try:
            pipe.send(None)  # started
            _take_steps(side, work, lambda: pipe.recv(), lambda took: pipe.send((took, peak_memory_gb(work.device))))
        except EOFError:  # the parent went away
            pass
        except ValueError as error:  # what was asked for is impossible
            pipe.send(SideFailed(" ".join(str(error).split())))
        except Exception as error:
            pipe.send(SideFailed(f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _take_steps(side: str, work: Work, before: Callable[[], Any], after: Callable[[Took], None]) -> None:
    if side == "trl":
        trl_steps(work, before, after)
        return
    steps = rpg_steps(work)
    for _ in range(work.steps):
        before()
        after(next(steps))


# ---- in the parent ---------------------------------------------------------------------------------------------------


@contextmanager
def process(side: str, work: Work) -> Iterator[Callable[[], tuple[Took, float]]]:
    """A side, started; calling it takes one step there."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=work_on, args=(side, work, other), daemon=True)
    child.start()
    other.close()

    def receive() -> Any:
        try:
            found = pipe.recv()
        except EOFError as error:
            child.join(5)
            raise SideFailed(f"its process ended with exit code {child.exitcode}") from error
        if isinstance(found, SideFailed):
            raise found
        return found

    def step() -> tuple[Took, float]:
        pipe.send(None)
        found: tuple[Took, float] = receive()
        return found

    try:
        receive()
        yield step
    finally:
        pipe.close()
        child.join(5)
        if child.is_alive():
            child.terminate()


def compare(work: Work, sides: tuple[str, ...], watch: Callable[[str], None] = lambda text: None) -> dict[str, Result]:
    """Each side's steps, one at a time in turns; who goes first alternates too."""
    results = {side: Result() for side in sides}
    with ExitStack() as stack:
        step = {side: stack.enter_context(process(side, work)) for side in sides}
        for number in range(work.steps):
            for side in sides if number % 2 else sides[::-1]:
                watch(f"step {number + 1}/{work.steps}: {side}")
                try:
                    took, memory = step[side]()
                except SideFailed as error:
                    raise SideFailed(f"{side}: {error}") from error
                results[side].peak_memory_gb = memory
                if number >= WARMUP:
                    results[side].took.append(took)
    return results
