"""Numbers of a run's row: its score, and when it reached a target."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]


def mean_of(means: Mapping[str, float], on: str | None) -> float | None:
    """Of a test set, or over all; None where it was not evaluated."""
    if on is not None:
        return means.get(on)
    return fmean(means.values()) if means else None


def final_mean(row: Row, on: str | None) -> float | None:
    """Of the last evaluation that the run has written, however it ended."""
    return mean_of(row["evals"][-1][3], on) if row["evals"] else None


def first_mean(row: Row, on: str | None) -> float | None:
    return mean_of(row["evals"][0][3], on) if row["evals"] else None


def best_mean(row: Row, on: str | None) -> float | None:
    """The highest of its evaluations: of several noisy readings, so too high."""
    return max((x for e in row["evals"] if (x := mean_of(e[3], on)) is not None), default=None)


def reached(row: Row, target: float, on: str | None) -> tuple[int, int, float] | None:
    """(step, tokens, seconds) of the first evaluation at the target or above."""
    for step, tokens, seconds, means in row["evals"]:
        if (x := mean_of(means, on)) is not None and x >= target:
            return step, tokens, seconds
    return None


def shares(solved: Mapping[str, list[int]], k: int, on: str | None) -> NDArray[np.float64]:
    """The share of right responses to each problem; of several sets so weighted that each counts the same."""
    sets = {name: np.asarray(x, np.float64) / k for name, x in solved.items() if on in (None, name)}
    total = sum(map(len, sets.values()))
    return np.concatenate([x * total / (len(sets) * len(x)) for x in sets.values()]) if total else np.zeros(0)
