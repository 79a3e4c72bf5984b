"""The expected gradient of a loss, from the coefficient it puts on every ∇log π, against the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import EnumeratedBatch, EnumeratedProblem

Coefficients = Callable[[EnumeratedBatch, float], Tensor]


def worst(values: Iterable[float]) -> float:
    """The largest; nan, if there is one, is worse than any number."""
    return max(values, key=lambda x: math.inf if math.isnan(x) else x)


@dataclass(frozen=True)
class Subject:
    """A loss to audit: (batch, β) -> c_NT = d loss / d log π of every token, times the loss's own denominator."""

    name: str
    source: str
    divergence: str  # of the objective it claims to ascend
    objective: str  # "token", "sequence" or "geometric": where its own level is exact
    coefficients: Coefficients  # with its clip out of the way
    clipped: Coefficients | None = None
    note: str = ""
    dtype: torch.dtype = torch.float64
    gated: bool = False  # does it silence tokens wherever the ratios are?
    feeds: tuple[str, ...] = ("renormalised",)  # of problem.FEEDS: what its trainer hands it, the usual one first


@dataclass(frozen=True)
class Measurement:
    """One subject on one problem against one objective. Sizes are relative to |∇J|."""

    bias: float  # |E[g] − ∇J| / |∇J|
    cosine: float
    variance: float  # E|g − E[g]|² / |∇J|²
    kl_bias: float | None  # the same with all rewards zero: the KL term alone; None without a KL term or where ∇D = 0
    kl_variance: float | None  # over |β·∇D|²
    clipped_bias: float | None  # with the clip in place
    cut: float | None  # share of tokens (under μ) that the clip cuts off from the reward
    left: float | None  # |expected gradient that remains on those tokens| / |∇J|


@dataclass(frozen=True)
class Observation:
    """Everything a subject was asked on one problem; all [N,T], in the loss's own scale."""

    plain: Tensor
    at_rest: Tensor  # where π = μ = ref
    unrewarded: Tensor | None  # all rewards zero; None without a KL term
    clipped: Tensor | None
    cut: Tensor | None  # bool


def observe(subject: Subject, problem: EnumeratedProblem) -> Observation:
    b, beta = problem.batch, problem.beta
    plain = subject.coefficients(b, beta)
    unrewarded = clipped = cut = None
    if subject.divergence != "none":
        unrewarded = subject.coefficients(b.with_rewards_times(0.0), beta)
    if subject.clipped is not None:
        clipped = subject.clipped(b, beta)
        cut = cut_off(subject, b, beta, plain, clipped)
    return Observation(plain, subject.coefficients(problem.at_rest.batch, beta), unrewarded, clipped, cut)


def cut_off(subject: Subject, b: EnumeratedBatch, beta: float, plain_NT: Tensor, clipped_NT: Tensor) -> Tensor:
    """Which tokens' gradients no longer answer to the reward, [N,T]: they do without the clip, if it can be opened."""
    more = b.with_rewards_times(1 + 1e-3)
    answer_NT = (subject.coefficients(more, beta) - plain_NT).abs()
    if subject.clipped is None:
        return (answer_NT == 0) & b.mask_NT
    return ((subject.clipped(more, beta) - clipped_NT).abs() < 0.01 * answer_NT) & b.mask_NT


def expected_gradient(problem: EnumeratedProblem, c_NT: Tensor) -> Tensor:
    return c_NT.flatten() @ problem.weighted_score_KP


def total_variance(problem: EnumeratedProblem, c_NT: Tensor) -> float:
    """E|g − E[g]|² of one response's gradient."""
    gradient_NP = torch.einsum("nt,ntp->np", c_NT, problem.score_NTP)
    centred_NP = gradient_NP - expected_gradient(problem, c_NT)
    return float(problem.probability_N @ centred_NP.square().sum(-1))


def calibrate(seen: Observation, problem: EnumeratedProblem, objective: str) -> float:
    """The scale of the loss's denominator, fitted where every method must agree: π = μ = ref, ∇J = ∇E[R]."""
    got = expected_gradient(problem.at_rest, seen.at_rest)
    meant = -problem.at_rest.objective_gradient(objective, "none")
    scale = float(got @ meant / (got @ got).clamp(min=1e-300))
    return scale if scale > 0 else 1.0


def measure(
    subject: Subject, problem: EnumeratedProblem, objective: str | None = None, seen: Observation | None = None
) -> Measurement:
    objective = objective or subject.objective
    seen = seen or observe(subject, problem)
    scale = calibrate(seen, problem, objective)
    descent = -problem.objective_gradient(objective, subject.divergence)
    size = float(descent.norm())
    mean = expected_gradient(problem, scale * seen.plain)

    def bias(c_NT: Tensor, exact: Tensor) -> float:
        return float((expected_gradient(problem, scale * c_NT) - exact).norm() / exact.norm())

    kl_bias = kl_variance = clipped_bias = cut = left = None
    if seen.unrewarded is not None:
        kl_descent = -problem.objective_gradient(objective, subject.divergence, rewarded=False)
        if kl_descent.norm() > 1e-9 * size:
            kl_bias = bias(seen.unrewarded, kl_descent)
            kl_variance = total_variance(problem, scale * seen.unrewarded) / float(kl_descent @ kl_descent)
    if seen.clipped is not None and seen.cut is not None:
        clipped_bias = bias(seen.clipped, descent)
        weight_NT = problem.probability_N.unsqueeze(-1) * problem.mask_NT
        cut = float((weight_NT * seen.cut).sum() / weight_NT.sum())
        left = float(expected_gradient(problem, scale * seen.clipped * seen.cut).norm()) / size
    return Measurement(
        bias=bias(seen.plain, descent),
        cosine=float(torch.nn.functional.cosine_similarity(mean, descent, dim=0)),
        variance=total_variance(problem, scale * seen.plain) / size**2,
        kl_bias=kl_bias,
        kl_variance=kl_variance,
        clipped_bias=clipped_bias,
        cut=cut,
        left=left,
    )
