"""Truncated sampling: the sampler draws from the top-p of μ, and the objective is that of the truncated policies.

What a loss is given decides. Over the kept tokens its ratios are those of the policies that act. Over the whole
vocabulary they are not: the probability mass of the kept tokens stays in them. See ``problem.FEEDS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from .measure import Observation, Subject, measure, worst
from .problem import EnumeratedProblem

TOP_P = (0.95, 0.9, 0.7)
SHOWN = 0.9  # in the tables
DRIFT = 0.3
VOCABULARY, LENGTH = 8, 2  # of three tokens too few remain


@dataclass(frozen=True)
class TruncatedRow:
    """One loss, with its clip open, fed in one way: the median over the seeds, and the worst."""

    name: str
    top_p: float
    feed: str
    usual: bool  # is this how its trainer feeds it?
    bias: float
    worst_bias: float


class TruncatedProblems:
    """The problems, made once for all losses."""

    def __init__(self, seeds: int, beta: float, drift: float) -> None:
        self.seeds, self.beta, self.drift = seeds, beta, min(drift, DRIFT)
        self._problem = cache(self._make)

    def _make(self, seed: int, top_p: float, feed: str) -> EnumeratedProblem:
        return EnumeratedProblem(
            "three policies",
            variable=False,
            seed=seed,
            beta=self.beta,
            vocabulary=VOCABULARY,
            length=LENGTH,
            drift=self.drift,
            top_p=top_p,
            feed=feed,
        )

    def rows(self, subject: Subject) -> list[TruncatedRow]:
        rows = []
        for top_p in TOP_P:
            biases: dict[str, list[float]] = {feed: [] for feed in subject.feeds}
            for seed in range(self.seeds):
                rest = self._problem(seed, top_p, "renormalised").at_rest.batch
                at_rest_NT = subject.coefficients(rest, self.beta)
                for feed in subject.feeds:
                    problem = self._problem(seed, top_p, feed)
                    c_NT = subject.coefficients(problem.batch, self.beta)
                    seen = Observation(c_NT, at_rest_NT, unrewarded=None, clipped=None, cut=None)
                    biases[feed].append(measure(subject, problem, subject.objective, seen).bias)
            for feed, all_biases in biases.items():
                usual = feed == subject.feeds[0]
                rows.append(TruncatedRow(subject.name, top_p, feed, usual, median(all_biases), worst(all_biases)))
        return rows
