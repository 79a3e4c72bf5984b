"""Where the gradient is cut (public as ``rpg.clip``).

A clip is four numbers and an action. The numbers are the limits of the ratio w for samples whose advantage is positive
and for those whose advantage is negative; the action says what happens beyond them:

* ``cut``: the sample's gradient is zero (Box, DualClip, RPGClip, KL3, TrustRegion, Adaptive);
* ``truncate``: its weight is held at the limit, its gradient stays (Truncate, Unweighted, Taper).

A rule sees the ratio, the advantage and the probabilities behind them (``Seen``). TrustRegion has a measure of these in
place of limits of the ratio.

Every rule answers ``surrogate`` (the function of w that multiplies −A in a differentiable loss) and ``weight`` (what
multiplies A in front of ∇log π), and weight = d surrogate / d log w. Three rules change the function itself: LogBox
uses log w in place of w, Sigmoid a smooth gate, SoftWeight a gate that falls to zero on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

INF = math.inf


class Limits(NamedTuple):
    """(low, high) of the ratio where the advantage is ≥ 0, and where it is < 0."""

    positive: tuple[float, float]
    negative: tuple[float, float]


class Seen(NamedTuple):
    """What a rule may look at beside the ratio and the advantage, in the ratio's shape. log π = log old + log w."""

    old_logp: Tensor  # of the sampled token; at sequence levels of the response
    state_kl: Tensor | None = None  # KL(old‖π) over the vocabulary, where the call was given it


class Clip:
    """The base of every rule: limits by sign of the advantage, and an action beyond them."""

    action: ClassVar[str] = "cut"
    holds_kl: ClassVar[bool] = True  # may the KL term stand inside this rule?
    looks: ClassVar[tuple[str, ...]] = ()  # at which parts of ``Seen``, without which it cannot decide
    whole_sample: ClassVar[bool] = False  # is the KL term inside this rule, whatever the divergence?

    def limits(self) -> Limits:
        raise NotImplementedError

    def bounds(self) -> tuple[float, float]:
        """(low, high): below ``low`` a negative sample is stopped, above ``high`` a positive one."""
        limits = self.limits()
        return limits.negative[0], limits.positive[1]

    def fit(self, log_w: Tensor, valid: Tensor) -> Clip:
        """The rule for these ratios; only Adaptive depends on them."""
        return self

    def keep(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        """Strictly inside the limits of its sign."""
        positive, negative = (_inside(w, *limits) for limits in self.limits())
        return torch.where(advantage >= 0, positive, negative)

    def outside(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        """(below, above): which samples have reached the limits of their sign or, truncated, have passed them."""
        (low_p, high_p), (low_n, high_n) = self.limits()
        positive = advantage >= 0
        if self.action == "truncate":  # at its limit a ratio is held where it is: nothing changes
            return torch.where(positive, w < low_p, w < low_n), torch.where(positive, w > high_p, w > high_n)
        return torch.where(positive, w <= low_p, w <= low_n), torch.where(positive, w >= high_p, w >= high_n)

    def clamp(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        positive, negative = (w.clamp(*limits) for limits in self.limits())
        return torch.where(advantage >= 0, positive, negative)

    def surrogate(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        if self.action == "truncate":
            raise TypeError(f"{type(self).__name__} has no differentiable form; use estimator='reinforce'")
        return torch.where(self.keep(w, advantage, seen), w, self.clamp(w, advantage, seen).detach())

    def weight(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        return w * self.keep(w, advantage, seen) if self.action == "cut" else self.clamp(w, advantage, seen)


def _inside(w: Tensor, low: float, high: float) -> Tensor:
    """low < w < high; a ratio is positive, so a limit of 0 or infinity asks nothing."""
    if low <= 0:
        return w < high
    return w > low if high == INF else (w > low) & (w < high)


def _check_low_high(low: float | None, high: float | None) -> None:
    if low is not None and not 0 <= low < 1:
        raise ValueError(f"low must be in [0, 1): the lower bound is 1 - low; got {low}. For no lower bound: low=None")
    if high is not None and not high >= 0:
        raise ValueError(f"high must be at least 0: the upper bound is 1 + high; got {high}. For no bound: high=None")


def _check_dual(c: float | None, high: float | None) -> None:
    if c is not None and not c > 1 + (high or 0):
        raise ValueError(f"c must exceed the upper bound 1 + high = {1 + (high or 0):g}; got {c}. For none: c=None")


def _range(low: float | None, high: float | None) -> tuple[float, float]:
    return (0.0 if low is None else 1 - low), (INF if high is None else 1 + high)


@dataclass(frozen=True)
class Box(Clip):
    """PPO's clip, −min(w·A, clip(w, 1−low, 1+high)·A); high > low is DAPO's clip-higher."""

    low: float | None = 0.2
    high: float | None = 0.2

    def __post_init__(self) -> None:
        _check_low_high(self.low, self.high)

    def limits(self) -> Limits:
        low, high = _range(self.low, self.high)
        return Limits((0.0, high), (low, INF))


@dataclass(frozen=True)
class DualClip(Clip):
    """Box, and a negative sample is also cut once w ≥ c (Ye et al. 2020; RPG Algorithm 1)."""

    low: float | None = 0.2
    high: float | None = 0.28
    c: float | None = 10.0

    def __post_init__(self) -> None:
        _check_low_high(self.low, self.high)
        _check_dual(self.c, self.high)

    def limits(self) -> Limits:
        low, high = _range(self.low, self.high)
        return Limits((0.0, high), (low, INF if self.c is None else self.c))


@dataclass(frozen=True)
class RPGClip(DualClip):
    """RPG-Style Clip (Algorithm 2): DualClip on the sign of the regularised advantage ω/w, the whole sample cut.

    With A_reg = ω/w: for A_reg ≥ 0 the gradient is zero once w ≥ 1+high; for A_reg < 0 once w ≤ 1−low or w ≥ c.
    Elsewhere it is −ω, untouched.
    """

    whole_sample: ClassVar[bool] = True


KL3_FORMS = ("k3", "k3-inverse", "k3-weighted", "k2")


@dataclass(frozen=True)
class KL3(Clip):
    """The allowed ratios are a level set of a divergence, not a box (unified clipping, arXiv 2602.05494).

    form ``k3``: k3(r) ≤ δ; ``k3-inverse``: k3(1/r) ≤ δ; ``k3-weighted``: r·k3(1/r) ≤ δ; ``k2``: (log r)²/2 ≤ δ,
    with k3(x) = x − 1 − log x. All bounds are closed-form (Lambert W).
    """

    delta: float = 0.05
    form: str = "k3"
    c: float | None = None

    def __post_init__(self) -> None:
        if not 1e-12 <= self.delta <= 100:
            raise ValueError(f"delta must be in [1e-12, 100], the divergence allowed; got {self.delta}")
        if self.form not in KL3_FORMS:
            raise ValueError(f"form must be one of {', '.join(KL3_FORMS)}; got {self.form!r}")
        _check_dual(self.c, self.bounds()[1] - 1)

    def limits(self) -> Limits:
        delta = self.delta
        if self.form == "k2":
            low, high = math.exp(-math.sqrt(2 * delta)), math.exp(math.sqrt(2 * delta))
        elif self.form == "k3-weighted":  # 1 − r + r·log r ≤ δ; at r = 0 it is 1, so from δ = 1 on nothing is too low
            x = (delta - 1) / math.e
            low, high = math.exp(1 + lambert_w(x, -1)) if delta < 1 else 0.0, math.exp(1 + lambert_w(x, 0))
        else:
            x = -math.exp(-(1 + delta))
            low, high = -lambert_w(x, 0), -lambert_w(x, -1)
            if self.form == "k3-inverse":
                low, high = 1 / high, 1 / low
        return Limits((0.0, high), (low, INF if self.c is None else self.c))


MEASURES = ("tv", "kl", "kl-reverse", "state-kl")


@dataclass(frozen=True)
class TrustRegion(Clip):
    """Samples are allowed where the policy has moved little, measured on the probabilities themselves.

    A sample is cut when the measure exceeds ``delta`` and a step along its advantage would take π further away from
    old: w > 1 for A ≥ 0, w < 1 for A < 0 (unified clipping, arXiv 2602.05494; DPPO, arXiv 2602.04879). With p = old
    and q = π of the sampled token, all other tokens counted as one:

    ``tv``: |p − q|;  ``kl``: KL(old‖π) = p·log(p/q) + (1−p)·log((1−p)/(1−q));  ``kl-reverse``: KL(π‖old);
    ``state-kl``: KL(old‖π) over the whole vocabulary, which the call is given as ``state_kl``.
    """

    delta: float = 0.15
    measure: str = "tv"

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta must be positive, the distance allowed; got {self.delta}")
        if self.measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}; got {self.measure!r}")

    @property
    def looks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("state_kl",) if self.measure == "state-kl" else ("old_logp",)

    def limits(self) -> Limits:
        """None of the ratio."""
        return Limits((0.0, INF), (0.0, INF))

    def distance(self, w: Tensor, seen: Seen) -> Tensor:
        if self.measure == "state-kl":
            assert seen.state_kl is not None
            return seen.state_kl
        old, new = seen.old_logp.detach(), seen.old_logp.detach() + w.detach().log()
        if self.measure == "tv":
            return (old.exp() - new.exp()).abs()
        return _binary_kl(old, new) if self.measure == "kl" else _binary_kl(new, old)

    def _passed(self, w: Tensor, seen: Seen | None) -> Tensor:
        if seen is None:
            raise ValueError(f"{type(self).__name__} needs the old log-probabilities beside the ratio")
        return self.distance(w, seen) > self.delta

    def keep(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        below, above = self.outside(w, advantage, seen)
        return ~(below | above)

    def outside(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        passed, positive = self._passed(w, seen), advantage >= 0
        return passed & ~positive & (w < 1), passed & positive & (w > 1)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between two coins of these log-probabilities; one that is certain is taken as almost so."""
    log_p, log_q = log_p.clamp(max=-1e-6), log_q.clamp(max=-1e-6)
    log_not_p, log_not_q = (-torch.expm1(log_p)).log(), (-torch.expm1(log_q)).log()
    return log_p.exp() * (log_p - log_q) + log_not_p.exp() * (log_not_p - log_not_q)


@dataclass(frozen=True)
class Adaptive(Clip):
    """The widest log-symmetric bounds e^∓k for which the clamped ratios still meet a target, chosen at every step.

    target_ess: their effective sample size (Σw)²/(n·Σw²) is at least this fraction.
    target_kl: their mean k3(w), an estimate of KL(old‖π), is at most this.
    k stays within [narrowest, widest]; the bounds in force are reported as ``clip/bound_low`` and ``clip/bound_high``.
    Bounds come from the ratios at hand: with micro-batches, call ``fit`` once on the whole step's ratios and pass the
    rule that it returns.
    """

    target_ess: float | None = None
    target_kl: float | None = None
    narrowest: float = 0.02
    widest: float = 1.0
    c: float | None = 10.0
    whole_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.target_ess is None) == (self.target_kl is None):
            raise ValueError("give exactly one of target_ess and target_kl")
        if self.target_ess is not None and not 0 < self.target_ess < 1:
            raise ValueError(f"target_ess must be in (0, 1), a fraction of the samples; got {self.target_ess}")
        if self.target_kl is not None and not self.target_kl > 0:
            raise ValueError(f"target_kl must be positive, in nats per token; got {self.target_kl}")
        if not 0 < self.narrowest < self.widest:
            raise ValueError(f"give 0 < narrowest < widest; got narrowest={self.narrowest}, widest={self.widest}")
        _check_dual(self.c, math.exp(self.widest) - 1)

    def limits(self) -> Limits:
        raise TypeError("Adaptive has no bounds before it has seen ratios: call fit(log_w, valid)")

    @torch.no_grad()
    def fit(self, log_w: Tensor, valid: Tensor) -> Clip:
        x = log_w[valid.bool()].float()
        if x.numel() == 0:
            k = self.widest
        else:
            within, beyond = self.narrowest, self.widest
            if self._meets(x, beyond):
                within = beyond
            for _ in range(24):  # both targets are monotone in k
                middle = (within + beyond) / 2
                within, beyond = (middle, beyond) if self._meets(x, middle) else (within, middle)
            k = within
        return RPGClip(low=-math.expm1(-k), high=math.expm1(k), c=self.c)

    def _meets(self, log_w: Tensor, k: float) -> bool:
        clamped = log_w.clamp(-k, k)
        if self.target_kl is not None:
            return bool((torch.expm1(clamped) - clamped).mean() <= self.target_kl)
        assert self.target_ess is not None
        w = clamped.exp()
        return bool(w.sum().square() >= self.target_ess * w.numel() * w.square().sum())


@dataclass(frozen=True)
class Truncate(Clip):
    """The ratio is held at its bound and the gradient stays: −clip(w)·A·∇log π. Upper bound only is CISPO."""

    low: float | None = 0.2
    high: float | None = 0.28
    action: ClassVar[str] = "truncate"

    def __post_init__(self) -> None:
        _check_low_high(self.low, self.high)

    def limits(self) -> Limits:
        return Limits(_range(self.low, self.high), _range(self.low, self.high))


@dataclass(frozen=True)
class Unweighted(Clip):
    """No importance weight, −A·∇log π: right on-policy only (RLOO, ReMax, GPG as published)."""

    action: ClassVar[str] = "truncate"
    holds_kl: ClassVar[bool] = False  # with w̄ = 1 there would be none of it

    def limits(self) -> Limits:
        return Limits((1.0, 1.0), (1.0, 1.0))


@dataclass(frozen=True)
class Taper(Clip):
    """TOPR: a positive sample counts 1, a negative one min(w, 1), so a response already unlikely fades out."""

    action: ClassVar[str] = "truncate"
    holds_kl: ClassVar[bool] = False

    def limits(self) -> Limits:
        return Limits((1.0, 1.0), (0.0, 1.0))


@dataclass(frozen=True)
class LogBox(Box):
    """CPGD: Box on the log-ratio, −min(log w·A, clip(log w)·A): cut like PPO, weighted 1 instead of w."""

    holds_kl: ClassVar[bool] = False

    def surrogate(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        return torch.where(self.keep(w, advantage, seen), w, self.clamp(w, advantage, seen).detach()).log()

    def weight(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        return self.keep(w, advantage, seen).to(w.dtype)


@dataclass(frozen=True)
class Sigmoid(Clip):
    """SAPO: a smooth gate (4/τ)·sigmoid(τ(w−1)) in place of w, sharper for negative advantages."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    holds_kl: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError(f"tau must be positive; got {self.tau_positive}, {self.tau_negative}")

    def limits(self) -> Limits:
        return Limits((0.0, INF), (0.0, INF))

    def _tau(self, advantage: Tensor) -> Tensor:
        negative = (advantage <= 0).to(advantage.dtype)
        return self.tau_positive + (self.tau_negative - self.tau_positive) * negative

    def surrogate(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        tau = self._tau(advantage)
        return torch.sigmoid(tau * (w - 1)) * 4 / tau

    def weight(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        gate = torch.sigmoid(self._tau(advantage) * (w - 1))
        return 4 * gate * (1 - gate) * w


@dataclass(frozen=True)
class SoftWeight(Clip):
    """VESPO: the weight w^k·e^{λ(1−w)} in place of w, 1 at w = 1 and falling to 0 on both sides (arXiv 2602.10693)."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    action: ClassVar[str] = "truncate"
    holds_kl: ClassVar[bool] = False

    def __post_init__(self) -> None:
        values = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        if not min(values) > 0:
            raise ValueError(f"k and lambda must be positive; got {', '.join(map(str, values))}")

    def limits(self) -> Limits:
        return Limits((0.0, INF), (0.0, INF))

    def weight(self, w: Tensor, advantage: Tensor, seen: Seen | None = None) -> Tensor:
        positive = advantage >= 0
        k, rate = torch.zeros_like(w), torch.zeros_like(w)  # in the precision of w, which two numbers have not
        k = torch.where(positive, k + self.k_positive, k + self.k_negative)
        rate = torch.where(positive, rate + self.lambda_positive, rate + self.lambda_negative)
        return (k * w.log() + rate * (1 - w)).exp()


def lambert_w(x: float, branch: int) -> float:
    """Lambert's W (w·e^w = x) on its real branches 0 and −1, for x ≥ −1/e (branch −1: x < 0), by Halley's iteration."""
    if x < -1 / math.e or (branch == -1 and x >= 0) or branch not in (0, -1):
        raise ValueError(f"lambert_w has no real value at x={x}, branch={branch}")
    p = math.sqrt(max(0.0, 2 * (math.e * x + 1)))  # distance from the branch point, where W = −1
    if branch == 0:
        w = -1 + p - p * p / 3 if x < -0.25 else math.log1p(x)
    elif x < -0.25:
        w = -1 - p - p * p / 3
    else:
        w = math.log(-x) - math.log(-math.log(-x))
    for _ in range(50):
        e = math.exp(w)
        f = w * e - x
        if w == -1 or f == 0:
            break
        step = f / (e * (w + 1) - (w + 2) * f / (2 * w + 2))
        w -= step
        if abs(step) <= 1e-15 * abs(w):
            break
    return w


@torch.no_grad()
def curvature_keep(
    logits_NV: Tensor,
    hidden_NH: Tensor,
    action_N: Tensor,
    advantage_N: Tensor,
    lr: float,
    adam_scale_VH: Tensor | None = None,
    delta_fisher: float = 1e-4,
    delta_hessian: float = 1e-2,
    top_k: int = 50,
) -> Tensor:
    """CAPO's token gate (arXiv 2510.00819), [N] bool over tokens: pass it to a loss as ``keep``, reshaped to [B,T].

    It predicts, at the last layer, how far one optimiser step d on this token alone would move the policy. Kept if
    m_F < delta_fisher and |m_H| < delta_hessian, where for v = e_a − π, g = A(v⊗h), d the Adam-scaled g and q = d·h,
    m_F = ½lr²(v·q)² and m_H = lr⟨g,d⟩ + ½lr²A[(v·q)² − qᵀ(diag π − ππᵀ)q], over the top_k tokens and the action.
    ``adam_scale_VH`` is 1/(√v̂+ε) of the head's second moments; None is plain SGD.
    """
    probs_NV = torch.softmax(logits_NV.float(), -1)
    index_NK = probs_NV.topk(min(top_k, probs_NV.shape[-1]), -1).indices
    extra_N1 = action_N.unsqueeze(-1)
    seen_N1 = (index_NK == extra_N1).any(-1, keepdim=True)
    index_NK = torch.cat([index_NK, extra_N1], -1)
    counted_NK = torch.cat([torch.ones_like(index_NK[:, :-1], dtype=torch.bool), ~seen_N1], -1)
    p_NK = probs_NV.gather(-1, index_NK) * counted_NK
    v_NK = ((index_NK == extra_N1).float() - p_NK) * counted_NK
    h2_NH = hidden_NH.float().square()
    if adam_scale_VH is None:
        s_NK = h2_NH.sum(-1, keepdim=True).expand_as(v_NK)
    else:
        s_NK = torch.einsum("nkh,nh->nk", adam_scale_VH.float()[index_NK], h2_NH)
    a_N = advantage_N.float()
    q_NK = a_N.unsqueeze(-1) * v_NK * s_NK
    vq_N = (v_NK * q_NK).sum(-1)
    gd_N = (a_N.unsqueeze(-1).square() * v_NK.square() * s_NK).sum(-1)
    qfq_N = (p_NK * q_NK.square()).sum(-1) - (p_NK * q_NK).sum(-1).square()
    m_fisher_N = 0.5 * lr**2 * vq_N.square()
    m_hessian_N = lr * gd_N + 0.5 * lr**2 * a_N * (vq_N.square() - qfq_N)
    return (m_fisher_N < delta_fisher) & (m_hessian_N.abs() < delta_hessian)
