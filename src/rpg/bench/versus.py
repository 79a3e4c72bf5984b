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

from .rows import error_line
from .step import WARMUP, Took, Work, peak_memory_gb, rpg_steps
from .trl_peer import trl_steps

SIDES = ("rpg", "trl")


class SideFailed(Exception):
    """What happened on the other end, in one line."""

    plain = True  # the line says it all, without the name of this class


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


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """A process for one call: what it returns, or the line that it ended with."""
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(SideFailed(error_line(error)))


# ---- in the parent ---------------------------------------------------------------------------------------------------


def apart(function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
    """The function's result, from a process of its own that is ended after ``limit`` seconds."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=_answer, args=(function, arguments, other), daemon=True)
    child.start()
    other.close()
    try:
        if not pipe.poll(limit):
            raise SideFailed(f"no answer within {limit:.0f} s")
        found = pipe.recv()
    except EOFError as error:
        child.join(5)
        raise SideFailed(f"its process ended with exit code {child.exitcode}") from error
    finally:
        pipe.close()
        child.join(2)
        if child.is_alive():
            child.kill()
            child.join(5)
    if isinstance(found, SideFailed):
        raise found
    return found


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
            if not pipe.poll(work.limit):
                raise SideFailed(f"no answer within {work.limit} s")
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
            child.join(5)  # what it held of the device is needed by the next


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
