"""What frames one decoding step: the numbers it begins with, and the books it leaves. One launch each on a GPU.

``state_5A`` holds of every row its prompt, the prompt's length, its slot, the tokens of the response that are in the
cache, and the newest token, which is not. A row with −1 tokens in the cache has had its prompt read and nothing drawn;
DEAD rows are done.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .triton import has_triton

PROMPT, PROMPT_LENGTH, SLOT, LENGTH, TOKEN = range(5)
DEAD = -2
BLOCK = 128


def begin_step(state_5A: Tensor, uniform_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row the newest token [A,1], its position [A,1], and the number that decides the next one [A]."""
    rows = state_5A.shape[1]
    ids_A1 = torch.empty(rows, 1, dtype=torch.long, device=state_5A.device)
    position_A1, uniform_A = torch.empty_like(ids_A1), uniform_SR.new_empty(rows)
    if has_triton(state_5A):
        grid = (-(-rows // BLOCK),)
        _kernels().begin_kernel[grid](
            state_5A, state_5A.stride(0), uniform_SR, uniform_SR.stride(0), ids_A1, position_A1, uniform_A, rows, BLOCK
        )
    else:
        state = state_5A.long()
        alive_A = state[LENGTH] >= 0
        ids_A1[:, 0] = torch.where(alive_A, state[TOKEN], 0)
        position_A1[:, 0] = torch.where(alive_A, state[PROMPT_LENGTH] + state[LENGTH], 0)
        slot_A, at_A = torch.where(alive_A, state[SLOT], 0), torch.where(alive_A, state[LENGTH] + 1, 0)
        uniform_A.copy_(uniform_SR[slot_A, at_A])
    return ids_A1, position_A1, uniform_A


def end_step(
    token_A: Tensor,
    logp_A: Tensor,
    state_5A: Tensor,
    tokens_SR: Tensor,
    logp_SR: Tensor,
    count_S: Tensor,
    ended_S: Tensor,
    limit_1: Tensor,
    ends_E: Tensor,
) -> None:
    """Write down what was drawn, in place. A row that drew an end token or has reached the limit dies."""
    rows = state_5A.shape[1]
    if has_triton(state_5A):
        grid = (-(-rows // BLOCK),)
        _kernels().end_kernel[grid](
            token_A, logp_A, state_5A, state_5A.stride(0), tokens_SR, logp_SR, tokens_SR.stride(0), count_S, ended_S,
            limit_1, ends_E, rows, len(ends_E), BLOCK,
        )  # fmt: skip
        return
    row = (state_5A[LENGTH] > DEAD).nonzero().squeeze(-1)
    slot, new, token = state_5A[SLOT, row].long(), state_5A[LENGTH, row].long() + 1, token_A[row]
    tokens_SR[slot, new], logp_SR[slot, new] = token.to(tokens_SR.dtype), logp_A[row]
    ended = torch.isin(token, ends_E)
    over = ended | (new + 1 >= limit_1)
    count_S[slot[over]], ended_S[slot[over]] = (new[over] + 1).to(count_S.dtype), ended[over].to(ended_S.dtype)
    state_5A[LENGTH, row] = torch.where(over, DEAD, new).to(state_5A.dtype)
    state_5A[TOKEN, row] = token.to(state_5A.dtype)


@functools.cache
def _kernels() -> Any:
    """Imported at the first use: Triton is not needed on a CPU."""
    from .triton import step as step_triton

    return step_triton
