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
def halves(pair, ASM: tl.constexpr):
    """Two numbers of 8 bits (e4m3) as float16: even ones, odd ones. By the chip's own conversion, or bit by bit."""
    if ASM:
        even = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 x, a; "
            "cvt.rn.f16x2.e4m3x2 y, b; prmt.b32 $0, x, y, 0x5410; }",
            "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 x, a; "
            "cvt.rn.f16x2.e4m3x2 y, b; prmt.b32 $0, x, y, 0x7632; }",
            "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        return even, odd
    else:  # noqa: RET505 - Triton drops the other branch only so
        even = ((pair & 0x80) << 8) | ((pair & 0x7F) << 7)  # sign, exponent and fraction move to their places
        odd = (pair & -0x8000) | ((pair & 0x7F00) >> 1)
        return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def finished(
    x, other, weight, other_weight, cos, sin, eps, dtype: tl.constexpr,
    D: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Heads [R,WIDTH] after their norm and rotation, rounded wherever the model would write a tensor.

    ``other`` has at each place the number that the rotation brings there, half a head away; sin has the sign.
    """
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        x, other = x * root, other * root
        if ROUND:
            x, other = x.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        x = (x * (weight + OFFSET)).to(dtype).to(tl.float32)
        other = (other * (other_weight + OFFSET)).to(dtype).to(tl.float32)
    if ROTARY:
        x = (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def attend(
    query, key, value, keys, values, key_pairs, value_pairs, key_scale, value_scale,
    cos, sin, query_norm, key_norm, eps,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    output, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, angle_a, prompt_pages_q, own_pages_s,
    H, splits,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """PAIRS: keys and values have 8 bits. They are read in pairs, 16 bits, which the matrix units' loads take; so what
    is summed over them is in two halves, of even and of odd numbers."""
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
    first = live & (split == 0)
    new_page = tl.load(own_pages + own // PAGE, mask=first, other=0).to(tl.int64)

    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    wide = at < D
    taken = (head < GROUP)[:, None] & wide[None, :] & live
    a = a.to(tl.int64)
    query_ptr = query + a * query_a + (g * GROUP + head)[:, None] * query_h
    key_ptr = key + a * key_a + g * key_g
    q_HD = tl.load(query_ptr + at[None, :], mask=taken, other=0.0).to(tl.float32)
    k_1D = tl.load(key_ptr + at, mask=wide & first, other=0.0).to(tl.float32)[None, :]
    v_D = tl.load(value + a * value_a + g * value_g + at, mask=wide & first, other=0.0)

    # what is still to be done to queries and keys
    partner = tl.where(at < D // 2, at + D // 2, at - D // 2)
    other_q_HD, other_k_1D, cos_1D, sin_1D = q_HD, k_1D, 1.0, 0.0
    if ROTARY:
        other_q_HD = tl.load(query_ptr + partner[None, :], mask=taken, other=0.0).to(tl.float32)
        other_k_1D = tl.load(key_ptr + partner, mask=wide & first, other=0.0).to(tl.float32)[None, :]
        cos_1D = tl.load(cos + a * angle_a + at, mask=wide & live, other=0.0).to(tl.float32)[None, :]
        sin_D = tl.load(sin + a * angle_a + at, mask=wide & live, other=0.0).to(tl.float32)
        sin_1D = tl.where(at < D // 2, -sin_D, sin_D)[None, :]
    q_weight, k_weight, other_q_weight, other_k_weight = 1.0, 1.0, 1.0, 1.0
    if NORM:
        q_weight = tl.load(query_norm + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(key_norm + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        other_q_weight = tl.load(query_norm + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
        other_k_weight = tl.load(key_norm + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
    q_HD = finished(
        q_HD, other_q_HD, q_weight, other_q_weight, cos_1D, sin_1D, eps, query.dtype.element_ty,
        D, NORM, OFFSET, ROUND, ROTARY,
    )  # fmt: skip
    k_1D = finished(
        k_1D, other_k_1D, k_weight, other_k_weight, cos_1D, sin_1D, eps, query.dtype.element_ty,
        D, NORM, OFFSET, ROUND, ROTARY,
    )  # fmt: skip
    k_D = tl.reshape(k_1D, [WIDTH])

    # the new token: into the cache, and the first of what the first program sees
    end = (new_page * G + g) * PAGE + own % PAGE
    v_D = v_D.to(tl.float32)
    k_scale, v_scale = 1.0, 1.0
    if PAIRS:
        q_HD = q_HD.to(tl.float16).to(tl.float32)
        k_scale = tl.maximum(tl.max(tl.abs(k_D), 0) / MOST, LEAST)
        v_scale = tl.maximum(tl.max(tl.abs(v_D), 0) / MOST, LEAST)
        tl.store(key_scale + end, k_scale, mask=first)
        tl.store(value_scale + end, v_scale, mask=first)
    else:
        q_HD = q_HD.to(keys.dtype.element_ty).to(tl.float32)
    k_D, v_D = (k_D / k_scale).to(keys.dtype.element_ty), (v_D / v_scale).to(keys.dtype.element_ty)
    tl.store(keys + end * D + at, k_D, mask=wide & first)
    tl.store(values + end * D + at, v_D, mask=wide & first)
    new_H = tl.sum(q_HD * k_D.to(tl.float32)[None, :], 1) * (k_scale * scale)
    top_H = tl.where(split == 0, new_H, float("-inf"))
    mass_H = tl.where(split == 0, tl.full([HEADS], 1.0, tl.float32), 0.0)
    sum_HD = tl.zeros([HEADS, WIDTH], tl.float32) + (v_D.to(tl.float32) * v_scale)[None, :]
    at_pair = tl.arange(0, WIDTH // 2)
    if PAIRS:
        q_even, q_odd = tl.split(tl.reshape(q_HD, [HEADS, WIDTH // 2, 2]))
        q_even, q_odd = q_even.to(tl.float16), q_odd.to(tl.float16)
        sum_even, sum_odd = tl.split(tl.reshape(sum_HD, [HEADS, WIDTH // 2, 2]))
    else:
        q_HD = q_HD.to(keys.dtype.element_ty)

    for i in range(start, stop):
        next_page = page_of(i + 1, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)
        begin, inside = begin_of(i, prompt_blocks, low, low_own, BLOCK)
        token = begin + tl.arange(0, BLOCK)
        seen = (token >= tl.where(inside, low, low_own)) & (token < tl.where(inside, shared, own))
        place_B = (page * G + g) * PAGE + begin % PAGE + tl.arange(0, BLOCK)
        mask = seen[:, None]
        if PAIRS:
            offset = place_B[:, None] * (D // 2) + at_pair[None, :]
            if D < WIDTH:
                mask = mask & (2 * at_pair < D)[None, :]
            k_even_BD, k_odd_BD = halves(tl.load(key_pairs + offset, mask=mask, other=0), ASM)
            v_even_BD, v_odd_BD = halves(tl.load(value_pairs + offset, mask=mask, other=0), ASM)
            k_scale_B = tl.load(key_scale + place_B, mask=seen, other=0.0) * scale
            v_scale_B = tl.load(value_scale + place_B, mask=seen, other=0.0)
            logit_HB = tl.dot(q_odd, tl.trans(k_odd_BD), tl.dot(q_even, tl.trans(k_even_BD)))
            logit_HB = logit_HB * k_scale_B[None, :]
        else:
            offset = place_B[:, None] * D + at[None, :]
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
        if PAIRS:
            weight_HB = (weight_HB * v_scale_B[None, :]).to(tl.float16)
            sum_even = tl.dot(weight_HB, v_even_BD, sum_even * keep_H[:, None])
            sum_odd = tl.dot(weight_HB, v_odd_BD, sum_odd * keep_H[:, None])
        else:
            sum_HD = tl.dot(weight_HB.to(v_BD.dtype), v_BD, sum_HD * keep_H[:, None], input_precision=PRECISION)
        top_H, page = new_H, next_page

    if PAIRS:
        sum_HD = tl.reshape(tl.join(sum_even, sum_odd), [HEADS, WIDTH])
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
