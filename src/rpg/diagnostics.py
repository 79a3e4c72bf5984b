"""What every loss reports. A metric's name says what it is; averages are over valid tokens unless the name says else.

All estimates are for samples drawn from μ (``old_logp``) and carry the importance weights that this needs, so they mean
the same on- and off-policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import Inputs
from .clipping import Clip
from .objective import Divergence, k3

if TYPE_CHECKING:
    from .losses import PolicyLoss, View

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
QUANTILE_SAMPLE = 65_536  # quantiles of more elements than this are taken over about as many, evenly spaced


@torch.no_grad()
def diagnose(
    loss: PolicyLoss,
    x: Inputs,
    view: View,
    clip: Clip | None,
    kl: Divergence | None,
    correction: Tensor | None,
    entropy_BT: Tensor | None,
) -> dict[str, Tensor]:
    limit, logp = loss.max_log_ratio, x.logp.detach()
    out = {"tokens": x.length.sum(), "sequences": (x.length > 0).sum()}

    # the ratio π/μ at the loss's level
    w, valid = view.ratios.w.detach(), view.valid > 0
    n = view.valid.sum()
    out["ess"] = _effective(w, valid)  # effective sample size, as a fraction of the samples
    out |= {f"ratio/{name}": x for name, x in _quantiles(w, valid).items()}
    out["ratio/max"] = w.masked_fill(~valid, 0).max()
    out["bounded"] = ((view.log_w.detach().abs() > limit) & valid).sum() / n  # exponents held at ±max_log_ratio

    # KL per token, both directions: kl/x is KL(π‖x), kl/x_forward is KL(x‖π)
    log_w = x.log_ratio(logp, x.old).clamp_(-limit, limit)
    token_w = log_w.exp()
    out["kl/old"] = x.mean(token_w * k3(-log_w))
    out["kl/old_forward"] = x.mean(k3(log_w))
    if x.ref is not None:
        log_u, log_v = x.log_ratio(logp, x.ref), x.log_ratio(x.ref, x.old)
        out["bounded_ref"] = x.mean((log_u.abs() > limit) | (log_v.abs() > limit))
        log_u, log_v = log_u.clamp_(-limit, limit), log_v.clamp_(-limit, limit)
        out["kl/ref"] = x.mean(token_w * k3(-log_u))
        out["kl/ref_forward"] = x.mean(log_v.exp_() * k3(log_u))
    out["entropy_sampled"] = -x.mean(token_w * logp * x.mask)  # an estimate from the sampled tokens alone
    if entropy_BT is not None:
        out["entropy"] = x.mean(entropy_BT.detach().float().masked_fill(x.mask == 0, 0))

    # what is cut, and what drives the gradient
    effective = w
    if clip is not None:
        branching = loss._branching(view, clip, kl)
        below, above = (side & valid for side in clip.outside(w, branching))
        dual = above & (branching < 0) if clip.action == "cut" else torch.zeros_like(above)
        out["clip/low"], out["clip/dual"] = below.sum() / n, dual.sum() / n
        out["clip/high"] = (above & ~dual).sum() / n
        out["clip/bound_low"], out["clip/bound_high"] = (w.new_tensor(bound) for bound in clip.bounds())
        effective = clip.weight(w, branching)
    if kl is not None:
        reward = effective * view.advantage
        kl_size = ((loss._omega(view, clip, kl) - reward) * view.valid).abs().sum()
        out["kl/gradient_share"] = kl_size / ((reward * view.valid).abs().sum() + kl_size).clamp(min=1e-30)

    if x.rollout is not None:  # the sampler's engine against the trainer's forward pass
        log_rho = x.log_ratio(x.old, x.rollout)
        out["mismatch/max_log_ratio"] = log_rho.abs().max()
        log_rho = log_rho.clamp_(-limit, limit)
        out["mismatch/kl"] = x.mean(k3(log_rho))  # KL(sampler‖old)
        out["mismatch/ess"] = _effective(log_rho.exp(), x.mask > 0)
    if correction is not None:
        rows = x.mask > 0 if correction.dim() == 2 else x.length > 0
        out["mismatch/dropped"] = ((correction == 0) & rows).sum() / rows.sum()
    return {name: value.float() for name, value in out.items()}


def _effective(w: Tensor, valid: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²)."""
    w = w.masked_fill(~valid, 0)
    return w.sum().square() / (valid.sum() * w.square().sum())


def _quantiles(x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    step = x.numel() // QUANTILE_SAMPLE | 1  # odd, so that it does not fall on the same columns of every row
    chosen = x.flatten()[::step][valid.flatten()[::step]]
    if not len(chosen):
        return {name: x.new_tensor(torch.nan) for name in QUANTILES}
    ordered = chosen.sort().values
    return {name: ordered[round(q * (len(ordered) - 1))] for name, q in QUANTILES.items()}
