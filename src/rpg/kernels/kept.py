"""Log-probabilities over the tokens that truncated sampling kept at each state, and over no others.

The sets are ragged: laid end to end, never [tokens, vocabulary]. Where they are small, the logits of their tokens alone
are computed, from gathered rows of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = {"cuda": 2**24, "cpu": 2**20}  # numbers of gathered rows at once
WORTH = {"cuda": 2048, "cpu": 256}  # a gathered logit costs as much as so many of a product of matrices
HIDDEN = -1e30  # the logit of a token outside: finite, so that 0 times it is 0


@dataclass(frozen=True)
class Kept:
    """Of N states the tokens that could be drawn, the drawn one among them."""

    ids_K: Tensor  # int32, a set after the other
    count_N: Tensor  # int64, tokens in each set

    @property
    def size(self) -> int:
        return len(self.count_N)

    def to(self, device: torch.device) -> Kept:
        return self if self.ids_K.device == device else Kept(self.ids_K.to(device), self.count_N.to(device))

    @cached_property
    def row_K(self) -> Tensor:
        """The state of each."""
        number_N = torch.arange(self.size, device=self.count_N.device)
        return number_N.repeat_interleave(self.count_N, output_size=len(self.ids_K))

    def split(self, rows: int) -> list[Kept]:
        """Some states each."""
        counts = torch.split(self.count_N, rows)
        sizes = [int(x) for x in torch.stack([count.sum() for count in counts]).tolist()]
        return [Kept(ids, count) for ids, count in zip(torch.split(self.ids_K, sizes), counts, strict=True)]

    def outside(self, vocabulary: int) -> Tensor:
        """[N,V], true on what was not kept: for few states, or a small vocabulary."""
        outside_NV = torch.ones(self.size, vocabulary, dtype=torch.bool, device=self.ids_K.device)
        outside_NV[self.row_K, self.ids_K.long()] = False
        return outside_NV

    def few(self, vocabulary: int) -> bool:
        """Whether gathered logits are cheaper than all of them."""
        worth = WORTH.get(self.ids_K.device.type, WORTH["cpu"])
        return len(self.ids_K) * worth <= self.size * vocabulary


class KeptColumns:
    """The sets by columns of the vocabulary, to hide what is outside in a chunk of logits."""

    def __init__(self, kept: Kept, vocabulary: int):
        self.kept, self.vocabulary = kept, vocabulary
        self._width, self._ends = 0, [0]  # of the chunks, and where the ids of each end

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        ids_K, order_K = self.kept.ids_K.sort(stable=True)
        return ids_K, self.kept.row_K[order_K]

    def hide(self, logits_NC: Tensor, columns: slice, tokens: slice) -> None:
        """What is inside stays; the rest is HIDDEN."""
        row_M, column_M = self._inside(columns)
        if len(logits_NC) < self.kept.size:
            here_M = (row_M >= tokens.start) & (row_M < tokens.stop)
            row_M, column_M = row_M[here_M] - tokens.start, column_M[here_M]
        logits_M = logits_NC[row_M, column_M]
        logits_NC.fill_(HIDDEN)
        logits_NC[row_M, column_M] = logits_M

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        return self.kept.row_K, self.kept.ids_K.long()

    def _inside(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Of the kept tokens in these columns: the state, and which column."""
        width = columns.stop - columns.start
        if width == self.vocabulary:
            return self._whole
        ids_K, row_K = self._sorted
        if columns.start == 0 and width != self._width:  # the first is as wide as any
            ends = torch.arange(width, self.vocabulary + width, width, dtype=ids_K.dtype, device=ids_K.device)
            self._width, self._ends = width, [0, *torch.searchsorted(ids_K, ends).tolist()]  # the host waits once
        chunk = columns.start // self._width
        part = slice(self._ends[chunk], self._ends[chunk + 1])
        return row_K[part], ids_K[part].long() - columns.start


class Gathered(torch.autograd.Function):
    """linear_logp over the sets: log-probabilities of the targets and entropies, [N] each."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, kept: Kept, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        z_K = torch.empty(len(kept.ids_K), dtype=_wide(hidden_NH), device=hidden_NH.device)
        for part, row_M, id_M in _parts(kept, hidden_NH.shape[1]):
            z_K[part] = (hidden_NH[row_M].to(z_K.dtype) * weight_VH[id_M].to(z_K.dtype)).sum(-1)
        z_K /= temperature
        top_N = _reduce(z_K, kept, "max")
        gap_K = z_K - top_N[kept.row_K]
        e_K = gap_K.exp()
        total_N = _reduce(e_K, kept, "sum")
        log_total_N = total_N.log()
        entropy_N = log_total_N - _reduce(e_K * gap_K, kept, "sum") / total_N
        logp_K = gap_K - log_total_N[kept.row_K]
        picked_K = logp_K.masked_fill(kept.ids_K != target_N[kept.row_K], -torch.inf)
        logp_N = _reduce(picked_K, kept, "max")
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, kept.ids_K, kept.count_N, logp_K, entropy_N)
        ctx.temperature = temperature
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logp_N: Tensor | None, d_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂logp/∂z = 1[target] − p and ∂entropy/∂z = −p·(log p + entropy), over the set."""
        hidden_NH, weight_VH, target_N, ids_K, count_N, logp_K, entropy_N = ctx.saved_tensors
        kept = Kept(ids_K, count_N)
        d_K = torch.zeros_like(logp_K)
        if d_logp_N is not None:
            d_K += d_logp_N[kept.row_K] * ((ids_K == target_N[kept.row_K]).to(logp_K.dtype) - logp_K.exp())
        if d_entropy_N is not None:
            d_K -= d_entropy_N[kept.row_K] * logp_K.exp() * (logp_K + entropy_N[kept.row_K])
        d_K /= ctx.temperature
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=d_K.dtype)
        used_U, use_K = torch.unique(ids_K, return_inverse=True)
        d_used_UH = d_K.new_zeros(len(used_U) if needs_weight else 0, hidden_NH.shape[1])
        for part, row_M, id_M in _parts(kept, hidden_NH.shape[1]):
            d_M1 = d_K[part].unsqueeze(-1)
            if needs_hidden:
                d_hidden_NH.index_add_(0, row_M, weight_VH[id_M] * d_M1)
            if needs_weight:
                d_used_UH.index_add_(0, use_K[part], hidden_NH[row_M] * d_M1)
        d_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        if d_weight_VH is not None:
            d_weight_VH[used_U.long()] = d_used_UH.to(weight_VH.dtype)
        return d_hidden_NH.to(hidden_NH.dtype) if needs_hidden else None, d_weight_VH, None, None, None


def _parts(kept: Kept, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some of the kept tokens at a time: where they are, their states, their ids."""
    step = max(1, CHUNK.get(kept.ids_K.device.type, CHUNK["cpu"]) // width)
    for begin in range(0, len(kept.ids_K), step):
        part = slice(begin, begin + step)
        yield part, kept.row_K[part], kept.ids_K[part].long()


def _reduce(x_K: Tensor, kept: Kept, how: str) -> Tensor:
    return torch.segment_reduce(x_K, how, lengths=kept.count_N, unsafe=True)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
