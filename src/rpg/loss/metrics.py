"""What every loss reports. A metric's name says what it is; averages are over valid tokens unless the name says else.

All estimates are for samples drawn from μ (``old_logp``) and carry the importance weights that this needs, so they mean
the same on- and off-policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .clip import Clip
from .inputs import Inputs
from .objective import at_level, k3
from .terms import Terms

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
QUANTILE_SAMPLE = 16_384  # quantiles of more elements than this are taken over about as many, evenly spaced
IN_SHORT = ("ess", "kl/old", "clip/low", "clip/high")  # what a printed LossOutput shows of them


@dataclass(frozen=True)
class LossOutput:
    """``loss`` has the gradient; ``metrics`` are detached 0-d tensors, computed when first read."""

    loss: Tensor
    _diagnose: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        return self._diagnose()

    def __repr__(self) -> str:
        """LossOutput(loss=0.1234, 17 metrics: ess=0.98, kl/old=0.0059, …)"""
        loss = f"{self.loss.item():.4g}" if self.loss.dim() == 0 else f"{[*self.loss.shape]}"
        shown = [f"{name}={float(self.metrics[name]):.3g}" for name in IN_SHORT if name in self.metrics]
        return f"LossOutput(loss={loss}, {len(self.metrics)} metrics: {', '.join([*shown, '…'])})"


@torch.no_grad()
def measure(
    terms: Terms,
    x: Inputs,
    level: str,
    rho_level: str | None,
    to_go_BT: Tensor | None,
    correction: Tensor | None,
    entropy_BT: Tensor | None,
    token_clip: Clip | None = None,
) -> dict[str, Tensor]:
    """``rho_level``: of the mismatch rule. ``to_go_BT``: the KL term's part of ω, where it is a reward-to-go."""
    limit, logp, mask, clip = terms.ratios.limit, x.logp.detach(), x.mask, terms.clip
    out = {"tokens": x.length.sum(), "sequences": (x.length > 0).sum()}
    of_samples = _Mean(terms.valid)
    of_tokens = of_samples if terms.valid is mask else _Mean(mask)

    # the ratio π/μ at the loss's level
    w, valid = terms.ratios.w.detach(), terms.valid
    counted = w * valid
    largest = _max(counted)
    out["ess"] = _effective(counted, largest, of_samples.total)  # effective sample size, as a fraction of the samples
    out |= {f"ratio/{name}": value for name, value in _quantiles(w, valid).items()}
    out["ratio/max"] = largest
    out["bounded"] = of_samples(terms.log_w.detach().abs() > limit)  # exponents held at ±max_log_ratio

    if to_go_BT is not None:  # its running products of ratios are exponents too
        out["bounded_to_go"] = of_tokens(x.log_ratio(logp, x.old).cumsum(-1).abs() > limit)

    # KL per token, both directions: kl/x is KL(π‖x), kl/x_forward is KL(x‖π)
    log_w = (logp - x.old).clamp_(-limit, limit)
    token_w = w if level == "token" else log_w.exp()
    out["kl/old"] = of_tokens(token_w * k3(-log_w))
    out["kl/old_forward"] = of_tokens(k3(log_w))
    if x.ref is not None:
        log_u, log_v = logp - x.ref, x.ref - x.old
        level_u, level_v = (at_level(part, mask, level) for part in (log_u, log_v))
        out["bounded_ref"] = of_samples((level_u.abs() > limit) | (level_v.abs() > limit))
        log_u, log_v = log_u.clamp_(-limit, limit), log_v.clamp_(-limit, limit)
        out["kl/ref"] = of_tokens(token_w * k3(-log_u))
        out["kl/ref_forward"] = of_tokens(log_v.exp_() * k3(log_u))
    out["entropy_sampled"] = -of_tokens(token_w * logp)  # an estimate from the sampled tokens alone
    if entropy_BT is not None:
        out["entropy"] = of_tokens(entropy_BT.detach().masked_fill(mask == 0, 0))

    # what is cut, and what drives the gradient
    if clip is not None:
        out |= _cut(clip, clip.outside(w, terms.signed_advantage, terms.seen), terms.signed_advantage, of_samples)
    elif token_clip is not None:
        out |= _cut(
            token_clip, token_clip.outside(token_w, terms.advantage[:, None]), terms.advantage[:, None], of_tokens
        )
    if terms.kl is not None or to_go_BT is not None:
        reward = (terms.weight * terms.advantage).abs()
        if to_go_BT is None:
            sizes = of_samples(reward), of_samples(terms.omega_kl().expand_as(w).abs())
        else:
            token_reward = reward if reward.dim() == 2 else reward.unsqueeze(-1).expand_as(mask)
            sizes = of_tokens(token_reward), of_tokens(to_go_BT.abs())
        out["kl/gradient_share"] = sizes[1] / (sizes[0] + sizes[1]).clamp(min=1e-30)

    if x.rollout is not None:  # the sampler's engine against the trainer's forward pass
        log_rho = x.log_ratio(x.old, x.rollout)
        out["mismatch/max_log_ratio"] = _max(log_rho.abs())
        if rho_level is not None:
            exponent = at_level(log_rho, mask, rho_level)
            of_exponents = of_tokens if exponent.dim() == 2 else _Mean(x.length > 0)
            out["mismatch/bounded"] = of_exponents(exponent.abs() > limit)
        log_rho = log_rho.clamp_(-limit, limit)
        out["mismatch/kl"] = of_tokens(k3(log_rho))  # KL(sampler‖old)
        rho = log_rho.exp_() * mask
        out["mismatch/ess"] = _effective(rho, _max(rho), of_tokens.total)
    if correction is not None:
        out["mismatch/dropped"] = (of_tokens if correction.dim() == 2 else _Mean(x.length > 0))(correction == 0)
    return {name: value.float() for name, value in out.items()}


def _cut(clip: Clip, outside: tuple[Tensor, Tensor], advantage: Tensor, mean: _Mean) -> dict[str, Tensor]:
    """Shares of the samples below and above their limits, and those limits."""
    below, above = outside
    dual = above & (advantage < 0) if clip.action == "cut" else torch.zeros_like(above)
    out = {"low": mean(below), "dual": mean(dual), "high": mean(above & ~dual)}
    low, high = clip.bounds()
    out["bound_low"] = mean.total.new_tensor(low)
    if math.isfinite(high):  # no upper bound, no metric: infinity is no JSON
        out["bound_high"] = mean.total.new_tensor(high)
    return {f"clip/{name}": value for name, value in out.items()}


class _Mean:
    """Over the elements of weight 1, which are counted once for all means."""

    def __init__(self, weight: Tensor):
        self.weight = weight.flatten().float() if weight.dtype == torch.bool else weight.flatten()
        self.total = self.weight.sum()

    def __call__(self, values: Tensor) -> Tensor:
        return values.flatten().to(self.weight.dtype).dot(self.weight) / self.total


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_tensor(math.nan)


def _effective(w: Tensor, largest: Tensor, count: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²), relative to the largest w, so that no square overflows."""
    w = w / largest
    return w.sum().square() / (count * w.square().sum())


def _quantiles(x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    step = x.numel() // QUANTILE_SAMPLE | 1  # odd, so that it does not fall on the same columns of every row
    chosen = x.flatten()[::step][valid.flatten()[::step] > 0]
    if not len(chosen):
        return {name: x.new_tensor(torch.nan) for name in QUANTILES}
    ordered = chosen.sort().values
    return {name: ordered[round(q * (len(ordered) - 1))] for name, q in QUANTILES.items()}
