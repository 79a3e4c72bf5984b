"""Log-probability and entropy from hidden states and the head, a chunk of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25  # logits held at once: 128 MiB in float32


def linear_logp(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(h·Wᵀ/τ) at the targets, and the entropy of that distribution, [N] each in float32, with gradients."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
    rows = max(1, CHUNK_ELEMENTS // weight_VH.shape[0])
    if len(hidden_NH) <= rows:
        return _chunk(hidden_NH, weight_VH, target_N, temperature)
    parts = [
        checkpoint(_chunk, h, weight_VH, t, temperature, use_reentrant=False)
        for h, t in zip(torch.split(hidden_NH, rows), torch.split(target_N, rows), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _chunk(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_NV = ((hidden_NH @ weight_VH.T).float() / temperature).log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1), entropy_N
