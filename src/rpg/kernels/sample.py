"""One token for each row of logits, as sample_torch.sample draws them: one pass over the logits, no sorting.

The pass leaves, of every 64 tokens of the vocabulary, the largest logit and the sum of their weights. Of the whole
distribution a second kernel then reads the 64 tokens in which the cumulative distribution passes the uniform number. A
truncated one takes from those maxima and sums a logit that every token kept reaches, collects the few tokens that do,
and searches among these for the exact threshold; where they are many (a nearly uniform distribution) it searches the
whole row, some ten passes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .sample_torch import sample, sample_kept
from .step import DEAD, LENGTH, SLOT
from .triton import has_triton, next_power_of_2

PIECE = 64
ROOM = 8192  # tokens collected for the search


class Pool(NamedTuple):
    """Where kept sets are written, as draws come. A slot's set of its token t begins at start_SR[slot, t], counted from
    the first id ever written. Sets for which there is no room are counted and not written: cursor_2[0] > P tells."""

    ids_P: Tensor  # int32
    cursor_2: Tensor  # int64: ids in the pool, and ids that were taken out of it before
    start_SR: Tensor  # int64
    size_SR: Tensor  # int32


def fused_sample(
    logits_AV: Tensor,
    uniform_A: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    kept: tuple[Pool, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [A], int64, and their log-probabilities in what they were drawn from: tempered, truncated, renormalised.

    Tokens tied with the last one kept are kept. On a GPU safe inside a CUDA graph; elsewhere this is sample().
    With ``kept``, a pool and the rows' state_5A (step.py), the kept set of every live row goes into the pool.
    """
    if temperature == 0:
        token_A = logits_AV.argmax(-1)
        return token_A, torch.zeros_like(token_A, dtype=torch.float32)
    if has_triton(logits_AV):
        return launch(logits_AV, uniform_A, temperature, top_p, top_k, min_p, kept)
    if kept is None:
        return sample(logits_AV, uniform_A, temperature, top_p, top_k, min_p)
    token_A, logp_A, kept_AV = sample_kept(logits_AV, uniform_A, temperature, top_p, top_k, min_p)
    _write(kept_AV, *kept)
    return token_A, logp_A


def _write(kept_AV: Tensor, pool: Pool, state_5A: Tensor) -> None:
    row_M = (state_5A[LENGTH] > DEAD).nonzero()[:, 0]
    size_M, ids_K = kept_AV[row_M].sum(-1), kept_AV[row_M].nonzero()[:, 1]
    begin, before = pool.cursor_2.tolist()
    at = state_5A[SLOT, row_M].long(), state_5A[LENGTH, row_M].long() + 1
    pool.start_SR[at] = before + begin + size_M.cumsum(0) - size_M
    pool.size_SR[at] = size_M.int()
    pool.cursor_2[0] += len(ids_K)
    if begin + len(ids_K) <= len(pool.ids_P):
        pool.ids_P[begin : begin + len(ids_K)] = ids_K.int()


def launch(
    logits_AV: Tensor,
    uniform_A: Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float = 0.0,
    kept: tuple[Pool, Tensor] | None = None,
    room: int = ROOM,
    piece: int = PIECE,
    block: int = 4096,
    warps: int = 8,
    search: tuple[int, int, int] = (1024, 8, 8),
) -> tuple[Tensor, Tensor]:
    """fused_sample by the kernels, with their settings; ``search``: tokens a block, thresholds a pass, warps."""
    from .triton.sample import bound, collect, draw_truncated, draw_whole, pieces

    A, V = logits_AV.shape
    device = logits_AV.device
    token_A = torch.empty(A, dtype=torch.int64, device=device)
    logp_A = torch.empty(A, dtype=torch.float32, device=device)
    if A == 0:
        return token_A, logp_A
    if logits_AV.stride(1) != 1:
        logits_AV = logits_AV.contiguous()
    factor, inverse = math.log2(math.e) / temperature, 1 / temperature
    N = -(-V // (16 * piece)) * 16  # rows that start where wide loads may
    size = next_power_of_2(N)
    block = min(block, size * piece)
    top_AN, mass_AN = torch.empty((2, A, N), dtype=torch.float32, device=device)
    grid = (-(-N * piece // block), A)
    pieces[grid](logits_AV, top_AN, mass_AN, logits_AV.stride(0), V, N, factor, piece, block // piece, num_warps=warps)
    strides = (logits_AV.stride(0), uniform_A.stride(0))
    by_k, by_p, by_m = 0 < top_k < V, top_p < 1, min_p > 0
    if not (by_k or by_p or by_m or kept):
        draw_whole[(A,)](
            logits_AV, uniform_A, top_AN, mass_AN, token_A, logp_A, *strides, V, N, factor, inverse, piece, size,
            num_warps=8,
        )  # fmt: skip
        return token_A, logp_A
    room = min(room, next_power_of_2(V))
    margin = math.log2(min_p) if by_m else 0.0
    ids_AN = torch.empty((A, N), dtype=torch.int32, device=device)
    found_A, count_A = torch.empty((2, A), dtype=torch.int32, device=device)
    floor_A, best_A, total_A = torch.empty((3, A), dtype=torch.float32, device=device)
    values_AR = torch.empty((A, room), dtype=logits_AV.dtype, device=device)
    words_AR = torch.empty((A, room), dtype=torch.int32, device=device)
    bound[(A,)](
        top_AN, mass_AN, ids_AN, found_A, floor_A, best_A, total_A, N, factor, top_k, top_p, margin,
        by_k, by_m, piece, size, 12, num_warps=8,
    )  # fmt: skip
    collect[(A,)](
        logits_AV, ids_AN, found_A, floor_A, values_AR, words_AR, count_A, logits_AV.stride(0), V, N,
        room, piece, min(2048 // piece, size), num_warps=8,
    )  # fmt: skip
    width, ways, warps = search
    width = min(width, max(128, next_power_of_2(V)))
    pool, state_5A = kept or (Pool(words_AR, count_A, count_A, count_A), count_A[None])
    draw_truncated[(A,)](
        logits_AV, uniform_A, values_AR, words_AR, count_A, floor_A, best_A, total_A, token_A, logp_A,
        *strides, V, factor, inverse, top_k, top_p, margin, *pool, state_5A, pool.start_SR.stride(0),
        state_5A.stride(0), pool.ids_P.numel(), by_k, by_p, by_m, kept is not None, room, width, ways, num_warps=warps,
    )  # fmt: skip
    return token_A, logp_A
