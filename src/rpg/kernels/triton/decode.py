# mypy: ignore-errors
"""The kernels of decode.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_blocks_of(shared, own, low, low_own, BLOCK: tl.constexpr):
    """Blocks with a token in sight: of the prompt, and of prompt and response together."""
    prompt_blocks = tl.where(low < shared, (shared + BLOCK - 1) // BLOCK - low // BLOCK, 0)
    return prompt_blocks, prompt_blocks + tl.where(low_own < own, (own + BLOCK - 1) // BLOCK - low_own // BLOCK, 0)


@triton.jit
def begin_of(i, prompt_blocks, low, low_own, BLOCK: tl.constexpr):
    """The first token of block i, and whether it is of the prompt, whose blocks come first."""
    inside = i < prompt_blocks
    return (tl.where(inside, low, low_own) // BLOCK + i - tl.where(inside, 0, prompt_blocks)) * BLOCK, inside


@triton.jit
def page_of(i, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page that block i lies in. It is asked for a block ahead, so that nobody waits for it."""
    begin, inside = begin_of(i, prompt_blocks, low, low_own, BLOCK)
    return tl.load(tl.where(inside, prompt_pages, own_pages) + begin // PAGE, mask=i < stop, other=0).to(tl.int64)


@triton.jit
def attend(
    query, key, value, keys, values,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    output, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, prompt_pages_q, own_pages_s,
    H, splits,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    a, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(length_A + a)
    live = own >= 0
    own = tl.maximum(own, 0)
    shared = tl.where(live, tl.load(prompt_length_A + a), 0)
    prompt_pages += tl.load(prompt_A + a).to(tl.int64) * prompt_pages_q
    own_pages += tl.load(slot_A + a).to(tl.int64) * own_pages_s
    low = 0
    if WINDOW:
        low = tl.maximum(shared + own + 1 - window, 0)
    low_own = tl.maximum(low - shared, 0)
    prompt_blocks, blocks = own_blocks_of(shared, own, low, low_own, BLOCK)
    start, stop = blocks * split // splits, blocks * (split + 1) // splits
    page = page_of(start, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)

    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    wide = at < D
    taken = (head < GROUP)[:, None] & wide[None, :] & live
    a = a.to(tl.int64)
    query_ptr = query + a * query_a + (g * GROUP + head)[:, None] * query_h + at[None, :]
    q_HD = tl.load(query_ptr, mask=taken, other=0.0).to(keys.dtype.element_ty)

    # the new token: into the cache, and the first of what the first program sees
    first = live & (split == 0)
    new_page = tl.load(own_pages + own // PAGE, mask=first, other=0).to(tl.int64)
    end = ((new_page * G + g) * PAGE + own % PAGE) * D + at
    k_D = tl.load(key + a * key_a + g * key_g + at, mask=wide & first, other=0.0).to(keys.dtype.element_ty)
    v_D = tl.load(value + a * value_a + g * value_g + at, mask=wide & first, other=0.0).to(values.dtype.element_ty)
    tl.store(keys + end, k_D, mask=wide & first)
    tl.store(values + end, v_D, mask=wide & first)
    new_H = tl.sum(q_HD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1) * scale
    top_H = tl.where(split == 0, new_H, float("-inf"))
    mass_H = tl.where(split == 0, tl.full([HEADS], 1.0, tl.float32), 0.0)
    sum_HD = tl.zeros([HEADS, WIDTH], tl.float32) + v_D.to(tl.float32)[None, :]

    for i in range(start, stop):
        next_page = page_of(i + 1, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)
        begin, inside = begin_of(i, prompt_blocks, low, low_own, BLOCK)
        token = begin + tl.arange(0, BLOCK)
        seen = (token >= tl.where(inside, low, low_own)) & (token < tl.where(inside, shared, own))
        place_B = (page * G + g) * PAGE + begin % PAGE + tl.arange(0, BLOCK)
        offset = place_B[:, None] * D + at[None, :]
        mask = seen[:, None]
        if D < WIDTH:
            mask = mask & wide[None, :]
        k_BD = tl.load(keys + offset, mask=mask, other=0.0)
        v_BD = tl.load(values + offset, mask=mask, other=0.0)
        logit_HB = tl.dot(q_HD, tl.trans(k_BD), input_precision=PRECISION) * scale
        logit_HB = tl.where(seen[None, :], logit_HB, float("-inf"))
        new_H = tl.maximum(top_H, tl.max(logit_HB, 1))
        weight_HB = tl.exp2(logit_HB - new_H[:, None])
        keep_H = tl.exp2(top_H - new_H)
        mass_H = mass_H * keep_H + tl.sum(weight_HB, 1)
        sum_HD = tl.dot(weight_HB.to(v_BD.dtype), v_BD, sum_HD * keep_H[:, None], input_precision=PRECISION)
        top_H, page = new_H, next_page

    row_H = a * H + g * GROUP + head
    if SPLIT:
        row_H = row_H * splits + split
        tl.store(part + row_H[:, None] * D + at[None, :], sum_HD, mask=taken)
        tl.store(top + row_H, top_H, mask=(head < GROUP) & live)
        tl.store(mass + row_H, mass_H, mask=(head < GROUP) & live)
    else:
        sum_HD = tl.where(live, sum_HD / mass_H[:, None], 0.0)
        there = (head < GROUP)[:, None] & wide[None, :]
        tl.store(output + row_H[:, None] * D + at[None, :], sum_HD.to(output.dtype.element_ty), mask=there)


@triton.jit
def halves(pair):
    """Two numbers of 8 bits (e4m3) as float16, divided by 256: sign, exponent and fraction move to their places."""
    even = ((pair & 0x80) << 8) | ((pair & 0x7F) << 7)
    odd = (pair & -0x8000) | ((pair & 0x7F00) >> 1)
    return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)


@triton.jit
def attend_8_bits(
    query, key, value, keys, values, key_pairs, value_pairs, key_scale, value_scale,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    output, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, prompt_pages_q, own_pages_s,
    H, splits,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """As attend. Numbers are read in pairs, 16 bits, which the matrix units' loads take; so all that is D wide is in
    two halves here, of even and of odd numbers."""
    a, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(length_A + a)
    live = own >= 0
    own = tl.maximum(own, 0)
    shared = tl.where(live, tl.load(prompt_length_A + a), 0)
    prompt_pages += tl.load(prompt_A + a).to(tl.int64) * prompt_pages_q
    own_pages += tl.load(slot_A + a).to(tl.int64) * own_pages_s
    low = 0
    if WINDOW:
        low = tl.maximum(shared + own + 1 - window, 0)
    low_own = tl.maximum(low - shared, 0)
    prompt_blocks, blocks = own_blocks_of(shared, own, low, low_own, BLOCK)
    start, stop = blocks * split // splits, blocks * (split + 1) // splits
    page = page_of(start, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)

    head, at = tl.arange(0, HEADS), tl.arange(0, HALF)
    wide = 2 * at < D
    taken = (head < GROUP)[:, None] & wide[None, :] & live
    a = a.to(tl.int64)
    query_ptr = query + a * query_a + (g * GROUP + head)[:, None] * query_h + 2 * at[None, :]
    q_even = tl.load(query_ptr, mask=taken, other=0.0).to(tl.float16)
    q_odd = tl.load(query_ptr + 1, mask=taken, other=0.0).to(tl.float16)

    # the new token: rounded, into the cache, and the first of what the first program sees
    first = live & (split == 0)
    new_page = tl.load(own_pages + own // PAGE, mask=first, other=0).to(tl.int64)
    end = (new_page * G + g) * PAGE + own % PAGE
    new_key, new_value = key + a * key_a + g * key_g + 2 * at, value + a * value_a + g * value_g + 2 * at
    k_even = tl.load(new_key, mask=wide & first, other=0.0).to(tl.float32)
    k_odd = tl.load(new_key + 1, mask=wide & first, other=0.0).to(tl.float32)
    v_even = tl.load(new_value, mask=wide & first, other=0.0).to(tl.float32)
    v_odd = tl.load(new_value + 1, mask=wide & first, other=0.0).to(tl.float32)
    k_scale = tl.maximum(tl.max(tl.maximum(tl.abs(k_even), tl.abs(k_odd)), 0) / MOST, LEAST)
    v_scale = tl.maximum(tl.max(tl.maximum(tl.abs(v_even), tl.abs(v_odd)), 0) / MOST, LEAST)
    k_even, k_odd = (k_even / k_scale).to(keys.dtype.element_ty), (k_odd / k_scale).to(keys.dtype.element_ty)
    v_even, v_odd = (v_even / v_scale).to(keys.dtype.element_ty), (v_odd / v_scale).to(keys.dtype.element_ty)
    tl.store(key_scale + end, k_scale, mask=first)
    tl.store(value_scale + end, v_scale, mask=first)
    tl.store(keys + end * D + 2 * at, k_even, mask=wide & first)
    tl.store(keys + end * D + 2 * at + 1, k_odd, mask=wide & first)
    tl.store(values + end * D + 2 * at, v_even, mask=wide & first)
    tl.store(values + end * D + 2 * at + 1, v_odd, mask=wide & first)
    new_H = tl.sum(q_even.to(tl.float32) * k_even.to(tl.float32)[None, :], 1)
    new_H = (new_H + tl.sum(q_odd.to(tl.float32) * k_odd.to(tl.float32)[None, :], 1)) * (k_scale * scale)
    top_H = tl.where(split == 0, new_H, float("-inf"))
    mass_H = tl.where(split == 0, tl.full([HEADS], 1.0, tl.float32), 0.0)
    sum_even = tl.zeros([HEADS, HALF], tl.float32) + (v_even.to(tl.float32) * v_scale)[None, :]
    sum_odd = tl.zeros([HEADS, HALF], tl.float32) + (v_odd.to(tl.float32) * v_scale)[None, :]

    for i in range(start, stop):
        next_page = page_of(i + 1, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)
        begin, inside = begin_of(i, prompt_blocks, low, low_own, BLOCK)
        token = begin + tl.arange(0, BLOCK)
        seen = (token >= tl.where(inside, low, low_own)) & (token < tl.where(inside, shared, own))
        place_B = (page * G + g) * PAGE + begin % PAGE + tl.arange(0, BLOCK)
        offset = place_B[:, None] * (D // 2) + at[None, :]
        mask = seen[:, None]
        if D < 2 * HALF:
            mask = mask & wide[None, :]
        k_even_BD, k_odd_BD = halves(tl.load(key_pairs + offset, mask=mask, other=0))
        v_even_BD, v_odd_BD = halves(tl.load(value_pairs + offset, mask=mask, other=0))
        k_scale_B = tl.load(key_scale + place_B, mask=seen, other=0.0) * (256 * scale)
        v_scale_B = tl.load(value_scale + place_B, mask=seen, other=0.0) * 256
        logit_HB = tl.dot(q_odd, tl.trans(k_odd_BD), tl.dot(q_even, tl.trans(k_even_BD)))
        logit_HB = tl.where(seen[None, :], logit_HB * k_scale_B[None, :], float("-inf"))
        new_H = tl.maximum(top_H, tl.max(logit_HB, 1))
        weight_HB = tl.exp2(logit_HB - new_H[:, None])
        keep_H = tl.exp2(top_H - new_H)
        mass_H = mass_H * keep_H + tl.sum(weight_HB, 1)
        weight_HB = (weight_HB * v_scale_B[None, :]).to(tl.float16)
        sum_even = tl.dot(weight_HB, v_even_BD, sum_even * keep_H[:, None])
        sum_odd = tl.dot(weight_HB, v_odd_BD, sum_odd * keep_H[:, None])
        top_H, page = new_H, next_page

    row_H = a * H + g * GROUP + head
    if SPLIT:
        row_H = row_H * splits + split
        part_ptr = part + row_H[:, None] * D + 2 * at[None, :]
        tl.store(part_ptr, sum_even, mask=taken)
        tl.store(part_ptr + 1, sum_odd, mask=taken)
        tl.store(top + row_H, top_H, mask=(head < GROUP) & live)
        tl.store(mass + row_H, mass_H, mask=(head < GROUP) & live)
    else:
        there = (head < GROUP)[:, None] & wide[None, :]
        output_ptr = output + row_H[:, None] * D + 2 * at[None, :]
        sum_even, sum_odd = sum_even / mass_H[:, None], sum_odd / mass_H[:, None]
        tl.store(output_ptr, tl.where(live, sum_even, 0.0).to(output.dtype.element_ty), mask=there)
        tl.store(output_ptr + 1, tl.where(live, sum_odd, 0.0).to(output.dtype.element_ty), mask=there)


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
