"""The expected gradient of a loss, from the coefficient it puts on every ∇log π, against the exact one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .problem import Batch, Problem

Coefficients = Callable[[Batch, float], Tensor]


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


@dataclass(frozen=True)
class Measurement:
    """One subject on one problem against one objective. Sizes are relative to |∇J|."""

    name: str
    source: str
    divergence: str
    objective: str
    scenario: str
    lengths: str
    seed: int
    bias: float  # |E[g] − ∇J| / |∇J|
    cosine: float
    variance: float  # E|g − E[g]|² / |∇J|²
    kl_bias: float | None  # the same with all rewards zero: the KL term alone; None without a KL term or where ∇D = 0
    clipped_bias: float | None = None
    cut: float | None = None  # share of tokens (under μ) that the clip cuts off from the reward
    left: float | None = None  # |expected gradient that remains on those tokens| / |∇J|


def expected_gradient(problem: Problem, c_NT: Tensor) -> Tensor:
    return torch.einsum("n,nt,ntp->p", problem.probability_N, c_NT, problem.score_NTP)


def relative(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm())


def calibrate(subject: Subject, problem: Problem, objective: str) -> float:
    """The scale of the loss's denominator, fitted where every method must agree: π = μ = ref, ∇J = ∇E[R]."""
    rest = problem.at_rest
    got = expected_gradient(rest, subject.coefficients(rest.batch, problem.beta))
    meant = -rest.objective_gradient(objective, "none")
    scale = float(got @ meant / (got @ got).clamp(min=1e-300))
    return scale if scale > 0 else 1.0


def cut_tokens(clipped: Coefficients, plain: Coefficients, b: Batch, beta: float) -> Tensor:
    """[N,T] bool: tokens whose gradient no longer answers to the reward, though it does without the clip."""
    more = replace(b, advantages_N=b.advantages_N * (1 + 1e-3))
    answers = [(c(more, beta) - c(b, beta)).abs() for c in (clipped, plain)]
    return (answers[0] < 0.01 * answers[1]) & b.mask_NT


def measure(subject: Subject, problem: Problem, objective: str | None = None) -> Measurement:
    objective = objective or subject.objective
    b, scale = problem.batch, calibrate(subject, problem, objective)
    descent = -problem.objective_gradient(objective, subject.divergence)
    size = float(descent.norm())
    c_NT = scale * subject.coefficients(b, problem.beta)
    mean = expected_gradient(problem, c_NT)
    sample_NP = torch.einsum("nt,ntp->np", c_NT, problem.score_NTP)
    second_moment = float(problem.probability_N @ sample_NP.square().sum(-1))

    kl_bias = None
    if subject.divergence != "none":
        kl_descent = -problem.objective_gradient(objective, subject.divergence, rewarded=False)
        if kl_descent.norm() > 1e-9 * size:
            unrewarded = replace(b, advantages_N=torch.zeros_like(b.advantages_N))
            kl_c_NT = scale * subject.coefficients(unrewarded, problem.beta)
            kl_bias = relative(expected_gradient(problem, kl_c_NT) - kl_descent, kl_descent)

    clipped_bias = cut = left = None
    if subject.clipped is not None:
        clipped_NT = scale * subject.clipped(b, problem.beta)
        cut_NT = cut_tokens(subject.clipped, subject.coefficients, b, problem.beta)
        clipped_bias = relative(expected_gradient(problem, clipped_NT) - descent, descent)
        weight_NT = problem.probability_N.unsqueeze(-1) * b.mask_NT
        cut = float((weight_NT * cut_NT).sum() / weight_NT.sum())
        left = float(expected_gradient(problem, clipped_NT * cut_NT).norm()) / size
    return Measurement(
        name=subject.name,
        source=subject.source,
        divergence=subject.divergence,
        objective=objective,
        scenario=problem.scenario,
        lengths="variable" if problem.variable else "fixed",
        seed=problem.seed,
        bias=relative(mean - descent, descent),
        cosine=float(torch.nn.functional.cosine_similarity(mean, descent, dim=0)),
        variance=(second_moment - float(mean @ mean)) / size**2,
        kl_bias=kl_bias,
        clipped_bias=clipped_bias,
        cut=cut,
        left=left,
    )
