"""What linear_logp does with a chunk of logits, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slope(NamedTuple):
    """What a chunk's gradient needs of each token: normalisers, values, and the gradients that came in."""

    norm_N: Tensor  # log p = z − norm
    entropy_N: Tensor
    d_logp_N: Tensor
    d_entropy_N: Tensor | None  # None: nobody asked
    ref_norm_N: Tensor | None = None  # log q = z_ref − ref_norm
    kl_N: Tensor | None = None
    d_kl_N: Tensor | None = None

    def of(self, tokens: slice) -> Slope:
        return Slope(*(None if x is None else x[tokens] for x in self))  # type: ignore[arg-type]


def observe(sums: Tensor, logits_NC: Tensor, ref_NC: Tensor | None, target_N: Tensor, first: int, scale: float) -> None:
    """Take the columns first, first + 1, … into the sums (see _sums). z = logits·scale; logits are lost."""
    top_N, total_N, lean_N, picked_N = sums[:4]
    z_NC = logits_NC.mul_(scale)
    inside_N, place_N = _place(target_N, first, z_NC.shape[1])
    picked_N.copy_(torch.where(inside_N, z_NC.gather(1, place_N.unsqueeze(1)).squeeze(1), picked_N))
    gap_NC = None if ref_NC is None else z_NC - ref_NC.mul_(scale)
    new_N = torch.maximum(top_N, z_NC.amax(1))
    drop_N = top_N - new_N
    fade_N = drop_N.exp()
    e_NC = z_NC.sub_(new_N.unsqueeze(1)).exp()
    lean_N.addcmul_(total_N, drop_N).mul_(fade_N).add_(z_NC.mul_(e_NC).sum(1))
    total_N.mul_(fade_N).add_(e_NC.sum(1))
    top_N.copy_(new_N)
    if ref_NC is not None and gap_NC is not None:
        ref_top_N, ref_total_N, gap_N = sums[4:]
        gap_N.mul_(fade_N).add_(gap_NC.mul_(e_NC).sum(1))
        new_N = torch.maximum(ref_top_N, ref_NC.amax(1))
        ref_total_N.mul_((ref_top_N - new_N).exp()).add_(ref_NC.sub_(new_N.unsqueeze(1)).exp_().sum(1))
        ref_top_N.copy_(new_N)


def slope(
    by: Slope, logits_NC: Tensor, ref_NC: Tensor | None, target_N: Tensor, first: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """The gradient for a chunk of logits, which are lost.

    ∂logp/∂z = 1[target] − p,  ∂entropy/∂z = −p·(log p + entropy),  ∂KL/∂z = p·(log p − log q − KL)
    """
    logp_NC = logits_NC.mul_(scale).sub_(by.norm_N.unsqueeze(1))
    p_NC = logp_NC.exp()
    pull = by.d_logp_N.unsqueeze(1)
    if by.d_entropy_N is not None:
        pull = pull + by.d_entropy_N.unsqueeze(1) * (logp_NC + by.entropy_N.unsqueeze(1))
    if ref_NC is not None and by.d_kl_N is not None and by.ref_norm_N is not None and by.kl_N is not None:
        logq_NC = ref_NC.mul_(scale).sub_(by.ref_norm_N.unsqueeze(1))
        pull = pull - by.d_kl_N.unsqueeze(1) * (logp_NC - logq_NC - by.kl_N.unsqueeze(1))
    inside_N, place_N = _place(target_N, first, p_NC.shape[1])
    d_NC = p_NC.mul_(pull).neg_()
    d_NC.scatter_add_(1, place_N.unsqueeze(1), (by.d_logp_N * inside_N).unsqueeze(1))
    return d_NC.mul_(scale).to(dtype)


def _place(target_N: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether the target is among the columns first … first + width − 1, and where (somewhere valid if it is not)."""
    place_N = target_N - first
    return (place_N >= 0) & (place_N < width), place_N.clamp(0, width - 1)


# ---- logits that are computed once (head_with_loss.py) ---------------------------------------------------------------

WIDTH = 2048  # columns whose powers are relative to one maximum


def observe_powers(
    sums: Tensor, top_WN: Tensor, power_NC: Tensor, logits_NC: Tensor, target_N: Tensor, first: int, scale: float
) -> None:
    """``observe``, and e^(z − top) of every logit into power_NC, with ``top`` the maximum of its row until there.

    A power is as exact as its type is, however small it is beside the others: a rounded logit would not be. ``first``
    is a multiple of WIDTH; row w of top_WN belongs to columns WIDTH·w to WIDTH·(w + 1).
    """
    for start in range(0, logits_NC.shape[1], WIDTH):
        some = slice(start, start + WIDTH)
        z_NC = logits_NC[:, some] * scale
        observe(sums, logits_NC[:, some], None, target_N, first + start, scale)
        top_N = top_WN[(first + start) // WIDTH].copy_(sums[0])
        power_NC[:, some] = z_NC.sub_(top_N.unsqueeze(1)).exp_()


def slope_of_powers(
    by: Slope, top_WN: Tensor, power_NV: Tensor, logp_N: Tensor, target_N: Tensor, scale: float
) -> Tensor:
    """``slope`` of whole rows from their powers, in whose place it is written. At the target, where the gradient is a
    small difference as soon as the policy is sure, it is that of the exact log-probability."""
    up_N, up_entropy_N = by.d_logp_N, by.d_entropy_N
    for start in range(0, power_NV.shape[1], WIDTH):
        e_NC = power_NV[:, start : start + WIDTH]
        share_N1 = (top_WN[start // WIDTH] - by.norm_N).unsqueeze(1)
        wide_NC, pull = e_NC.to(by.norm_N.dtype), up_N.unsqueeze(1)
        if up_entropy_N is not None:  # p·log p of a power that is zero is zero: its logarithm may be anything
            logp_NC = torch.where(wide_NC > 0, wide_NC, 1.0).log_().add_(share_N1)
            pull = pull + up_entropy_N.unsqueeze(1) * logp_NC.add_(by.entropy_N.unsqueeze(1))
        e_NC.copy_(wide_NC * share_N1.exp() * pull * -scale)
    pull_N = up_N if up_entropy_N is None else up_N + up_entropy_N * (logp_N + by.entropy_N)
    at_target_N = (up_N - logp_N.exp() * pull_N) * scale
    return power_NV.scatter_(1, target_N.unsqueeze(1), at_target_N.unsqueeze(1).to(power_NV.dtype))
