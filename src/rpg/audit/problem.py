"""Small autoregressive policies, every response enumerated, and the objectives computed exactly, in float64.

Nothing here knows a surrogate loss: the objectives are sums over all responses (or all states), differentiated by
autograd. What a loss's gradient is compared with does not come from the formulas under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

SCENARIOS = {
    "on-policy": "μ = π, ref elsewhere",
    "off-policy, ref = old": "μ = ref, π has moved: the paper's setting",
    "three policies": "π, μ and ref all differ",
}
AT_REST = "at rest"

SMALL_DRIFT = 0.05  # at which, and below, every token's ratio π/μ stays inside ±20 %
LARGEST_LOG_RATIO = 0.18  # of them: between 0.83 and 1.2

# What a trainer hands to its loss where the sampler drew from a truncated μ, as with top-p.
FEEDS = {
    "renormalised": "current, old and ref over the tokens that the sampler could draw",
    "recomputed": "current, old and ref over the whole vocabulary",
    "engine": "current and ref over the whole vocabulary, old as the sampler drew it",
}


@dataclass(frozen=True)
class EnumeratedBatch:
    """Every response once, padded on the right; all log-probabilities detached.

    Under the mask stands what a model gives for padding, which depends on its parameters as all else does.
    """

    tokens_NT: Tensor
    logits_NTV: Tensor  # the current policy's, at each position
    logp_NT: Tensor  # the current policy π
    old_logp_NT: Tensor  # the sampling policy μ
    ref_logp_NT: Tensor  # the anchor of the KL
    advantages_N: Tensor
    mask_NT: Tensor

    def with_rewards_times(self, factor: float) -> EnumeratedBatch:
        return replace(self, advantages_N=factor * self.advantages_N)


@dataclass(frozen=True)
class EnumeratedProblem:
    """Three policies over ``vocabulary`` tokens and responses of at most ``length`` of them, sharing their parameters.

    A policy's logits in a state are a random feature vector times θ. With ``variable`` lengths token 0 ends a response.

    With ``top_p`` below 1 samples come from the smallest set of μ's likeliest tokens that has this probability. The
    policies of the objective are then π, μ and ref, each normalised over that set; ``feed`` says what a loss is given.
    """

    scenario: str
    variable: bool
    seed: int
    beta: float = 0.1
    vocabulary: int = 3
    length: int = 3
    drift: float = 0.5
    top_p: float = 1.0
    feed: str = "renormalised"
    kept_from: EnumeratedProblem | None = None  # whose kept tokens these are; None: this problem's μ decides

    @cached_property
    def _draws(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        states, size = len(self.prefixes), 2 * self.vocabulary
        features_SF = torch.randn(states, size, generator=rng, dtype=torch.float64) / size**0.5
        start, step, away = (torch.randn(size, self.vocabulary, generator=rng, dtype=torch.float64) for _ in range(3))
        rewards_N = torch.randn(len(self._complete_responses), generator=rng, dtype=torch.float64)
        ended_EF = torch.randn(len(self._ended), size, generator=rng, dtype=torch.float64) / size**0.5
        features_SF = torch.cat([features_SF, ended_EF])
        if self.drift <= SMALL_DRIFT:
            step = step * self._kept_inside(features_SF @ start, features_SF @ step)
        theta, mu, ref = start + self.drift * step, start, start + self.drift * away
        if self.scenario == "on-policy":
            mu = theta
        elif self.scenario == "off-policy, ref = old":
            ref = mu
        elif self.scenario == AT_REST:
            mu = ref = theta
        elif self.scenario != "three policies":
            raise ValueError(f"unknown scenario {self.scenario!r}. Known: {', '.join(SCENARIOS)}")
        return features_SF, theta, mu, ref, rewards_N

    def _kept_inside(self, start_SV: Tensor, step_SV: Tensor) -> float:
        """What a small step is multiplied by where a ratio would leave ±20 %; 1 where none does."""
        kept_SV, factor = self._likely_SV(start_SV), 1.0
        while True:
            largest = 0.0
            for allowed_SV in (kept_SV, torch.ones_like(kept_SV)):  # as the feeds normalise
                was_SV, is_SV = (
                    x.masked_fill(~allowed_SV, -torch.inf).log_softmax(-1)[kept_SV]
                    for x in (start_SV, start_SV + factor * self.drift * step_SV)
                )
                largest = max(largest, float((is_SV - was_SV).abs().max()))
            if largest <= LARGEST_LOG_RATIO:
                return factor
            factor *= 0.99 * LARGEST_LOG_RATIO / largest

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Every state that a token is drawn in, the empty one first."""
        alive = range(1, self.vocabulary) if self.variable else range(self.vocabulary)
        return [p for n in range(self.length) for p in product(alive, repeat=n)]

    @cached_property
    def _complete_responses(self) -> list[tuple[int, ...]]:
        if not self.variable:
            return list(product(range(self.vocabulary), repeat=self.length))
        return [(*p, 0) for p in self.prefixes] + [
            (*p, a) for p in self.prefixes if len(p) == self.length - 1 for a in range(1, self.vocabulary)
        ]

    @cached_property
    def _ended(self) -> list[tuple[int, ...]]:
        """The states behind the end of a response, where a model is still asked for the padding, token 0."""
        padded = ((y, t) for y in self._complete_responses for t in range(len(y), self.length))
        return [(*y, *[0] * (t - len(y))) for y, t in padded]

    @cached_property
    def _state_of(self) -> dict[tuple[int, ...], int]:
        return {p: i for i, p in enumerate((*self.prefixes, *self._ended))}

    @cached_property
    def kept_SV(self) -> Tensor:
        """The tokens that the sampler can draw in each state."""
        if self.kept_from is not None:
            return self.kept_from.kept_SV
        return self._likely_SV(self.logits_SV(self._draws[2]))

    def _likely_SV(self, logits_SV: Tensor) -> Tensor:
        mu_SV, order_SV = logits_SV.softmax(-1).sort(-1, descending=True)
        kept_SV = mu_SV.cumsum(-1) - mu_SV < self.top_p
        kept_SV[len(self.prefixes) :] = True  # padding is not drawn
        return torch.zeros_like(order_SV, dtype=torch.bool).scatter(-1, order_SV, kept_SV)

    @cached_property
    def _possible_N(self) -> list[bool]:
        """Which of the complete responses the sampler can draw."""
        kept = self.kept_SV.tolist()
        return [all(kept[self._state_of[y[:t]]][a] for t, a in enumerate(y)) for y in self._complete_responses]

    @cached_property
    def _responses(self) -> list[tuple[int, ...]]:
        return [y for y, possible in zip(self._complete_responses, self._possible_N, strict=True) if possible]

    @cached_property
    def mask_NT(self) -> Tensor:
        return torch.tensor([[t < len(y) for t in range(self.length)] for y in self._responses])

    @cached_property
    def tokens_NT(self) -> Tensor:
        return torch.tensor([list(y) + [0] * (self.length - len(y)) for y in self._responses])

    @cached_property
    def state_NT(self) -> Tensor:
        return torch.tensor(
            [[self._state_of[tuple(y[:t])] for t in range(self.length)] for y in self.tokens_NT.tolist()]
        )

    def logits_SV(self, theta: Tensor) -> Tensor:
        return self._draws[0] @ theta

    def over_kept(self, logits_SV: Tensor) -> Tensor:
        """Log-probabilities over the tokens that the sampler can draw; −inf elsewhere."""
        return logits_SV.masked_fill(~self.kept_SV, -torch.inf).log_softmax(-1)

    def over_all(self, logits_SV: Tensor) -> Tensor:
        return logits_SV.log_softmax(-1)

    def logp_SV(self, theta: Tensor) -> Tensor:
        return self.over_kept(self.logits_SV(theta))

    def logp_NT(self, theta: Tensor) -> Tensor:
        """Zero under the mask, so that its sum is the log-probability of the response."""
        return self._padded_logp_NT(theta, EnumeratedProblem.over_kept).masked_fill(~self.mask_NT, 0)

    def _padded_logp_NT(self, theta: Tensor, over: Normalise) -> Tensor:
        return over(self, self.logits_SV(theta))[self.state_NT, self.tokens_NT]

    @property
    def theta(self) -> Tensor:
        return self._draws[1]

    @cached_property
    def rewards_N(self) -> Tensor:
        return self._draws[4][self._possible_N]

    @cached_property
    def batch(self) -> EnumeratedBatch:
        """What the loss is given."""
        _, theta, mu, ref, _ = self._draws
        current, old = (partial(self._padded_logp_NT, over=over) for over in FED_OVER[self.feed])
        return EnumeratedBatch(
            tokens_NT=self.tokens_NT,
            logits_NTV=self._fed_logits_SV()[self.state_NT],
            logp_NT=current(theta),
            old_logp_NT=old(mu),
            ref_logp_NT=current(ref),
            advantages_N=self.rewards_N,
            mask_NT=self.mask_NT,
        )

    def _fed_logits_SV(self) -> Tensor:
        """The current policy's; what it is not normalised over has no probability, though a finite logit."""
        logits_SV = self.logits_SV(self.theta)
        return logits_SV.masked_fill(~self.kept_SV, -1e4) if self.feed == "renormalised" else logits_SV

    @property
    def inside_clip(self) -> bool:
        """Does every token's ratio stay inside ±20 %?"""
        ratio_NT = (self.batch.logp_NT - self.batch.old_logp_NT).exp()
        return bool(((ratio_NT - 1).abs() < 0.2)[self.mask_NT].all())

    @cached_property
    def probability_N(self) -> Tensor:
        """μ of each response: the weights of every expectation over samples."""
        return self.logp_NT(self._draws[2]).sum(-1).exp()

    @cached_property
    def score_NTP(self) -> Tensor:
        """∇θ of the log π that the loss is given, flattened over the parameters; under the mask that of the padding."""
        features_SF, logits_SV = self._draws[0], self.logits_SV(self.theta).requires_grad_()
        logp_SV = FED_OVER[self.feed][0](self, logits_SV)
        # The states do not share logits, so one backward pass serves a token in all of them.
        gradients = [
            torch.autograd.grad(logp_SV[:, token].sum(), logits_SV, retain_graph=True)[0]
            for token in range(self.vocabulary)
        ]
        by_logits_NTV = torch.stack(gradients, 1)[self.state_NT, self.tokens_NT]
        score_NTFV = features_SF[self.state_NT].unsqueeze(-1) * by_logits_NTV.unsqueeze(-2)
        return score_NTFV.flatten(2)

    @cached_property
    def weighted_score_KP(self) -> Tensor:
        """μ of the response times its ∇ log π, [N·T, P]."""
        return (self.probability_N[:, None, None] * self.score_NTP).flatten(0, 1)

    # ---- the objectives -------------------------------------------------------------------------------------------

    @cached_property
    def at_rest(self) -> EnumeratedProblem:
        """The same responses and current policy, with μ = ref = π: there every method must give ∇E[R]."""
        return replace(self, scenario=AT_REST, feed="renormalised", kept_from=self)

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
        pi_N, ref_N = (self.logp_NT(x).sum(-1).exp() for x in (theta, self._draws[3]))
        return (pi_N * rewards_N).sum() - self.beta * _kl(pi_N, ref_N, divergence)

    def _token(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """States and continuations frozen at μ: Σ_h μ(h)·{E_{a~π}[Q^μ(h,a)] − β·D(π(·|h), ref(·|h))}."""
        reach_SV = self._passing(self.probability_N)  # μ(h,a): a response passes through h and then a
        weighted_SV = self._passing(
            self.probability_N * rewards_N
        )  # μ(h,a)·Q^μ(h,a), Q the mean reward of what follows
        q_SV = torch.where(reach_SV > 0, weighted_SV / reach_SV, 0.0)
        gain_S = (self.logp_SV(theta).exp() * q_SV).sum(-1)
        return (reach_SV.sum(-1) * (gain_S - self.beta * self._kl_S(theta, divergence))).sum()

    def _passing(self, weight_N: Tensor) -> Tensor:
        """The total weight of the responses that pass through a state and then a token."""
        total_SV = torch.zeros(len(self._state_of), self.vocabulary, dtype=weight_N.dtype)
        weight_NT = weight_N.unsqueeze(-1).expand(self.mask_NT.shape)
        passed = (self.state_NT[self.mask_NT], self.tokens_NT[self.mask_NT])
        return total_SV.index_put(passed, weight_NT[self.mask_NT], accumulate=True)

    def _kl_S(self, theta: Tensor, divergence: str) -> Tensor:
        pi_SV, ref_SV = (  # where both are one, nothing is added
            torch.where(self.kept_SV, self.logp_SV(x).exp(), 1.0) for x in (theta, self._draws[3])
        )
        return _kl(pi_SV, ref_SV, divergence)

    def _geometric(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """What the sequence-mean level optimises: each response's probability replaced by its |y|-th root.

        With p̃ = π^(1/|y|) and so on, E_μ[(p̃/μ̃)·R] − β·D(p̃, r̃), where D sums over responses weighted by μ/μ̃.
        """
        length_N = self.mask_NT.sum(-1)
        policies = (theta, *self._draws[2:4])
        pi_N, mu_N, ref_N = ((self.logp_NT(x).sum(-1) / length_N).exp() for x in policies)
        measure_N = self.probability_N / mu_N
        return (measure_N * pi_N * rewards_N).sum() - self.beta * _kl(pi_N, ref_N, divergence, measure_N)

    def _geometric_token_kl(self, theta: Tensor, divergence: str, rewards_N: Tensor) -> Tensor:
        """GSPO with a KL term as others add it: the geometric reward, and the KL of a response's states, averaged."""
        length_N = self.mask_NT.sum(-1)
        visits_S = self._passing(self.probability_N / length_N).sum(-1)
        return self._geometric(theta, "none", rewards_N) - self.beta * (visits_S * self._kl_S(theta, divergence)).sum()


Normalise = Callable[[EnumeratedProblem, Tensor], Tensor]

# feed -> over which tokens π and ref are normalised, and over which μ
FED_OVER: dict[str, tuple[Normalise, Normalise]] = {
    "renormalised": (EnumeratedProblem.over_kept, EnumeratedProblem.over_kept),
    "recomputed": (EnumeratedProblem.over_all, EnumeratedProblem.over_all),
    "engine": (EnumeratedProblem.over_all, EnumeratedProblem.over_kept),
}


def _kl(p: Tensor, q: Tensor, divergence: str, measure: Tensor | float = 1.0) -> Tensor:
    """D between the current policy p and the reference q, summed over a finite set, the last dimension."""
    if divergence == "none":
        return torch.zeros(p.shape[:-1], dtype=p.dtype)
    first, second = (p, q) if divergence in ("rkl", "urkl") else (q, p)
    terms = first * (first / second).log()
    if divergence.startswith("u"):
        terms = terms - first + second
    return (measure * terms).sum(-1)
