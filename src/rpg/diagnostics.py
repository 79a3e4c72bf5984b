"""What every loss reports. A metric's name says what it is; averages are over valid tokens unless the name says else.

All estimates are for samples drawn from μ (``old_logp``) and carry the importance weights that this needs, so they mean
the same on- and off-policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .clipping import Clip
from .objective import Divergence, k3

if TYPE_CHECKING:
    from .losses import PolicyLoss, View

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@torch.no_grad()
def diagnose(
    loss: PolicyLoss,
    view: View,
    clip: Clip | None,
    kl: Divergence | None,
    logp_BT: Tensor,
    old_BT: Tensor,
    ref_BT: Tensor | None,
    rollout_BT: Tensor | None,
    mask_BT: Tensor,
    entropy_BT: Tensor | None,
    mismatch_weight: Tensor | None,
) -> dict[str, Tensor]:
    limit = loss.max_log_ratio
    valid, w = view.valid, view.w.detach()[view.valid]
    logp, old = logp_BT.detach()[mask_BT], old_BT[mask_BT]
    out: dict[str, Tensor] = {"tokens": mask_BT.sum(), "sequences": mask_BT.any(-1).sum()}

    # the ratio π/μ at the loss's level
    n = max(len(w), 1)
    out["ess"] = w.sum().square() / (n * w.square().sum())  # effective sample size, as a fraction of the samples
    ordered = w.sort().values
    for name, q in QUANTILES.items():
        out[f"ratio/{name}"] = ordered[round(q * (n - 1))] if len(w) else w.new_tensor(torch.nan)
    out["ratio/max"] = w.max() if len(w) else w.new_tensor(torch.nan)
    out["bounded"] = (view.log_w.detach()[valid].abs() > limit).float().mean()  # exponents held at ±max_log_ratio

    # KL per token, both directions: kl/x is KL(π‖x), kl/x_forward is KL(x‖π)
    log_w = (logp - old).clamp(-limit, limit)
    token_w = log_w.exp()
    out["kl/old"] = (token_w * k3(-log_w)).mean()
    out["kl/old_forward"] = k3(log_w).mean()
    if ref_BT is not None:
        ref = ref_BT[mask_BT]
        log_u, log_v = (logp - ref).clamp(-limit, limit), (ref - old).clamp(-limit, limit)
        out["kl/ref"] = (token_w * k3(-log_u)).mean()
        out["kl/ref_forward"] = (log_v.exp() * k3(log_u)).mean()
        out["bounded_ref"] = (((logp - ref).abs() > limit) | ((ref - old).abs() > limit)).float().mean()
    if entropy_BT is not None:
        out["entropy"] = entropy_BT.detach()[mask_BT].float().mean()
    out["entropy_sampled"] = -(token_w * logp).mean()  # an estimate from the sampled tokens alone

    # what is cut, and what drives the gradient
    reward, kl_weight = loss._weights(view, clip, kl)
    if clip is not None:
        a = view.advantage if kl is None or not loss.kl_inside or clip.action == "truncate" else None
        a = view.advantage + loss.beta * _per_ratio(kl, view) if a is None else a
        a = a.expand_as(view.w)
        below, above = clip.outside(view.w.detach(), a)
        dual = above & (a < 0) if clip.action == "cut" else torch.zeros_like(above)
        out["clip/low"] = below[valid].float().mean()
        out["clip/high"] = (above & ~dual)[valid].float().mean()
        out["clip/dual"] = dual[valid].float().mean()
        low, high = clip.bounds()
        out["clip/bound_low"], out["clip/bound_high"] = w.new_tensor(low), w.new_tensor(high)
    if kl_weight is not None:
        kl_size = kl_weight.expand_as(view.w)[valid].abs().sum()
        total = kl_size + reward.expand_as(view.w)[valid].abs().sum()
        out["kl/gradient_share"] = kl_size / total.clamp(min=1e-30)

    if rollout_BT is not None:  # the sampler's engine against the trainer's forward pass
        log_rho = old - rollout_BT[mask_BT]
        rho = log_rho.clamp(-limit, limit).exp()
        out["mismatch/kl"] = k3(log_rho.clamp(-limit, limit)).mean()  # KL(sampler‖old)
        out["mismatch/max_log_ratio"] = log_rho.abs().max() if len(log_rho) else log_rho.new_tensor(torch.nan)
        out["mismatch/ess"] = rho.sum().square() / (max(len(rho), 1) * rho.square().sum())
    if mismatch_weight is not None:
        rows = mask_BT if mismatch_weight.dim() == 2 else mask_BT.any(-1)
        out["mismatch/dropped"] = (mismatch_weight[rows] == 0).float().mean()
    return {name: x.float() for name, x in out.items()}


def _per_ratio(kl: Divergence | None, view: View) -> Tensor:
    assert kl is not None
    r = view.ratios(detach=True)
    return kl.weight(r) / r.w
