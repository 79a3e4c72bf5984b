"""What rows of metrics say of a run's progress: evaluations, failures, the time left."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..console import fixed, printable

Row = Mapping[str, float]
EVAL = re.compile(r"eval/(.+)/mean@(\d+)")
SEEN = 2000  # characters of a text that are looked at
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


@dataclass(frozen=True)
class Example:
    """A response to look at. Its texts are somebody else's: nothing in them moves the cursor, and each is one line."""

    prompt: str
    response: str
    reward: str

    @staticmethod
    def of(row: Mapping[str, Any]) -> Example:
        prompt, response = (printable(" ".join(str(row[name])[-SEEN:].split())) for name in ("prompt", "response"))
        return Example(prompt, response, f"reward {fixed(3)(row['reward'])}")

    def line(self, width: int) -> str:
        """…end of the prompt → the response  (reward 1.000), in at most so many characters."""
        prompt = end_of(self.prompt, max(8, width // 3))
        rest = width - len(prompt) - len(self.reward) - len(" → " + "  ()")
        return f"{prompt} → {end_of(self.response, max(8, rest))}  ({self.reward})"


def end_of(text: str, width: int) -> str:
    """The end is where the question and the answer stand."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


class StepTimer:
    """Time left: the last steps, so that it follows a machine that slows down, and the evaluations still to come."""

    RECENT, RECENT_EVALS = 5, 3

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
            self._evals = [*self._evals, spent][-self.RECENT_EVALS :]

    def seconds_a_step(self) -> float | None:
        return _usual(self._steps) if self._steps else None

    def left(self, now: float | None = None) -> float | None:
        """A step that takes longer than those before takes no time from those after it."""
        each, todo = self.seconds_a_step(), max(0, self.steps - self.done)
        if each is None or not todo:
            return None if each is None else 0.0
        seconds, under_way = todo * each, each
        if len(self._evaluated) == 2:
            every = max(1, self._evaluated[1] - self._evaluated[0])
            evaluation = _usual(self._evals)
            seconds += math.ceil(todo / every) * evaluation
            under_way += evaluation if todo == 1 or self.done + 1 == self._evaluated[1] + every else 0.0
        now = time.monotonic() if now is None else now
        return seconds - min(now - self.last, under_way)


def _usual(seconds: Sequence[float]) -> float:
    """Their mean, without the slowest and the fastest: one slow step changes little."""
    ordered = sorted(seconds)
    return statistics.fmean(ordered[1:-1] or ordered[:1])
