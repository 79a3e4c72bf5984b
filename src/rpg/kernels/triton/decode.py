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
def joined(top_H, mass_H, sum_HD, other_top_H, other_mass_H, other_sum_HD):
    """Two parts of a softmax as one. Either may be empty: its top is -inf."""
    new_H = tl.maximum(top_H, other_top_H)
    base_H = tl.where(new_H == float("-inf"), 0.0, new_H)
    keep_H, add_H = tl.exp2(top_H - base_H), tl.exp2(other_top_H - base_H)
    mass_H = mass_H * keep_H + other_mass_H * add_H
    return new_H, mass_H, sum_HD * keep_H[:, None] + other_sum_HD * add_H[:, None]


@triton.jit
def begun(part, top, mass, row_H, taken_H, parts, D: tl.constexpr, WIDTH: tl.constexpr):
    """What attend_prompts has left for these heads; its first part has the new token."""
    at = tl.arange(0, WIDTH)
    there_HD = taken_H[:, None] & (at < D)[None, :]
    place_H = row_H * parts
    top_H = tl.load(top + place_H, mask=taken_H, other=float("-inf"))
    mass_H = tl.load(mass + place_H, mask=taken_H, other=0.0)
    sum_HD = tl.load(part + place_H[:, None] * D + at[None, :], mask=there_HD, other=0.0)
    for i in range(1, parts):
        place_H = row_H * parts + i
        top_i_H = tl.load(top + place_H, mask=taken_H, other=float("-inf"))
        mass_i_H = tl.load(mass + place_H, mask=taken_H, other=0.0)
        sum_i_HD = tl.load(part + place_H[:, None] * D + at[None, :], mask=there_HD, other=0.0)
        top_H, mass_H, sum_HD = joined(top_H, mass_H, sum_HD, top_i_H, mass_i_H, sum_i_HD)
    return top_H, mass_H, sum_HD


@triton.jit
def asked_heads(pointer, stride, at, mask, KEYS: tl.constexpr):
    """Numbers of KEYS key heads. Of one head they are asked for as a vector, which is laid out better."""
    if KEYS == 1:
        return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)[None, :]
    else:  # noqa: RET505 - Triton drops the other branch only so
        where = tl.arange(0, KEYS)[:, None] * stride + at[None, :]
        return tl.load(pointer + where, mask=mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def new_token(
    q_HD, k_KD, v_KD, keys, values, key_scale, value_scale, page, place, g, first, scale,
    G: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Its key and value go into the cache. What each query head makes of it: a logit, and the value."""
    at, one = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    wide = at < D
    if KEYS == 1:
        end = (page * G + g) * PAGE + place
        k_D, v_D = tl.reshape(k_KD, [WIDTH]), tl.reshape(v_KD, [WIDTH])
        k_scale, v_scale = 1.0, 1.0
        if PAIRS:
            k_scale = tl.maximum(tl.max(tl.abs(k_D), 0) / MOST, LEAST)
            v_scale = tl.maximum(tl.max(tl.abs(v_D), 0) / MOST, LEAST)
            tl.store(key_scale + end, k_scale, mask=first)
            tl.store(value_scale + end, v_scale, mask=first)
        k_D, v_D = (k_D / k_scale).to(keys.dtype.element_ty), (v_D / v_scale).to(keys.dtype.element_ty)
        tl.store(keys + end * D + at, k_D, mask=wide & first)
        tl.store(values + end * D + at, v_D, mask=wide & first)
        logit_H = tl.sum(q_HD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1) * (k_scale * scale)
        return logit_H, tl.zeros([HEADS, WIDTH], tl.float32) + (v_D.to(tl.float32) * v_scale)[None, :]
    else:  # noqa: RET505 - Triton drops the other branch only so
        end_K = (page * G + g + one) * PAGE + place
        k_scale_K, v_scale_K = tl.full([KEYS], 1.0, tl.float32), tl.full([KEYS], 1.0, tl.float32)
        if PAIRS:
            k_scale_K = tl.maximum(tl.max(tl.abs(k_KD), 1) / MOST, LEAST)
            v_scale_K = tl.maximum(tl.max(tl.abs(v_KD), 1) / MOST, LEAST)
            tl.store(key_scale + end_K, k_scale_K, mask=first & (one < KEYS))
            tl.store(value_scale + end_K, v_scale_K, mask=first & (one < KEYS))
        k_KD = (k_KD / k_scale_K[:, None]).to(keys.dtype.element_ty)
        v_KD = (v_KD / v_scale_K[:, None]).to(keys.dtype.element_ty)
        tl.store(keys + end_K[:, None] * D + at[None, :], k_KD, mask=wide[None, :] & first)
        tl.store(values + end_K[:, None] * D + at[None, :], v_KD, mask=wide[None, :] & first)
        k_KD, v_KD = k_KD.to(tl.float32) * k_scale_K[:, None], v_KD.to(tl.float32) * v_scale_K[:, None]
        of_H = tl.minimum(tl.arange(0, HEADS) // GROUP, KEYS - 1)
        mine_HK1 = (of_H[:, None] == one[None, :])[:, :, None]
        k_HD = tl.sum(tl.where(mine_HK1, k_KD[None, :, :], 0.0), 1)
        return tl.sum(q_HD.to(tl.float32) * k_HD, 1) * scale, tl.sum(tl.where(mine_HK1, v_KD[None, :, :], 0.0), 1)


@triton.jit
def attend(
    query, key, value, keys, values, key_pairs, value_pairs, key_scale, value_scale,
    cos, sin, query_norm, key_norm, eps,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    output, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, angle_a, prompt_pages_q, own_pages_s,
    H, splits, parts,
    G: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr,
    SHARED: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PAIRS: keys and values have 8 bits. They are read in pairs, 16 bits, which the matrix units' loads take; so what
    is summed over them is in two halves, of even and of odd numbers.

    KEYS: key heads of a program; their tokens lie one after another in its blocks, and a query head sees those of its
    own. LATE: the new token comes last, so that the blocks are asked for before it is made. SHARED: attend_prompts has
    finished the queries, written the new token, and begun every row. EARLY: it may still be at work.
    """
    a, g, split = tl.program_id(0), tl.program_id(1) * KEYS, tl.program_id(2)
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
    if SHARED:
        prompt_blocks, blocks = 0, blocks - prompt_blocks
    start, stop = blocks * split // splits, blocks * (split + 1) // splits
    page = page_of(start, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)
    first = live & (split == 0)
    if not SHARED:
        new_page = tl.load(own_pages + own // PAGE, mask=first, other=0).to(tl.int64)

    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    wide = at < D
    there_H = head < KEYS * GROUP
    taken_H = there_H & live
    asked_H, asked = taken_H, wide & live
    if LATE or SHARED:  # without waiting for the row's length: a dead row's query is there too
        asked_H, asked = there_H, wide
    if EARLY:
        tl.extra.cuda.gdc_wait()
    a = a.to(tl.int64)
    row_H = a * H + g * GROUP + head
    query_ptr = query + a * query_a + (g * GROUP + head)[:, None] * query_h
    q_HD = tl.load(query_ptr + at[None, :], mask=asked_H[:, None] & wide[None, :], other=0.0).to(tl.float32)

    key += a * key_a + g * key_g
    k_KD, v_KD = 0.0, 0.0
    if not SHARED:
        k_KD = asked_heads(key, key_g, at, wide & first, KEYS)
        v_KD = asked_heads(value + a * value_a + g * value_g, value_g, at, wide & first, KEYS)

    # what is still to be done to queries and keys
    partner = tl.where(at < D // 2, at + D // 2, at - D // 2)
    other_q_HD, other_k_KD, cos_1D, sin_1D = q_HD, k_KD, 1.0, 0.0
    if ROTARY:
        other_q_HD = tl.load(query_ptr + partner[None, :], mask=asked_H[:, None] & wide[None, :], other=0.0)
        other_q_HD = other_q_HD.to(tl.float32)
        other_k_KD = asked_heads(key, key_g, partner, wide & first, KEYS)
        cos_1D = tl.load(cos + a * angle_a + at, mask=asked, other=0.0).to(tl.float32)[None, :]
        sin_D = tl.load(sin + a * angle_a + at, mask=asked, other=0.0).to(tl.float32)
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
    if not SHARED:
        k_KD = finished(
            k_KD, other_k_KD, k_weight, other_k_weight, cos_1D, sin_1D, eps, query.dtype.element_ty,
            D, NORM, OFFSET, ROUND, ROTARY,
        )  # fmt: skip
    q_HD = q_HD.to(tl.float16 if PAIRS else keys.dtype.element_ty).to(tl.float32)
    top_H = tl.full([HEADS], float("-inf"), tl.float32)
    mass_H = tl.zeros([HEADS], tl.float32)
    sum_HD = tl.zeros([HEADS, WIDTH], tl.float32)
    if SHARED:
        if not SPLIT:
            top_H, mass_H, sum_HD = begun(part, top, mass, row_H, taken_H, parts, D, WIDTH)
    elif not LATE:
        new_H, v_HD = new_token(
            q_HD, k_KD, v_KD, keys, values, key_scale, value_scale, new_page, own % PAGE, g, first, scale,
            G, GROUP, KEYS, HEADS, D, WIDTH, PAGE, PAIRS, MOST, LEAST,
        )  # fmt: skip
        top_H = tl.where(split == 0, new_H, float("-inf"))
        mass_H = tl.where(split == 0, tl.full([HEADS], 1.0, tl.float32), 0.0)
        sum_HD = v_HD
    if PAIRS:
        q_HD = q_HD.to(tl.float16)
        q_even, q_odd = tl.split(tl.reshape(q_HD, [HEADS, WIDTH // 2, 2]))
        sum_even, sum_odd = tl.split(tl.reshape(sum_HD, [HEADS, WIDTH // 2, 2]))
    else:
        q_HD = q_HD.to(keys.dtype.element_ty)
    at_pair, lane = tl.arange(0, WIDTH // 2), tl.arange(0, KEYS * BLOCK)
    ahead_B, of_B = lane, 0  # tokens and key heads after the first of a block
    if KEYS > 1:
        ahead_B, of_B = lane % BLOCK, lane // BLOCK

    for i in range(start, stop):
        next_page = page_of(i + 1, stop, prompt_blocks, low, low_own, prompt_pages, own_pages, PAGE, BLOCK)
        begin, inside = begin_of(i, prompt_blocks, low, low_own, BLOCK)
        token = begin + ahead_B
        seen = (token >= tl.where(inside, low, low_own)) & (token < tl.where(inside, shared, own))
        place_B = (page * G + g + of_B) * PAGE + begin % PAGE + ahead_B
        mask, seen_HB = seen[:, None], seen[None, :]
        if KEYS > 1:
            seen_HB = seen_HB & (tl.minimum(head // GROUP, KEYS - 1)[:, None] == of_B[None, :])
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
        logit_HB = tl.where(seen_HB, logit_HB, float("-inf"))
        new_H = tl.maximum(top_H, tl.max(logit_HB, 1))  # every block has a token in sight
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
    if LATE and not SHARED:
        new_H, v_HD = new_token(
            q_HD, k_KD, v_KD, keys, values, key_scale, value_scale, new_page, own % PAGE, g, first, scale,
            G, GROUP, KEYS, HEADS, D, WIDTH, PAGE, PAIRS, MOST, LEAST,
        )  # fmt: skip
        new_H = tl.where(split == 0, new_H, float("-inf"))
        mass_new_H = tl.full([HEADS], 1.0, tl.float32)
        top_H, mass_H, sum_HD = joined(top_H, mass_H, sum_HD, new_H, mass_new_H, v_HD)
    if SPLIT:
        row_H = row_H * (splits + parts) + split
        tl.store(part + row_H[:, None] * D + at[None, :], sum_HD, mask=taken_H[:, None] & wide[None, :])
        tl.store(top + row_H, top_H, mask=taken_H)
        tl.store(mass + row_H, mass_H, mask=taken_H)
    else:
        sum_HD = tl.where(live, sum_HD / mass_H[:, None], 0.0)
        there_HD = there_H[:, None] & wide[None, :]
        tl.store(output + row_H[:, None] * D + at[None, :], sum_HD.to(output.dtype.element_ty), mask=there_HD)


@triton.jit
def attend_prompts(
    query, key, value, keys, values, key_pairs, value_pairs, key_scale, value_scale,
    cos, sin, query_norm, key_norm, eps,
    prompt_pages, own_pages, prompt_A, prompt_length_A, slot_A, length_A,
    finished_query, part, top, mass, scale, window,
    query_a, query_h, key_a, key_g, value_a, value_g, angle_a, prompt_pages_q, own_pages_s,
    A, H, splits, parts, first_part,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The prompts and the new tokens of ROWS rows, for a key head: each prompt that any of them has is read once for
    all that have it. What remains for `attend` are the tokens of each response. HEADS: query heads of all these rows,
    filled up. EARLY: the kernel after this one may begin.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_H, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    a_H = tile * ROWS + i_H // GROUP
    live_H = (i_H < ROWS * GROUP) & (a_H < A)
    own_H = tl.load(length_A + a_H, mask=live_H, other=-1)
    live_H = live_H & (own_H >= 0)
    prompt_H = tl.load(prompt_A + a_H, mask=live_H, other=0)
    shared_H = tl.load(prompt_length_A + a_H, mask=live_H, other=0)
    low_H = tl.zeros([HEADS], tl.int32)
    if WINDOW:
        low_H = tl.maximum(shared_H + own_H + 1 - window, 0)
    sees_H = live_H & (low_H < shared_H)
    first_H = live_H & (split == 0)
    own_H = tl.maximum(own_H, 0)
    slot_H = tl.load(slot_A + a_H, mask=first_H, other=0).to(tl.int64)
    new_page_H = tl.load(own_pages + slot_H * own_pages_s + own_H // PAGE, mask=first_H, other=0).to(tl.int64)

    wide = at < D
    taken, first_taken = live_H[:, None] & wide[None, :], first_H[:, None] & wide[None, :]
    a_H = a_H.to(tl.int64)
    head_H = g * GROUP + i_H % GROUP
    query_ptr = query + (a_H * query_a + head_H * query_h)[:, None]
    q_HD = tl.load(query_ptr + at[None, :], mask=taken, other=0.0).to(tl.float32)
    partner = tl.where(at < D // 2, at + D // 2, at - D // 2)
    other_q_HD, cos_HD, sin_HD = q_HD, 1.0, 0.0
    if ROTARY:
        other_q_HD = tl.load(query_ptr + partner[None, :], mask=taken, other=0.0).to(tl.float32)
        angle = (a_H * angle_a)[:, None] + at[None, :]
        cos_HD = tl.load(cos + angle, mask=taken, other=0.0).to(tl.float32)
        sin_HD = tl.load(sin + angle, mask=taken, other=0.0).to(tl.float32)
        sin_HD = tl.where((at < D // 2)[None, :], -sin_HD, sin_HD)
    weight, other_weight, k_weight, other_k_weight = 1.0, 1.0, 1.0, 1.0
    if NORM:
        weight = tl.load(query_norm + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(query_norm + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(key_norm + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        other_k_weight = tl.load(key_norm + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
    q_HD = finished(
        q_HD, other_q_HD, weight, other_weight, cos_HD, sin_HD, eps, query.dtype.element_ty,
        D, NORM, OFFSET, ROUND, ROTARY,
    )  # fmt: skip

    where_HD = (a_H * H + head_H)[:, None] * D + at[None, :]
    tl.store(finished_query + where_HD, q_HD.to(query.dtype.element_ty), mask=first_taken)

    # the new tokens: into the cache, and the first that is seen
    key_ptr = key + (a_H * key_a + g * key_g)[:, None]
    k_HD = tl.load(key_ptr + at[None, :], mask=first_taken, other=0.0).to(tl.float32)
    v_HD = tl.load(value + (a_H * value_a + g * value_g)[:, None] + at[None, :], mask=first_taken, other=0.0)
    v_HD, other_k_HD = v_HD.to(tl.float32), k_HD
    if ROTARY:
        other_k_HD = tl.load(key_ptr + partner[None, :], mask=first_taken, other=0.0).to(tl.float32)
    k_HD = finished(
        k_HD, other_k_HD, k_weight, other_k_weight, cos_HD, sin_HD, eps, query.dtype.element_ty,
        D, NORM, OFFSET, ROUND, ROTARY,
    )  # fmt: skip
    one_H = first_H & (i_H % GROUP == 0)  # of the query heads that share a key
    one_taken = one_H[:, None] & wide[None, :]
    end_H = (new_page_H * G + g) * PAGE + own_H % PAGE
    k_scale_H, v_scale_H = tl.full([HEADS], 1.0, tl.float32), tl.full([HEADS], 1.0, tl.float32)
    if PAIRS:
        k_scale_H = tl.maximum(tl.max(tl.abs(k_HD), 1) / MOST, LEAST)
        v_scale_H = tl.maximum(tl.max(tl.abs(v_HD), 1) / MOST, LEAST)
        tl.store(key_scale + end_H, k_scale_H, mask=one_H)
        tl.store(value_scale + end_H, v_scale_H, mask=one_H)
        k_HD, v_HD = k_HD / k_scale_H[:, None], v_HD / v_scale_H[:, None]
        q_HD = q_HD.to(tl.float16)
        q_even, q_odd = tl.split(tl.reshape(q_HD, [HEADS, WIDTH // 2, 2]))
    else:
        q_HD = q_HD.to(keys.dtype.element_ty)
    k_HD, v_HD = k_HD.to(keys.dtype.element_ty), v_HD.to(keys.dtype.element_ty)
    tl.store(keys + end_H[:, None] * D + at[None, :], k_HD, mask=one_taken)
    tl.store(values + end_H[:, None] * D + at[None, :], v_HD, mask=one_taken)
    top_H = tl.sum(q_HD.to(tl.float32) * k_HD.to(tl.float32), 1) * (k_scale_H * scale)
    top_H = tl.where(first_H, top_H, float("-inf"))
    mass_H = tl.where(first_H, tl.full([HEADS], 1.0, tl.float32), 0.0)
    sum_HD = v_HD.to(tl.float32) * v_scale_H[:, None]  # nothing, where it is not the first
    if PAIRS:
        sum_even, sum_odd = tl.split(tl.reshape(sum_HD, [HEADS, WIDTH // 2, 2]))
    at_pair = tl.arange(0, WIDTH // 2)

    NONE: tl.constexpr = 2**31 - 1
    prompt = tl.min(tl.where(sees_H, prompt_H, NONE), 0)
    while prompt < NONE:
        mine_H = sees_H & (prompt_H == prompt)
        low_mine_H, end_mine_H = tl.where(mine_H, low_H, NONE), tl.where(mine_H, shared_H, 0)
        low, end = tl.min(low_mine_H, 0), tl.max(end_mine_H, 0)
        first = low // BLOCK
        blocks = (end + BLOCK - 1) // BLOCK - first
        start, stop = first + blocks * split // splits, first + blocks * (split + 1) // splits
        pages = prompt_pages + prompt.to(tl.int64) * prompt_pages_q
        page = tl.load(pages + start * BLOCK // PAGE, mask=start < stop, other=0).to(tl.int64)
        for i in range(start, stop):
            next_page = tl.load(pages + (i + 1) * BLOCK // PAGE, mask=i + 1 < stop, other=0).to(tl.int64)
            token = i * BLOCK + tl.arange(0, BLOCK)
            there = token < end
            seen_HB = (token[None, :] >= low_mine_H[:, None]) & (token[None, :] < end_mine_H[:, None])
            place_B = (page * G + g) * PAGE + i * BLOCK % PAGE + tl.arange(0, BLOCK)
            mask = there[:, None]
            if PAIRS:
                offset = place_B[:, None] * (D // 2) + at_pair[None, :]
                if D < WIDTH:
                    mask = mask & (2 * at_pair < D)[None, :]
                k_even_BD, k_odd_BD = halves(tl.load(key_pairs + offset, mask=mask, other=0), ASM)
                v_even_BD, v_odd_BD = halves(tl.load(value_pairs + offset, mask=mask, other=0), ASM)
                k_scale_B = tl.load(key_scale + place_B, mask=there, other=0.0) * scale
                v_scale_B = tl.load(value_scale + place_B, mask=there, other=0.0)
                logit_HB = tl.dot(q_odd, tl.trans(k_odd_BD), tl.dot(q_even, tl.trans(k_even_BD)))
                logit_HB = logit_HB * k_scale_B[None, :]
            else:
                offset = place_B[:, None] * D + at[None, :]
                if D < WIDTH:
                    mask = mask & wide[None, :]
                k_BD = tl.load(keys + offset, mask=mask, other=0.0)
                v_BD = tl.load(values + offset, mask=mask, other=0.0)
                logit_HB = tl.dot(q_HD, tl.trans(k_BD), input_precision=PRECISION) * scale
            logit_HB = tl.where(seen_HB, logit_HB, float("-inf"))
            new_H = tl.maximum(top_H, tl.max(logit_HB, 1))
            base_H = tl.where(new_H == float("-inf"), 0.0, new_H)  # rows of other prompts
            weight_HB = tl.exp2(logit_HB - base_H[:, None])
            keep_H = tl.exp2(top_H - base_H)
            mass_H = mass_H * keep_H + tl.sum(weight_HB, 1)
            if PAIRS:
                weight_HB = (weight_HB * v_scale_B[None, :]).to(tl.float16)
                sum_even = tl.dot(weight_HB, v_even_BD, sum_even * keep_H[:, None])
                sum_odd = tl.dot(weight_HB, v_odd_BD, sum_odd * keep_H[:, None])
            else:
                sum_HD = tl.dot(weight_HB.to(v_BD.dtype), v_BD, sum_HD * keep_H[:, None], input_precision=PRECISION)
            top_H, page = new_H, next_page
        prompt = tl.min(tl.where(sees_H & (prompt_H > prompt), prompt_H, NONE), 0)

    if PAIRS:
        sum_HD = tl.reshape(tl.join(sum_even, sum_odd), [HEADS, WIDTH])
    place_H = (a_H * H + head_H) * parts + first_part + split
    tl.store(part + place_H[:, None] * D + at[None, :], sum_HD, mask=taken)
    tl.store(top + place_H, top_H, mask=live_H)
    tl.store(mass + place_H, mass_H, mask=live_H)


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
