"""Small autoregressive policies, every response enumerated, and the objectives computed exactly, in float64.

Nothing here knows a surrogate loss: the objectives are sums over all responses (or all states), differentiated by
autograd. What a loss's gradient is compared with does not come from the formulas under test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

SCENARIOS = {
    "on-policy": "μ = π, ref elsewhere",
    "off-policy, ref = old": "μ = ref, π has moved: the paper's setting",
    "three policies": "π, μ and ref all differ",
}


@dataclass(frozen=True)
class EnumeratedBatch:
    """Every response once, padded on the right; all log-probabilities detached."""

    tokens_NT: Tensor
    logits_NTV: Tensor  # the current policy's, at each position
    logp_NT: Tensor  # the current policy π
    old_logp_NT: Tensor  # the sampling policy μ
    ref_logp_NT: Tensor  # the anchor of the KL
    advantages_N: Tensor
    mask_NT: Tensor


@dataclass(frozen=True)
class EnumeratedProblem:
    """Three policies over ``vocabulary`` tokens and responses of at most ``length`` of them, sharing their parameters.

    A policy's logits in a state are a random feature vector times θ. With ``variable`` lengths token 0 ends a response.
    """

    scenario: str
    variable: bool
    seed: int
    beta: float = 0.1
    vocabulary: int = 3
    length: int = 3
    drift: float = 0.5

    @cached_property
    def _draws(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        states, size = len(self.prefixes), 2 * self.vocabulary
        features_SF = torch.randn(states, size, generator=rng, dtype=torch.float64) / size**0.5
        start, step, away = (torch.randn(size, self.vocabulary, generator=rng, dtype=torch.float64) for _ in range(3))
        theta, mu, ref = start + self.drift * step, start, start + self.drift * away
        if self.scenario == "on-policy":
            mu = theta
        elif self.scenario == "off-policy, ref = old":
            ref = mu
        elif self.scenario == "at rest":
            mu = ref = theta
        elif self.scenario != "three policies":
            raise ValueError(f"unknown scenario {self.scenario!r}. Known: {', '.join(SCENARIOS)}")
        rewards_N = torch.randn(len(self.tokens_NT), generator=rng, dtype=torch.float64)
        return features_SF, theta, mu, ref, rewards_N

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Every state, the empty one first."""
        alive = range(1, self.vocabulary) if self.variable else range(self.vocabulary)
        return [p for n in range(self.length) for p in product(alive, repeat=n)]

    @cached_property
    def _responses(self) -> list[tuple[int, ...]]:
        if not self.variable:
            return list(product(range(self.vocabulary), repeat=self.length))
        return [(*p, 0) for p in self.prefixes] + [
            (*p, a) for p in self.prefixes if len(p) == self.length - 1 for a in range(1, self.vocabulary)
        ]

    @cached_property
    def mask_NT(self) -> Tensor:
        return torch.tensor([[t < len(y) for t in range(self.length)] for y in self._responses])

    @cached_property
    def tokens_NT(self) -> Tensor:
        return torch.tensor([list(y) + [0] * (self.length - len(y)) for y in self._responses])

    @cached_property
    def state_NT(self) -> Tensor:
        index = {p: i for i, p in enumerate(self.prefixes)}
        return torch.tensor([[index.get(y[:t], 0) for t in range(self.length)] for y in self._responses])

    def logits_SV(self, theta: Tensor) -> Tensor:
        return self._draws[0] @ theta

    def logp_NT(self, theta: Tensor) -> Tensor:
        logp_SV = self.logits_SV(theta).log_softmax(-1)
        return logp_SV[self.state_NT, self.tokens_NT].masked_fill(~self.mask_NT, 0)

    @property
    def theta(self) -> Tensor:
        return self._draws[1]

    @property
    def rewards_N(self) -> Tensor:
        return self._draws[4]

    @cached_property
    def batch(self) -> EnumeratedBatch:
        _, theta, mu, ref, rewards_N = self._draws
        return EnumeratedBatch(
            tokens_NT=self.tokens_NT,
            logits_NTV=self.logits_SV(theta)[self.state_NT],
            logp_NT=self.logp_NT(theta),
            old_logp_NT=self.logp_NT(mu),
            ref_logp_NT=self.logp_NT(ref),
            advantages_N=rewards_N,
            mask_NT=self.mask_NT,
        )

    @cached_property
    def probability_N(self) -> Tensor:
        """μ of each response: the weights of every expectation over samples."""
        return self.batch.old_logp_NT.sum(-1).exp()

    @cached_property
    def score_NTP(self) -> Tensor:
        """∇θ log π of every token, flattened over the parameters; zero under the mask."""
        jacobian: Tensor = torch.autograd.functional.jacobian(self.logp_NT, self.theta)  # type: ignore[no-untyped-call]
        return jacobian.flatten(2)

    # ---- the objectives -------------------------------------------------------------------------------------------

    @cached_property
    def at_rest(self) -> EnumeratedProblem:
        """The same current policy, with μ = ref = π: there every method must give ∇E[R]."""
        return replace(self, scenario="at rest")

    @cached_property
    def _gradients(self) -> dict[tuple[str, str, bool], Tensor]:
        return {}

    def objective_gradient(self, kind: str, divergence: str, rewarded: bool = True) -> Tensor:
        """∇J of one kind of objective, flattened, by autograd on the exact sum.

        Without ``rewarded`` all rewards are zero, which leaves −β·∇D.
        """
        key = (kind, divergence, rewarded)
        if key not in self._gradients:
            theta = self.theta.clone().requires_grad_()
            rewards_N = self.rewards_N if rewarded else torch.zeros_like(self.rewards_N)
            value = {
                "sequence": self._sequence,
                "token": self._token,
                "geometric": self._geometric,
                "geometric, token KL": self._geometric_token_kl,
            }[kind]
            (gradient,) = torch.autograd.grad(value(theta, divergence, rewards_N), theta)
            self._gradients[key] = gradient.flatten()
        return self._gradients[key]

    def _sequence(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """E_π[R] − β·D over whole responses."""
        pi_N, ref_N = self.logp_NT(theta).sum(-1).exp(), self.batch.ref_logp_NT.sum(-1).exp()
        return (pi_N * rewards_N).sum() - self.beta * _kl(pi_N, ref_N, divergence)

    def _token(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """States and continuations frozen at μ: Σ_h μ(h)·{E_{a~π}[Q^μ(h,a)] − β·D(π(·|h), ref(·|h))}."""
        pi_SV = self.logits_SV(theta).softmax(-1)
        reach_SV = torch.zeros_like(pi_SV)  # μ(h,a): the probability that a response passes through h and then a
        weighted_SV = torch.zeros_like(pi_SV)  # the same times the mean reward of what follows, μ(h,a)·Q^μ(h,a)
        for n, t in self.mask_NT.nonzero().tolist():
            state, token = self.state_NT[n, t], self.tokens_NT[n, t]
            reach_SV[state, token] += self.probability_N[n]
            weighted_SV[state, token] += self.probability_N[n] * rewards_N[n]
        q_SV = weighted_SV / reach_SV
        visits_S = reach_SV.sum(-1)
        return (visits_S * ((pi_SV * q_SV).sum(-1) - self.beta * self._kl_S(theta, divergence))).sum()

    def _kl_S(self, theta: Tensor, divergence: str) -> Tensor:
        pi_SV, ref_SV = self.logits_SV(theta).softmax(-1), self.logits_SV(self._draws[3]).softmax(-1)
        return torch.stack([_kl(p, r, divergence) for p, r in zip(pi_SV, ref_SV, strict=True)])

    def _geometric(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """What the sequence-mean level optimises: each response's probability replaced by its |y|-th root.

        With p̃ = π^(1/|y|) and so on, E_μ[(p̃/μ̃)·R] − β·D(p̃, r̃), where D sums over responses weighted by μ/μ̃.
        """
        length_N = self.mask_NT.sum(-1)
        logp_NT, b = self.logp_NT(theta), self.batch
        pi_N, mu_N, ref_N = ((x.sum(-1) / length_N).exp() for x in (logp_NT, b.old_logp_NT, b.ref_logp_NT))
        measure_N = self.probability_N / mu_N
        return (measure_N * pi_N * rewards_N).sum() - self.beta * _kl(pi_N, ref_N, divergence, measure_N)

    def _geometric_token_kl(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """GSPO with a KL term as others add it: the geometric reward, and the KL of a response's states, averaged."""
        length_N = self.mask_NT.sum(-1)
        visits_S = torch.zeros(len(self.prefixes), dtype=theta.dtype)
        for n, t in self.mask_NT.nonzero().tolist():
            visits_S[self.state_NT[n, t]] += self.probability_N[n] / length_N[n]
        return self._geometric(theta, "none", rewards_N) - self.beta * (visits_S * self._kl_S(theta, divergence)).sum()


def _kl(p: Tensor, q: Tensor, divergence: str, measure: Tensor | float = 1.0) -> Tensor:
    """D between the current policy p and the reference q, summed over a finite set."""
    if divergence == "none":
        return torch.zeros((), dtype=p.dtype)
    first, second = (p, q) if divergence in ("rkl", "urkl") else (q, p)
    terms = first * (first / second).log()
    if divergence.startswith("u"):
        terms = terms - first + second
    return (measure * terms).sum()
