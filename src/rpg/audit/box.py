"""In the box: a loss as shipped, its clip on, where the policies are so close that no ratio leaves the clip's bounds.

There the clip must do nothing: each token's coefficient is that of the loss without a clip, and so are bias and noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from .measure import Coefficients, Measurement, Observation, Subject, cut_off, measure, worst
from .problem import SCENARIOS, EnumeratedProblem

DRIFT = 0.025  # ratios between 0.9 and 1.1
NARROWER = (1.0, 0.1, 0.01, 0.001)  # times DRIFT, for clips narrower than that (GSPO's bounds are 3e-4)
OFF_POLICY = tuple(SCENARIOS)[1:]
SAME = 1e-9


@dataclass(frozen=True)
class BoxRow:
    """One loss as shipped: medians over the seeds, and the worst of everything that should be zero."""

    name: str
    scenario: str
    drift: float
    bias: float
    kl_bias: float | None
    kl_variance: float | None  # E|g − E[g]|² over |β·∇D|², all rewards zero
    apart: float | None  # max |c − c without the clip| / max |c without the clip|; None without a clip, or with a gate
    worst: float  # of bias, kl_bias and apart, over the seeds


@dataclass(frozen=True)
class _Seen:
    measured: Measurement
    apart: float | None
    cut: bool  # does a token no longer answer to the reward?


class BoxProblems:
    """The problems, made once for all losses."""

    def __init__(self, seeds: int, beta: float) -> None:
        self.seeds, self.beta = seeds, beta
        self._problems = cache(self._make)

    def _make(self, scenario: str, drift: float) -> list[EnumeratedProblem]:
        return [EnumeratedProblem(scenario, False, seed, beta=self.beta, drift=drift) for seed in range(self.seeds)]

    def rows(self, subject: Subject) -> list[BoxRow]:
        for factor in NARROWER:
            drift = factor * DRIFT
            seen = {s: [_look(subject, problem) for problem in self._problems(s, drift)] for s in OFF_POLICY}
            if not any(one.cut for ones in seen.values() for one in ones):
                break
        return [_row(subject.name, scenario, drift, ones) for scenario, ones in seen.items()]


def _look(subject: Subject, problem: EnumeratedProblem) -> _Seen:
    b, beta = problem.batch, problem.beta
    shipped: Coefficients = subject.clipped or subject.coefficients
    plain_NT = subject.coefficients(b, beta)
    c_NT = shipped(b, beta) if subject.clipped else plain_NT
    at_rest_NT = subject.coefficients(problem.at_rest.batch, beta)
    unrewarded_NT = None if subject.divergence == "none" else shipped(b.with_rewards_times(0.0), beta)
    seen = Observation(c_NT, at_rest_NT, unrewarded_NT, clipped=None, cut=None)
    if subject.gated:  # not by its bounds: closer policies change nothing
        return _Seen(measure(subject, problem, subject.objective, seen), apart=None, cut=False)
    apart = float((c_NT - plain_NT).abs().max() / plain_NT.abs().max()) if subject.clipped else None
    clip_did_nothing = apart is not None and apart <= SAME
    cut = not clip_did_nothing and bool(cut_off(subject, b, beta, plain_NT, c_NT).any())
    return _Seen(measure(subject, problem, subject.objective, seen), apart, cut)


def _row(name: str, scenario: str, drift: float, seen: Sequence[_Seen]) -> BoxRow:
    measured = [one.measured for one in seen]
    aparts = [one.apart for one in seen if one.apart is not None]
    kl_biases = [m.kl_bias for m in measured if m.kl_bias is not None]
    biases = [m.bias for m in measured]
    return BoxRow(
        name=name,
        scenario=scenario,
        drift=drift,
        bias=median(biases),
        kl_bias=_middle(kl_biases),
        kl_variance=_middle(m.kl_variance for m in measured if m.kl_variance is not None),
        apart=_middle(aparts),
        worst=worst([*biases, *kl_biases, *aparts]),
    )


def _middle(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return median(numbers) if numbers else None
