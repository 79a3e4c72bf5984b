"""Blocks of response tokens that go through the head and the loss together, smaller than what the body takes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    tokens: slice  # of a micro-batch's response tokens, row by row
    rows: slice  # the responses that they are of; the first and the last perhaps in part


LossOf = Callable[[Block, Tensor, Tensor, Tensor], Tensor]
"""A block, and of its responses logp_BT, entropy_BT and which tokens are the block's -> its part of the loss"""


def cut(lengths: Sequence[int], most: int, whole: bool) -> list[Block] | None:
    """Responses of these lengths in blocks of at most ``most`` tokens; ``whole``: none is cut, and there are no blocks
    (None) if one is longer than that. Blocks of responses that may be cut differ by a token."""
    ends = [0, *accumulate(lengths)]
    total = ends[-1]
    if total == 0:
        return None
    if whole:
        places = _between_responses(ends, most)
    else:
        count = -(-total // most)
        places = [total * i // count for i in range(count + 1)]
    if any(stop - start > most for start, stop in pairwise(places)):
        return None
    return [
        Block(slice(start, stop), slice(bisect_right(ends, start) - 1, bisect_left(ends, stop)))
        for start, stop in pairwise(places)
    ]


def _between_responses(ends: Sequence[int], most: int) -> list[int]:
    """As many responses as go into each block."""
    places = [0]
    for before, end in pairwise(ends):
        if end - places[-1] > most and before > places[-1]:
            places.append(before)
    return [*places, ends[-1]] if ends[-1] > places[-1] else places


def in_rows(x_N: Tensor, place_N: Tensor, shape: torch.Size) -> Tensor:
    """[B,T] in float32, zero where there is no response token. ``place_N`` is in the flattened [B,T]."""
    return torch.zeros(shape.numel(), device=x_N.device).index_copy(0, place_N, x_N.float()).view(shape)


def gradients(
    block: Block, loss_of: LossOf, logp_N: Tensor, entropy_N: Tensor, place_N: Tensor, mask_BT: Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Of a block's part of the loss, for its log-probabilities and, if asked for, its entropies. ``place_N`` and
    ``mask_BT`` are those of the micro-batch."""
    mask_BT, first = mask_BT[block.rows], block.rows.start * mask_BT.shape[1]
    where_N = place_N[block.tokens] - first
    here_BT = torch.zeros_like(mask_BT).view(-1).index_fill_(0, where_N, True).view(mask_BT.shape)
    logp_N = logp_N.detach().requires_grad_()
    entropy_N = entropy_N.detach().requires_grad_(entropy)
    with torch.enable_grad():
        rows = in_rows(logp_N, where_N, mask_BT.shape), in_rows(entropy_N, where_N, mask_BT.shape)
        loss = loss_of(block, *rows, here_BT)
    asked = (logp_N, entropy_N) if entropy else (logp_N,)
    d_logp_N, *d_entropy_N = torch.autograd.grad(loss, asked, allow_unused=True)
    return torch.zeros_like(logp_N) if d_logp_N is None else d_logp_N, next(iter(d_entropy_N), None)
