"""What rows of metrics say of a run's progress: evaluations, failures, the time left."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping

Row = Mapping[str, float]
EVAL = re.compile(r"eval/(.+)/mean@(\d+)")
FAILURES = {"reward/failed": "failed rewards", "skipped": "skipped steps"}


def numbers_of(row: Mapping[str, object]) -> dict[str, float]:
    """A row as it was written: null is what was not finite, and a list names those."""
    values = {name: math.nan if value is None else value for name, value in row.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class EvalMetrics:
    """One task's numbers in a row."""

    def __init__(self, task: str, k: str, row: Row) -> None:
        name = f"eval/{task}/mean@{k}"
        self.task, self.metric, self.mean = task, f"mean@{k}", row[name]
        self.low, self.high = row.get(f"{name}_low"), row.get(f"{name}_high")
        passed = re.compile(rf"eval/{re.escape(task)}/pass@(\d+)")
        keys = [int(match[1]) for key in row if (match := passed.fullmatch(key))]
        self.passed = f"  pass@{max(keys)} {row[f'eval/{task}/pass@{max(keys)}']:.3f}" if keys else ""

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"

    @staticmethod
    def of(row: Row) -> list[EvalMetrics]:
        return [EvalMetrics(match[1], match[2], row) for name in row if (match := EVAL.fullmatch(name))]


class StepTimer:
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
