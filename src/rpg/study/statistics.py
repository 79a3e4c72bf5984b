"""Differences between arms, paired by seed and by problem, with intervals that hold for few seeds.

A result x[s, p] is the share of right responses to problem p in the run with seed s, and d[s, p] the difference of
two arms. Both seeds and problems are samples: of trainings that might have been, and of problems that might have been
asked. With the two-way random-effects model d = δ + seed + problem + rest the variance of the mean over all is

    V = V_S + V_P − V_E,    V_S = var(means of seeds)/S,  V_P = var(means of problems)/P,  V_E = var(rest)/(S·P):

what is left over is in both of the first two, and counts once. V_S comes from S − 1 squares, so from very little: a
normal quantile, or a bootstrap of five seeds, gives intervals that are too short. So the quantile is Student's with
S − 1 degrees of freedom, as if all of V were as badly known as V_S: a little long where the problems decide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Estimated:
    """A mean, or a difference of means. With one seed there is no interval, and p is 1."""

    mean: float
    error: float
    low: float
    high: float
    p: float  # of a mean of zero
    seeds: int


def estimated(x_SP: Array, finest: float = 0.0) -> Estimated:
    """Of results, or of differences paired by seed and problem. ``finest``: the smallest step that a result can make,
    1/k: no error is taken to be smaller than what that leaves open."""
    mean, error = (float(x) for x in mean_and_error(x_SP))
    seeds, problems = x_SP.shape
    if seeds < 2:
        return Estimated(mean, math.inf, -math.inf, math.inf, 1.0, seeds)
    error = max(error, finest / (problems * math.sqrt(seeds)))
    if error == 0:
        return Estimated(mean, 0.0, mean, mean, float(mean == 0), seeds)
    half = t_quantile(LEVEL, seeds - 1) * error
    return Estimated(mean, error, mean - half, mean + half, t_tails(abs(mean) / error, seeds - 1), seeds)


def mean_and_error(x_SP: Array) -> tuple[Array, Array]:
    """Over the last two dimensions, seeds and problems."""
    seeds, problems = x_SP.shape[-2:]
    by_seed, by_problem = x_SP.mean(-1), x_SP.mean(-2)
    mean = by_seed.mean(-1)
    if seeds < 2:
        return mean, np.full_like(mean, math.inf)
    rest = x_SP - by_seed[..., :, None] - by_problem[..., None, :] + mean[..., None, None]
    v_seeds = by_seed.var(-1, ddof=1) / seeds
    v_problems = by_problem.var(-1, ddof=1) / problems if problems > 1 else np.zeros_like(mean)
    v_rest = (rest**2).sum((-2, -1)) / max(1, (seeds - 1) * (problems - 1)) / (seeds * problems)
    variance = np.maximum(v_seeds + v_problems - v_rest, np.maximum(v_seeds, v_problems))
    return mean, np.sqrt(variance)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values of several comparisons, so adjusted that the chance of any false difference is kept: Holm (1979)."""
    adjusted, largest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


# ---- Student's t -----------------------------------------------------------------------------------------------------


def t_tails(t: float, freedom: float) -> float:
    """The chance of more than ``t`` on either side."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@functools.cache
def t_quantile(level: float, freedom: float) -> float:
    """Between −t and t lies ``level``."""
    low, high = 0.0, 1.0
    while t_tails(high, freedom) > 1 - level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised. The continued fraction of DLMF 8.17.22, which converges fast on its side of the mean."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    value = 1.0
    for m in range(200, 0, -1):  # from the inside out
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        value = 1 + odd / (1 + even / value)
    return math.exp(front) / (a * value)
