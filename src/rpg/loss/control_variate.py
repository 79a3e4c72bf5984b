"""A term of zero mean that takes variance away: c·w·∇log π, with c fitted on the other sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from .terms import Terms


def control_variate(x: Terms, weight: Tensor, groups: Tensor | None, score_sq: Tensor | None) -> Tensor:
    """c* = E[w·ω·|s|²] / E[w²·|s|²], for each sequence from the sequences outside its own group. [B,1] or [B]."""
    w = x.ratios.w.detach()
    n = x.valid if score_sq is None else score_sq.masked_fill(x.valid == 0, 0)
    top, bottom = w * weight * n, w.square() * n
    if top.dim() == 2:
        top, bottom = top.sum(-1), bottom.sum(-1)
    if groups is None:
        group = torch.arange(len(top), device=top.device)
    else:
        group = groups.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    sums = top.new_zeros(2, int(group.max()) + 1).index_add_(1, group, torch.stack([top, bottom]))
    others = _sums_of_others(sums)
    c = torch.where(others[1] > 0, others[0] / others[1].clamp(min=1e-30), 0.0)[group]
    return c.unsqueeze(-1) if w.dim() == 2 else c


def _sums_of_others(x: Tensor) -> Tensor:
    """Σ_{j≠i} x_j along the last dimension, from both sides: x_i has no part in it, not even by rounding."""
    before, after = x.cumsum(-1), x.flip(-1).cumsum(-1).flip(-1)
    none = x.new_zeros(*x.shape[:-1], 1)
    return torch.cat([none, before[..., :-1]], -1) + torch.cat([after[..., 1:], none], -1)
