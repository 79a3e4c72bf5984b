"""Rows of metrics as numbers, clocks, curves of text and evaluations, for whoever shows them."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

Row = Mapping[str, float]
EVAL = re.compile(r"eval/(.+)/mean@(\d+)")
TROUBLE = {"reward/failed": "failed rewards", "skipped": "skipped steps"}


def numbers_of(row: Mapping[str, object]) -> dict[str, float]:
    """A row as it was written: null is what was not finite, and a list names those."""
    found = {name: math.nan if value is None else value for name, value in row.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def printable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def clock(seconds: float) -> str:
    """1:02, 1:02:03, 3d 4h"""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def number(x: float | None) -> str:
    """At most 6 characters, 7 with a sign: 0.0031, 3.1e-5, 12.3, 5120, 48.2k; what is missing is -"""
    if x is None:
        return "-"
    if not math.isfinite(x):
        return str(x)
    size = abs(x)
    if size == 0 or 1e-3 <= size < 1:
        return f"{x:.4f}" if 0 < size < 0.1 else f"{x:.3f}"
    if size < 1e-3:
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 1e5:
        return f"{x:.2f}" if size < 10 else f"{x:.1f}" if size < 1000 else f"{x:.0f}"
    for unit, letter in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if size < 999.5 * unit:
            return f"{x / unit:.3g}{letter}"
    return f"{x:.0e}"


def fixed(places: int) -> Callable[[float | None], str]:
    """With this many decimals, where that tells something; else as ``number`` has it."""
    return lambda x: number(x) if x is None or not abs(x) < 1e4 else f"{x:.{places}f}"


def percent(x: float | None) -> str:
    return number(x) if x is None or not math.isfinite(x) else f"{100 * x:.1f} %"


BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def sparkline(
    values: list[float], width: int, *, low: float | None = None, high: float | None = None, marks: str = BLOCKS
) -> str:
    """The whole history in at most ``width`` characters, means of equal parts; from low to high, or its own range."""
    n, width = len(values), max(0, width)
    if n > width:
        cuts = [i * n // width for i in range(width + 1)] if width else [0]
        parts = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(cuts)]
    else:
        parts = [[v] if math.isfinite(v) else [] for v in values]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [m for m in means if m is not None]
    if not known:
        return " " * len(means)
    bottom = min(known) if low is None else low
    span = (max(known) if high is None else high) - bottom
    top = len(marks) - 1

    def mark(m: float | None) -> str:
        if m is None:
            return " "
        place = (m - bottom) / span if span > 0 and math.isfinite(span) else 0.0
        return marks[min(top, max(0, round(place * top)))]

    return "".join(map(mark, means))


class Evaluation:
    """One task's numbers in a row."""

    def __init__(self, task: str, k: str, row: Row) -> None:
        name = f"eval/{task}/mean@{k}"
        self.task, self.metric, self.mean = task, f"mean@{k}", row[name]
        self.low, self.high = row.get(f"{name}_low"), row.get(f"{name}_high")
        passed = re.compile(rf"eval/{re.escape(task)}/pass@(\d+)")
        found = {int(match[1]): key for key in row if (match := passed.fullmatch(key))}
        self.passed = (f"pass@{max(found)}", row[found[max(found)]]) if found else None

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"

    @staticmethod
    def of(row: Row) -> list[Evaluation]:
        return [Evaluation(match[1], match[2], row) for name in row if (match := EVAL.fullmatch(name))]


class Clock:
    """Time left: a median of recent steps, so that one slow step changes little, and the evaluations still to come."""

    RECENT = 15

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.started = self.last = time.monotonic()
        self._steps: list[float] = []
        self._evals: list[float] = []
        self._evaluated: list[int] = []

    def step(self, row: Row, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        took, self.last = now - self.last, now
        self.done = int(row.get("step", self.done + 1))
        spent = row.get("time/eval", 0.0)
        if self.done and took > 0:
            self._steps = [*self._steps, max(0.0, took - spent)][-self.RECENT :]
        if any(EVAL.fullmatch(name) for name in row):
            self._evaluated = [*self._evaluated, self.done][-2:]
            self._evals = [*self._evals, spent][-5:]

    def seconds_a_step(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def left(self, now: float | None = None) -> float | None:
        each = self.seconds_a_step()
        if each is None:
            return None
        todo = max(0, self.steps - self.done)
        seconds = todo * each
        if todo and len(self._evaluated) == 2:
            every = max(1, self._evaluated[1] - self._evaluated[0])
            seconds += math.ceil(todo / every) * statistics.median(self._evals)
        now = time.monotonic() if now is None else now
        return max(0.0, seconds - (now - self.last)) if todo else 0.0
