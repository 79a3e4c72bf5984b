"""The head together with the loss: logits are computed once, and no more than a block of tokens' are ever held.

``linear_logp`` gives log-probabilities, forgets the logits, and computes them again when the loss's gradient comes
back: four matrix products. A policy loss needs no more than a token's (or a response's) own log-probability to say what
its gradient is: its denominators are known beforehand. So here a block of tokens goes all the way at once: logits,
log-probabilities, their gradient from the loss, the logits' gradient, and from it that of the hidden states and of the
weight. Three products. What is left for backward() is the body of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import logp
from .logp import LOWEST, _product
from .logp_torch import WIDTH, Slope

COLUMNS = 4 * WIDTH  # of the vocabulary at once, whose logits are in float32 for a moment
MOST_BYTES = 21 * 2**25  # of a block of tokens: all its powers, and the logits of COLUMNS
TILE = 128  # tokens that a matrix product takes at once

GradientOf = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Block's number, logp_N and entropy_N of its tokens -> the loss's gradient for each of them; None: none for entropy"""


class Done(NamedTuple):
    """Of all tokens, in their order; the hidden states' gradient is to be given to backward()."""

    logp_N: Tensor
    entropy_N: Tensor
    d_hidden_NH: Tensor


@torch.no_grad()
def head_with_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    blocks: Sequence[slice],
    gradient_of: GradientOf,
    sum_VH: Tensor | None = None,
    temperature: float = 1.0,
    columns: int = COLUMNS,
) -> Done:
    """What linear_logp gives, and the gradients of the loss whose derivatives ``gradient_of`` tells.

    ``blocks``: the tokens, cut into runs with all that the loss has to see at once; no more than ``rows_at_once`` in
    each, for the memory. ``sum_VH``: where the weight's gradient is added, best in float32; None: it needs none.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
    if columns % WIDTH:
        raise ValueError(f"columns must be a multiple of {WIDTH}; got {columns}")
    hidden_NH, weight_VH, target_N = hidden_NH.detach().contiguous(), weight_VH.detach(), target_N.contiguous()
    most = max((block.stop - block.start for block in blocks), default=0)
    space = _Space(most, weight_VH, columns)
    kernels = logp.fastest(hidden_NH)
    wide_N = hidden_NH.new_zeros(len(hidden_NH), dtype=space.wide)
    done = Done(wide_N, wide_N.clone(), torch.zeros_like(hidden_NH))
    for i, block in enumerate(blocks):
        block_NH, block_target_N = hidden_NH[block], target_N[block]
        sums, top_WN, power_NV = space.of(len(block_NH))
        for first in range(0, len(weight_VH), columns):
            some_VH = weight_VH[first : first + columns]
            logits_NC = space.logits[: len(block_NH), : len(some_VH)]
            _product(block_NH, some_VH.T, logits_NC)
            power_NC = power_NV[:, first : first + columns]
            kernels.observe_powers(sums, top_WN, power_NC, logits_NC, block_target_N, first, 1 / temperature)
        top_N, total_N, lean_N, picked_N = sums
        log_total_N = total_N.log()
        logp_N, entropy_N = picked_N - top_N - log_total_N, log_total_N - lean_N / total_N
        done.logp_N[block], done.entropy_N[block] = logp_N, entropy_N
        d_logp_N, d_entropy_N = gradient_of(i, logp_N, entropy_N)
        d_entropy_N = None if d_entropy_N is None else d_entropy_N.to(space.wide).contiguous()
        by = Slope(top_N + log_total_N, entropy_N, d_logp_N.to(space.wide).contiguous(), d_entropy_N)
        d_logits_NV = kernels.slope_of_powers(by, top_WN, power_NV, logp_N, block_target_N, 1 / temperature)
        torch.mm(d_logits_NV, weight_VH, out=done.d_hidden_NH[block])
        if sum_VH is not None:
            _add_product(d_logits_NV.T, block_NH, sum_VH)
    return done


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """total += a·b; in parts where torch has to hold the product first."""
    whole = a.dtype == total.dtype or not a.is_cuda or logp._adds_into_float32(a.dtype, a.device)
    step = len(a) if whole else 4 * COLUMNS
    for first in range(0, len(a), step):
        some = slice(first, first + step)
        _product(a[some], b, total[some], add=True)


class _Space:
    """Memory that the blocks use one after the other."""

    def __init__(self, tokens: int, weight_VH: Tensor, columns: int):
        vocabulary, device = len(weight_VH), weight_VH.device
        self.vocabulary, self.wide = vocabulary, torch.promote_types(weight_VH.dtype, torch.float32)
        self.logits = torch.empty(tokens, min(columns, vocabulary), dtype=self.wide, device=device)
        self.powers = torch.empty(tokens, _padded(vocabulary), dtype=weight_VH.dtype, device=device)
        self.numbers = torch.empty(4 + -(-vocabulary // WIDTH), tokens, dtype=self.wide, device=device)

    def of(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums as _sums() begins them, room for maxima, and for powers."""
        sums, top_WN = self.numbers[:4, :tokens], self.numbers[4:, :tokens]
        sums.zero_()[0] = LOWEST
        return sums, top_WN, self.powers[:tokens, : self.vocabulary]


def _padded(vocabulary: int) -> int:
    """Rows begin where matrix products like them to."""
    return -(-vocabulary // 64) * 64


def block_bytes(tokens: int, vocabulary: int, element: int, columns: int = COLUMNS) -> int:
    """That a block takes, whose weight has elements of so many bytes."""
    return tokens * (_padded(vocabulary) * element + min(columns, vocabulary) * max(element, 4))


def rows_at_once(vocabulary: int, element: int) -> int:
    """Tokens of a block: in whole tiles, unless the vocabulary is so large that not even one tile fits."""
    rows = max(1, MOST_BYTES // block_bytes(1, vocabulary, element))
    return rows - rows % TILE if rows > TILE else rows


def saves_time(hidden_device: torch.device, dtype: torch.dtype) -> bool:
    """Where matrix products are what takes time, and a chunk of logits is one pass of a kernel."""
    return hidden_device.type == "cuda" and dtype != torch.float64 and logp._triton() is not None
