# mypy: ignore-errors
"""The kernels of decode.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    query, key, value, keys, values, key_scale, value_scale,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    output, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, prompt_pages_q, own_pages_s,
    H, splits,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    a, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(length_A + a)
    live = own >= 0
    own = tl.maximum(own, 0)
    shared = tl.where(live, tl.load(prompt_length_A + a), 0)
    prompt_pages += tl.load(prompt_A + a).to(tl.int64) * prompt_pages_q
    own_pages += tl.load(slot_A + a).to(tl.int64) * own_pages_s
    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    wide = at < D
    taken = (head < GROUP)[:, None] & wide[None, :] & live
    a = a.to(tl.int64)
    query_ptr = query + a * query_a + (g * GROUP + head)[:, None] * query_h + at[None, :]
    q_HD = tl.load(query_ptr, mask=taken, other=0.0)
    if not SCALED:
        q_HD = q_HD.to(keys.dtype.element_ty)

    # the new token: into the cache, and the first of what the first program sees
    first = live & (split == 0)
    page = tl.load(own_pages + own // PAGE, mask=first, other=0).to(tl.int64)
    end = (page * G + g) * PAGE + own % PAGE
    k_D = tl.load(key + a * key_a + g * key_g + at, mask=wide & first, other=0.0)
    v_D = tl.load(value + a * value_a + g * value_g + at, mask=wide & first, other=0.0)
    if SCALED:
        k_scale = tl.maximum(tl.max(tl.abs(k_D.to(tl.float32)), 0) / MOST, LEAST)
        v_scale = tl.maximum(tl.max(tl.abs(v_D.to(tl.float32)), 0) / MOST, LEAST)
        tl.store(key_scale + end, k_scale, mask=first)
        tl.store(value_scale + end, v_scale, mask=first)
        k_D = (k_D.to(tl.float32) / k_scale).to(keys.dtype.element_ty)
        v_D = (v_D.to(tl.float32) / v_scale).to(values.dtype.element_ty)
    else:
        k_scale, v_scale = 1.0, 1.0
        k_D, v_D = k_D.to(keys.dtype.element_ty), v_D.to(values.dtype.element_ty)
    tl.store(keys + end * D + at, k_D, mask=wide & first)
    tl.store(values + end * D + at, v_D, mask=wide & first)
    new_H = tl.sum(q_HD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1) * (k_scale * scale)
    top_H = tl.where(split == 0, new_H, float("-inf"))
    mass_H = tl.where(split == 0, tl.full([HEADS], 1.0, tl.float32), 0.0)
    sum_HD = tl.zeros([HEADS, WIDTH], tl.float32) + (v_D.to(tl.float32) * v_scale)[None, :]

    # blocks with a token in sight: of the prompt, then of the response
    low = 0
    if WINDOW:
        low = tl.maximum(shared + own + 1 - window, 0)
    low_own = tl.maximum(low - shared, 0)
    prompt_blocks = tl.where(low < shared, (shared + BLOCK - 1) // BLOCK - low // BLOCK, 0)
    own_blocks = tl.where(low_own < own, (own + BLOCK - 1) // BLOCK - low_own // BLOCK, 0)
    blocks = prompt_blocks + own_blocks
    for i in range(blocks * split // splits, blocks * (split + 1) // splits):
        inside = i < prompt_blocks
        start = tl.where(inside, low, low_own)
        stop = tl.where(inside, shared, own)
        begin = (start // BLOCK + i - tl.where(inside, 0, prompt_blocks)) * BLOCK
        page = tl.load(tl.where(inside, prompt_pages, own_pages) + begin // PAGE).to(tl.int64)
        in_block = tl.arange(0, BLOCK)
        seen = (begin + in_block >= start) & (begin + in_block < stop)
        place_B = (page * G + g) * PAGE + begin % PAGE + in_block
        offset = place_B[:, None] * D + at[None, :]
        mask = seen[:, None]
        if D < WIDTH:
            mask = mask & wide[None, :]
        k_BD = tl.load(keys + offset, mask=mask, other=0.0)
        v_BD = tl.load(values + offset, mask=mask, other=0.0)
        if SCALED:
            k_BD, v_BD = k_BD.to(q_HD.dtype), v_BD.to(q_HD.dtype)
        logit_HB = tl.dot(q_HD, tl.trans(k_BD), input_precision=PRECISION) * scale
        if SCALED:
            logit_HB = logit_HB * tl.load(key_scale + place_B, mask=seen, other=0.0)[None, :]
        logit_HB = tl.where(seen[None, :], logit_HB, float("-inf"))
        new_H = tl.maximum(top_H, tl.max(logit_HB, 1))
        weight_HB = tl.exp2(logit_HB - new_H[:, None])
        keep_H = tl.exp2(top_H - new_H)
        mass_H = mass_H * keep_H + tl.sum(weight_HB, 1)
        if SCALED:
            weight_HB = weight_HB * tl.load(value_scale + place_B, mask=seen, other=0.0)[None, :]
        sum_HD = tl.dot(weight_HB.to(v_BD.dtype), v_BD, sum_HD * keep_H[:, None], input_precision=PRECISION)
        top_H = new_H

    row_H = a * H + g * GROUP + head
    if SPLIT:
        row_H = row_H * splits + split
        tl.store(part + row_H[:, None] * D + at[None, :], sum_HD, mask=taken)
        tl.store(top + row_H, top_H, mask=(head < GROUP) & live)
        tl.store(mass + row_H, mass_H, mask=(head < GROUP) & live)
    else:
        sum_HD = tl.where(live, sum_HD / mass_H[:, None], 0.0)
        tl.store(
            output + row_H[:, None] * D + at[None, :],
            sum_HD.to(output.dtype.element_ty),
            mask=(head < GROUP)[:, None] & wide[None, :],
        )


@triton.jit
def merge(
    part, top, mass, length_A, output, H, splits, SPLITS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    a = tl.program_id(0)
    live = tl.load(length_A + a) >= 0
    row = a.to(tl.int64) * H + tl.program_id(1)
    n, at = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    there = (n < splits) & live
    top_N = tl.load(top + row * splits + n, mask=there, other=float("-inf"))
    scale_N = tl.exp2(top_N - tl.where(live, tl.max(top_N, 0), 0.0))
    mass_N = tl.load(mass + row * splits + n, mask=there, other=0.0)
    where_ND = (row * splits + n)[:, None] * D + at[None, :]
    part_ND = tl.load(part + where_ND, mask=there[:, None] & (at < D)[None, :], other=0.0)
    sum_D = tl.sum(part_ND * scale_N[:, None], 0) / tl.where(live, tl.sum(mass_N * scale_N, 0), 1.0)
    tl.store(output + row * D + at, sum_D.to(output.dtype.element_ty), mask=at < D)
