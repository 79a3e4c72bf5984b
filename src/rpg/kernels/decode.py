"""Attention of one new token a row over a shared prompt and the row's own response, in place in the caches.

A program takes one row and one key head, whose query heads share every key it loads; it walks the blocks of the prompt
and of the response that the row has, and no others. Where that leaves the chip idle, several programs share a row's
blocks (flash-decoding, https://pytorch.org/blog/flash-decoding) and a second kernel merges what they found.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .triton import has_triton, next_power_of_2

PROGRAMS = 264  # fewer than two for each processor of a large chip: split the rows
HEADS = 16  # query heads of a key head, filled up to what the matrix units take


def decode_attention(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    prompt_keys_PGMD: Tensor,
    prompt_values_PGMD: Tensor,
    keys_SGRD: Tensor,
    values_SGRD: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scaling · q·K) V [A,H,D]; the new keys and values are written into their slots at ``length_A``.

    Row a sees ``prompt_length_A`` tokens of prompt ``prompt_A``, ``length_A`` of slot ``slot_A``, and itself; of these
    the last ``window``. A row with ``length_A < 0`` is dead: zeros, nothing read or written, its indices may be
    anything. No two live rows share a slot. On CUDA only the kernels look at the values of the indices (int32): graphs.
    """
    tensors = (query_AHD, key_AGD, value_AGD, prompt_keys_PGMD, prompt_values_PGMD, keys_SGRD, values_SGRD)
    indices = (prompt_A, prompt_length_A, slot_A, length_A)
    if has_triton(query_AHD):
        return launch(*tensors, *indices, scaling, window)
    return reference(*tensors, *indices, scaling, window)


def splits_for(rows: int, capacity: int, block: int) -> int:
    """Programs for each of ``rows`` pairs of a row and a key head, of at most ``capacity`` tokens."""
    if rows >= PROGRAMS:
        return 1
    return max(1, min(-(-2 * PROGRAMS // rows), -(-capacity // block), 64))


def launch(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    prompt_keys_PGMD: Tensor,
    prompt_values_PGMD: Tensor,
    keys_SGRD: Tensor,
    values_SGRD: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
    splits: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """decode_attention by the kernels, with their settings."""
    from .triton.decode import attend, merge

    A, H, D = query_AHD.shape
    G, M, R = keys_SGRD.shape[1], prompt_keys_PGMD.shape[2], keys_SGRD.shape[2]
    if H % G or H // G > HEADS:
        raise ValueError(f"query heads must be 1 to {HEADS} for each key head; got {H} for {G}")
    caches = (prompt_keys_PGMD, prompt_values_PGMD, keys_SGRD, values_SGRD)
    for one, other in ((prompt_keys_PGMD, prompt_values_PGMD), (keys_SGRD, values_SGRD)):
        if one.stride() != other.stride() or one.stride(-1) != 1:
            raise ValueError("caches of keys and values must have the same strides, and 1 along the width of a head")
    if len({cache.dtype for cache in caches}) != 1:
        raise ValueError("caches must be of one dtype")
    query_AHD, key_AGD, value_AGD = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query_AHD, key_AGD, value_AGD)
    )
    output_AHD = torch.empty((A, H, D), dtype=query_AHD.dtype, device=query_AHD.device)
    if A == 0:
        return output_AHD
    width = max(16, next_power_of_2(D))
    slim = A * G >= PROGRAMS and width <= 64  # many programs with little to load at once: one warp each (measured)
    if block is None:
        block = 32 if slim else max(16, min(64, 16384 // (width * keys_SGRD.element_size())))
    warps, stages = warps or (1 if slim else 4), stages or (4 if slim else 3)
    if splits is None:
        splits = splits_for(A * G, M + R, block)
    part_AHND, top_AHN, mass_AHN = output_AHD, output_AHD, output_AHD  # unused with one split
    if splits > 1:
        part_AHND = torch.empty((A, H, splits, D), dtype=torch.float32, device=query_AHD.device)
        top_AHN, mass_AHN = torch.empty((2, A, H, splits), dtype=torch.float32, device=query_AHD.device)
    precision = "ieee" if keys_SGRD.dtype == torch.float32 else "tf32"
    attend[(A, G, splits)](
        query_AHD, key_AGD, value_AGD, *caches, prompt_A, prompt_length_A, slot_A, length_A,
        output_AHD, part_AHND, top_AHN, mass_AHN, scaling * math.log2(math.e), window or 0,
        query_AHD.stride(0), query_AHD.stride(1), key_AGD.stride(0), key_AGD.stride(1),
        value_AGD.stride(0), value_AGD.stride(1),
        prompt_keys_PGMD.stride(0), prompt_keys_PGMD.stride(1), prompt_keys_PGMD.stride(2),
        keys_SGRD.stride(0), keys_SGRD.stride(1), keys_SGRD.stride(2),
        H, splits, H // G, HEADS, D, width, block, splits > 1, window is not None, precision,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        merge[(A, H)](
            part_AHND, top_AHN, mass_AHN, length_A, output_AHD,
            H, splits, next_power_of_2(splits), D, width, num_warps=1,
        )  # fmt: skip
    return output_AHD


def reference(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    prompt_keys_PGMD: Tensor,
    prompt_values_PGMD: Tensor,
    keys_SGRD: Tensor,
    values_SGRD: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """The same in torch, in float32 (in float64 for tensors of it)."""
    A, H, D = query_AHD.shape
    (P, G, M, _), (S, _, R, _) = prompt_keys_PGMD.shape, keys_SGRD.shape
    live_A = length_A >= 0
    prompt_A, slot_A = prompt_A.long().clamp(0, P - 1), slot_A.long().clamp(0, S - 1)
    live = live_A.nonzero().squeeze(-1)
    keys_SGRD[slot_A[live], :, length_A[live].long()] = key_AGD[live].to(keys_SGRD.dtype)
    values_SGRD[slot_A[live], :, length_A[live].long()] = value_AGD[live].to(values_SGRD.dtype)

    # by position in the caches: a prompt's tokens, then the row's, the new one last
    at_prompt_AM = torch.arange(M, device=query_AHD.device).expand(A, M)
    at_own_AR = torch.arange(R, device=query_AHD.device).expand(A, R)
    seen_prompt_AM = (at_prompt_AM < prompt_length_A[:, None]) & live_A[:, None]
    seen_own_AR = at_own_AR <= length_A[:, None]
    if window is not None:
        first_A1 = (prompt_length_A + length_A - window)[:, None] + 1
        seen_prompt_AM = seen_prompt_AM & (at_prompt_AM >= first_A1)
        seen_own_AR = seen_own_AR & (at_own_AR + prompt_length_A[:, None] >= first_A1)
    seen_AL = torch.cat([seen_prompt_AM, seen_own_AR], 1)

    kind = torch.promote_types(query_AHD.dtype, torch.float32)
    hidden_A1L1 = ~seen_AL[:, None, :, None]  # what lies there may be anything, NaN too
    keys_AGLD = torch.cat([prompt_keys_PGMD[prompt_A], keys_SGRD[slot_A]], 2).to(kind).masked_fill(hidden_A1L1, 0)
    values_AGLD = torch.cat([prompt_values_PGMD[prompt_A], values_SGRD[slot_A]], 2).to(kind).masked_fill(hidden_A1L1, 0)
    query_AGRD = query_AHD.reshape(A, G, H // G, D).to(kind)
    logits_AGRL = (query_AGRD @ keys_AGLD.mT * scaling).masked_fill(~seen_AL[:, None, None], -torch.inf)
    weights_AGRL = logits_AGRL.softmax(-1).masked_fill(~live_A[:, None, None, None], 0)
    return (weights_AGRL @ values_AGLD).reshape(A, H, D).to(query_AHD.dtype)
