"""Attention of one new token a row over a shared prompt and the row's own response, in place in pages of a cache.

Keys and values lie in pages. A table says which pages a prompt has, another which a slot has, so that
neither need be contiguous, or as long as it may become. A program takes one row and one key head, whose query heads
share every key it loads; it walks the blocks of the prompt and of the response that the row has, and no others. Where
that leaves the chip idle, several programs share a row's blocks (flash-decoding,
https://pytorch.org/blog/flash-decoding) and a second kernel merges what they found.

Where neighbouring rows are samples of one prompt, a kernel of its own can read it once for all of them (Hydragen,
https://arxiv.org/abs/2402.05099): a softmax over a row's tokens is put together from one over its prompt and one over
its response. It also makes the new tokens; the rows' own programs go on from what it left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .triton import has_triton, next_power_of_2, nvidia

PROGRAMS = 264  # fewer than two for each processor of a large chip: split the rows
HEADS = 16  # query heads of a key head, filled up to what the matrix units take
PAGE = 64  # tokens
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # the largest number that it has
LEAST_SCALE = 1e-12
# tokens of a block, warps, stages: by the width of a head and the bits of a key, from a sweep on an H200
TUNED = {(64, 16): (32, 1, 4), (128, 16): (64, 4, 3), (64, 8): (64, 2, 3), (128, 8): (64, 2, 3)}
BLOCK_BYTES = 16384  # of the keys of a block, at most
MATRIX = 64  # query heads of a program of it, of all its rows
FEW_PROGRAMS = 132  # of it: with fewer, several share a prompt's blocks, LEAST_BLOCKS each
LEAST_BLOCKS = 4
LEAST_SAMPLES = 4  # of a prompt, for it to be read once for all of them
# What rows would read again of their prompts, a layer, for that to pay: on an H200 it was slower up to 82 MB and 1.2 to
# 1.4 times as fast from 145 MB on (docs/long-responses.md). The L2 cache gives what is read again soon.
AGAIN_BYTES = 120e6
WITH_8_BITS = "a GPU that has such numbers (an L40S, RTX 4090, H100, H200 or later)"


@dataclass(frozen=True)
class Unfinished:
    """What is still to be done to new queries and keys, rounded as the model would: norms of heads, then rotation.

    Either may be missing. ``offset`` and ``rounds`` are those of norm_in_torch.
    """

    angles: tuple[Tensor, Tensor] | None = None  # cos and sin, [A,D] or one row for all
    weights: tuple[Tensor, Tensor] | None = None  # [D], of the queries' norm and of the keys'
    eps: float = 0.0
    offset: bool = False
    rounds: bool = True

    def finish(self, *heads: Tensor) -> list[Tensor]:
        """Queries [A,H,D] and keys [A,G,D], in torch."""
        found = list(heads)
        if self.weights is not None:
            form = self.eps, self.offset, self.rounds
            found = [norm_in_torch(x, weight_D, *form) for x, weight_D in zip(found, self.weights, strict=True)]
        if self.angles is not None:
            cos_A1D, sin_A1D = (x[:, None] for x in self.angles)
            halves = [x.chunk(2, -1) for x in found]
            found = [x * cos_A1D + torch.cat([-b, a], -1) * sin_A1D for x, (a, b) in zip(found, halves, strict=True)]
        return found


def norm_in_torch(x: Tensor, weight_D: Tensor, eps: float, offset: bool, rounds: bool) -> Tensor:
    """x / rms(x) · (offset + weight) over the last dimension; ``rounds``: to x's type before the product."""
    kind = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(kind)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale_D = weight_D.to(kind) + offset
    return ((unit.to(x.dtype).to(kind) if rounds else unit) * scale_D).to(x.dtype)


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, [C,G,T,D]: C pages of T tokens. In 8 bits with a scale for each token and head."""

    keys_CGTD: Tensor
    values_CGTD: Tensor
    key_scale_CGT: Tensor | None = None
    value_scale_CGT: Tensor | None = None

    @classmethod
    def empty(cls, pages: int, key: Tensor, value: Tensor, fp8: bool, page: int = PAGE) -> LayerCache:
        """For keys and values [.., G, .., D] like these."""

        def room(x: Tensor) -> Tensor:
            return x.new_empty(pages, x.shape[1], page, x.shape[3], dtype=FP8 if fp8 else x.dtype)

        if not fp8:
            return cls(room(key), room(value))
        scales = key.new_empty(2, pages, key.shape[1], page, dtype=torch.float32)
        return cls(room(key), room(value), scales[0], scales[1])

    @property
    def page(self) -> int:
        return self.keys_CGTD.shape[2]

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        return sum(part[0].nbytes for part in self.parts) // self.page

    @property
    def parts(self) -> list[Tensor]:
        """All tensors, a page the first index; as bytes, which can be indexed in any dtype."""
        parts = self.keys_CGTD, self.values_CGTD, self.key_scale_CGT, self.value_scale_CGT
        return [x.view(torch.uint8) if x.dtype == FP8 else x for x in parts if x is not None]

    def put(self, page_N: Tensor, place_N: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> None:
        """Keys and values of N tokens, at these places of these pages."""
        if self.key_scale_CGT is None or self.value_scale_CGT is None:
            self.keys_CGTD[page_N, :, place_N] = key_NGD.to(self.keys_CGTD.dtype)
            self.values_CGTD[page_N, :, place_N] = value_NGD.to(self.values_CGTD.dtype)
            return
        for store, scales, x in (
            (self.keys_CGTD, self.key_scale_CGT, key_NGD),
            (self.values_CGTD, self.value_scale_CGT, value_NGD),
        ):
            rounded, scale_NG = in_8_bits(x)
            store.view(torch.uint8)[page_N, :, place_N] = rounded.view(torch.uint8)
            scales[page_N, :, place_N] = scale_NG.to(scales.dtype)

    def read(self, page_AM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages, end to end, [A,G,M·T,D] in at least float32."""
        found = []
        for store, scales in ((self.keys_CGTD, self.key_scale_CGT), (self.values_CGTD, self.value_scale_CGT)):
            if scales is None:
                x = store[page_AM].to(torch.promote_types(store.dtype, torch.float32))
            else:
                x = store.view(torch.uint8)[page_AM].view(FP8).to(scales.dtype) * scales[page_AM][..., None]
            found.append(x.transpose(1, 2).flatten(2, 3))
        return found[0], found[1]


def has_8_bits(device: torch.device) -> bool:
    """Whether Triton has numbers of 8 bits there: from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded, and the scale of each vector: its largest number becomes the largest that 8 bits have."""
    x = x.float()
    scale = (x.abs().amax(-1) / FP8_MOST).clamp(min=LEAST_SCALE)
    return (x / scale[..., None]).clamp(-FP8_MOST, FP8_MOST).to(FP8), scale


def decode_attention(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    cache: LayerCache,
    prompt_page_QM: Tensor,
    page_SR: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
    unfinished: Unfinished | None = None,
    samples: int = 1,
) -> Tensor:
    """softmax(scaling · q·K) V [A,H,D]; the new keys and values are written into the row's page at ``length_A``.

    Row a sees ``prompt_length_A`` tokens of prompt ``prompt_A``, ``length_A`` of slot ``slot_A``, and itself; of these
    the last ``window``. ``prompt_page_QM`` and ``page_SR`` name the pages of prompts and slots in the order of their
    tokens. A row with ``length_A < 0`` is dead: zeros, nothing read or written, its indices may be anything. No two
    live rows share a slot, no two slots a page. On CUDA only kernels look at the values of the indices (int32): graphs.
    ``unfinished``: what is to be done to queries and keys before. ``samples`` > 1: about so many neighbouring rows have
    one prompt, which is then read for all of them at once; it is right for rows in any order.
    """
    pages, indices = (prompt_page_QM, page_SR), (prompt_A, prompt_length_A, slot_A, length_A)
    if has_triton(query_AHD):
        settings: Any = {"samples": samples}
        return launch(query_AHD, key_AGD, value_AGD, cache, *pages, *indices, scaling, window, unfinished, **settings)
    return reference(query_AHD, key_AGD, value_AGD, cache, *pages, *indices, scaling, window, unfinished)


def splits_for(rows: int, capacity: int, block: int) -> int:
    """Programs for each of ``rows`` pairs of a row and a key head, of at most ``capacity`` tokens."""
    if rows >= PROGRAMS:
        return 1
    return max(1, min(-(-2 * PROGRAMS // rows), -(-capacity // block), 64))


def usual_block(key_bytes: int) -> int:
    """Tokens, where it is not tuned."""
    return max(16, min(64, BLOCK_BYTES // key_bytes))


def shared_samples(n: int, rows: int, prompt: float, token_bytes: int) -> int:
    """``samples`` for a step of so many rows, n of each prompt of so many tokens: 1 where sharing would not pay."""
    again = rows * (1 - 1 / n) * prompt * token_bytes
    return n if n >= LEAST_SAMPLES and again >= AGAIN_BYTES else 1


@dataclass(frozen=True)
class PromptSettings:
    """Of the kernel that reads prompts for several rows. ``early``: the next kernel is launched while it is at work,
    and waits for it when it has found its pages; Hopper chips and later can do that."""

    rows: int  # of a program
    block: int = 64
    warps: int = 4
    stages: int = 3
    splits: int = 1
    early: bool = False

    @classmethod
    def tuned(
        cls, samples: int, rows: int, heads: int, key_heads: int, capacity: int, key_bytes: int
    ) -> PromptSettings:
        """For prompts of at most ``capacity`` tokens, keys of ``key_bytes``. Chosen by what fits, not measured yet."""
        most = min(samples, max(1, MATRIX * key_heads // heads))
        tile = 1 << (most.bit_length() - 1)
        block = usual_block(key_bytes)
        programs, blocks = -(-rows // tile) * key_heads, -(-capacity // block)
        splits = 1
        if programs < FEW_PROGRAMS:
            splits = max(1, min(2 * FEW_PROGRAMS // programs, blocks // LEAST_BLOCKS, 8))
        two_fit = block * key_bytes <= BLOCK_BYTES // 2  # programs, into a processor's shared memory
        return cls(tile, block, stages=3 if two_fit else 2, splits=splits)


def launch(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    cache: LayerCache,
    prompt_page_QM: Tensor,
    page_SR: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
    unfinished: Unfinished | None = None,
    splits: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    key_heads: int = 1,
    late: bool = False,
    samples: int = 1,
    prompts: PromptSettings | None = None,
) -> Tensor:
    """decode_attention by the kernels, with their settings. ``key_heads`` of a program; ``late``: the new token is made
    after the blocks were walked, so that their loads begin earlier (where prompts are shared it is made before anyway);
    ``prompts``: they are, whatever ``samples`` is."""
    from .triton.decode import attend, attend_prompts, merge

    keys, values = cache.keys_CGTD, cache.values_CGTD
    A, H, D = query_AHD.shape
    G, page = keys.shape[1], cache.page
    if H % G or H // G > HEADS:
        raise ValueError(f"query heads must be 1 to {HEADS} for each key head; got {H} for {G}")
    if G % key_heads or H // G * key_heads > HEADS or key_heads & (key_heads - 1):
        raise ValueError(f"{key_heads} key heads of {H // G} query heads each do not fit a program")
    if keys.shape != values.shape:
        raise ValueError("keys and values must have the same shape")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("caches of keys and values must be contiguous")
    query_AHD, key_AGD, value_AGD = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query_AHD, key_AGD, value_AGD)
    )
    output_AHD = torch.empty((A, H, D), dtype=query_AHD.dtype, device=query_AHD.device)
    if A == 0:
        return output_AHD
    scaled = cache.key_scale_CGT is not None
    if scaled and D % 2:
        raise ValueError(f"a head of {D} numbers cannot be read in pairs")
    width = max(32 if scaled else 16, next_power_of_2(D))
    key_bytes = width * keys.element_size()
    tuned = TUNED.get((width, 8 * keys.element_size()), (usual_block(key_bytes), 4, 3))
    block, warps, stages = min(block or tuned[0], page), warps or tuned[1], stages or tuned[2]
    if prompts is None and samples > 1:
        prompts = PromptSettings.tuned(samples, A, H, G, prompt_page_QM.shape[1] * page, key_bytes)
    prompt_block, parts = (block, 0) if prompts is None else (min(prompts.block, page), prompts.splits)
    if page % block or page % prompt_block:
        raise ValueError(f"a page of {page} tokens is no multiple of blocks of {block} and {prompt_block}")
    if splits is None:
        capacity = (page_SR.shape[1] + (prompt_page_QM.shape[1] if prompts is None else 0)) * page
        splits = splits_for(A * G // key_heads, capacity, block)
    count = parts + (splits if splits > 1 else 0)
    part_AHND, top_AHN, mass_AHN = output_AHD, output_AHD, output_AHD  # unused where a program has it all
    if count:
        part_AHND = torch.empty((A, H, count, D), dtype=torch.float32, device=query_AHD.device)
        top_AHN, mass_AHN = torch.empty((2, A, H, count), dtype=torch.float32, device=query_AHD.device)
    early = prompts is not None and prompts.early and splits == 1 and nvidia(query_AHD)
    scales = (cache.key_scale_CGT, cache.value_scale_CGT) if scaled else (keys, values)  # unused with 16 bits
    pairs = (x.view(torch.uint8).view(torch.int16) if scaled else x for x in (keys, values))
    caches = keys, values, *pairs, *scales
    unfinished = unfinished or Unfinished()
    cos_AD, sin_AD = unfinished.angles or (query_AHD, query_AHD)
    if cos_AD.stride() != sin_AD.stride() or cos_AD.stride(-1) != 1:
        cos_AD, sin_AD = cos_AD.contiguous(), sin_AD.contiguous()
    angle_a = cos_AD.stride(0) if len(cos_AD) > 1 else 0
    query_norm, key_norm = unfinished.weights or (query_AHD, query_AHD)
    scale, precision = scaling * math.log2(math.e), "ieee" if keys.dtype == torch.float32 else "tf32"
    todo = unfinished.weights is not None, int(unfinished.offset), unfinished.rounds, unfinished.angles is not None
    tables = prompt_page_QM, page_SR, prompt_A, prompt_length_A, slot_A, length_A
    norms, given_AHD, given_todo = (query_norm, key_norm, unfinished.eps), query_AHD, todo
    strides = [*key_AGD.stride()[:2], *value_AGD.stride()[:2], angle_a, prompt_page_QM.stride(0), page_SR.stride(0)]
    if prompts is not None:
        query_AHD, todo = torch.empty_like(output_AHD), (False, 0, False, False)
        attend_prompts[(-(-A // prompts.rows), G, parts)](
            given_AHD, key_AGD, value_AGD, *caches, cos_AD, sin_AD, *norms, *tables,
            query_AHD, part_AHND, top_AHN, mass_AHN, scale, window or 0,
            given_AHD.stride(0), given_AHD.stride(1), *strides, A, H, parts, count, count - parts,
            G, H // G, prompts.rows, max(16, next_power_of_2(prompts.rows * H // G)), D, width, page, prompt_block,
            window is not None, precision, scaled, scaled and nvidia(given_AHD), FP8_MOST, LEAST_SCALE,
            *given_todo, early, num_warps=prompts.warps, num_stages=prompts.stages,
        )  # fmt: skip
    attend[(A, G // key_heads, splits)](
        query_AHD, key_AGD, value_AGD, *caches, cos_AD, sin_AD, *norms, *tables,
        output_AHD, part_AHND, top_AHN, mass_AHN, scale, window or 0,
        query_AHD.stride(0), query_AHD.stride(1), *strides, H, splits, parts,
        G, H // G, key_heads, HEADS, D, width, page, block, splits > 1, window is not None, precision,
        scaled, scaled and nvidia(query_AHD), FP8_MOST, LEAST_SCALE, *todo, prompts is not None, late, early,
        num_warps=warps, num_stages=stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    if splits > 1:
        merge[(A, H)](
            part_AHND, top_AHN, mass_AHN, length_A, output_AHD,
            H, count, next_power_of_2(count), D, width, num_warps=1,
        )  # fmt: skip
    return output_AHD


def reference(
    query_AHD: Tensor,
    key_AGD: Tensor,
    value_AGD: Tensor,
    cache: LayerCache,
    prompt_page_QM: Tensor,
    page_SR: Tensor,
    prompt_A: Tensor,
    prompt_length_A: Tensor,
    slot_A: Tensor,
    length_A: Tensor,
    scaling: float,
    window: int | None = None,
    unfinished: Unfinished | None = None,
) -> Tensor:
    """The same in torch, in float32 (in float64 for tensors of it)."""
    (A, H, D), (C, G) = query_AHD.shape, cache.keys_CGTD.shape[:2]
    live_A, device = length_A >= 0, query_AHD.device
    if unfinished is not None:
        query_AHD, key_AGD = unfinished.finish(query_AHD, key_AGD)
    prompt_A, slot_A = (x.long().clamp(0, len(y) - 1) for x, y in ((prompt_A, prompt_page_QM), (slot_A, page_SR)))
    live = live_A.nonzero().squeeze(-1)
    at = length_A[live].long()
    cache.put(page_SR[slot_A[live], at // cache.page].long(), at % cache.page, key_AGD[live], value_AGD[live])

    # by position in the pages: a prompt's tokens, then the row's, the new one last
    at_prompt_AM = torch.arange(prompt_page_QM.shape[1] * cache.page, device=device).expand(A, -1)
    at_own_AR = torch.arange(page_SR.shape[1] * cache.page, device=device).expand(A, -1)
    seen_prompt_AM = (at_prompt_AM < prompt_length_A[:, None]) & live_A[:, None]
    seen_own_AR = at_own_AR <= length_A[:, None]
    if window is not None:
        first_A1 = (prompt_length_A + length_A - window)[:, None] + 1
        seen_prompt_AM = seen_prompt_AM & (at_prompt_AM >= first_A1)
        seen_own_AR = seen_own_AR & (at_own_AR + prompt_length_A[:, None] >= first_A1)
    seen_AL = torch.cat([seen_prompt_AM, seen_own_AR], 1)

    pages_AM = torch.cat([prompt_page_QM[prompt_A], page_SR[slot_A]], 1).long().clamp(0, C - 1)
    kind = torch.promote_types(query_AHD.dtype, torch.float32)
    hidden_A1L1 = ~seen_AL[:, None, :, None]  # what lies there may be anything, NaN too
    keys_AGLD, values_AGLD = (x.to(kind).masked_fill(hidden_A1L1, 0) for x in cache.read(pages_AM))
    query_AGRD = query_AHD.reshape(A, G, H // G, D).to(kind)
    logits_AGRL = (query_AGRD @ keys_AGLD.mT * scaling).masked_fill(~seen_AL[:, None, None], -torch.inf)
    weights_AGRL = logits_AGRL.softmax(-1).masked_fill(~live_A[:, None, None, None], 0)
    return (weights_AGRL @ values_AGLD).reshape(A, H, D).to(query_AHD.dtype)
