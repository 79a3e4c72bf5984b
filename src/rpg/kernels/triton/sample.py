# mypy: ignore-errors
"""The kernels of sample.py. e is exp((x − best)/τ), best the largest logit of the row; factor is log2(e)/τ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pieces(logits, top, mass, stride, V, N, factor, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Of each PIECE words: the largest logit, and the sum of exp((x − it)/τ). The only pass over all logits."""
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    word = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits + row * stride + word, mask=word < V, other=float("-inf")).to(tl.float32)
    highest = tl.max(x, 1)
    e = tl.exp2((x - tl.where(highest == float("-inf"), 0.0, highest)[:, None]) * factor)
    tl.store(top + row * N + piece, highest, mask=piece < N)
    tl.store(mass + row * N + piece, tl.sum(e, 1), mask=piece < N)


@triton.jit
def pick(e, before, target, at, SIZE: tl.constexpr):
    """The first place at which the running sum of e passes the target; else the last with e > 0; −1 without one."""
    passed = (before + tl.cumsum(e, 0) > target) & (e > 0)
    first = tl.min(tl.where(passed, at, SIZE), 0)
    return tl.where(first < SIZE, first, tl.max(tl.where(e > 0, at, -1), 0))


@triton.jit
def draw_whole(
    logits, uniform, top, mass, token, logp, stride, uniform_stride, V, N, factor, inverse,
    PIECE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    top_N = tl.load(top + row * N + n, mask=n < N, other=float("-inf"))
    mass_N = tl.load(mass + row * N + n, mask=n < N, other=0.0)
    best = tl.max(top_N, 0)
    mass_N = mass_N.to(tl.float64) * tl.exp2((top_N - best) * factor).to(tl.float64)
    total = tl.sum(mass_N, 0)
    target = tl.load(uniform + row * uniform_stride).to(tl.float64) * total
    chosen = tl.maximum(pick(mass_N, 0.0, target, n, SIZE), 0)
    before = tl.sum(tl.where(n < chosen, mass_N, 0.0), 0)

    at = tl.arange(0, PIECE)
    word = chosen * PIECE + at
    x = tl.load(logits + row * stride + word, mask=word < V, other=float("-inf")).to(tl.float32)
    place = tl.maximum(pick(tl.exp2((x - best) * factor).to(tl.float64), before, target, at, PIECE), 0)
    x = tl.sum(tl.where(at == place, x, 0.0), 0)
    tl.store(token + row, tl.minimum(chosen * PIECE + place, V - 1).to(tl.int64))
    tl.store(logp + row, ((x - best).to(tl.float64) * inverse - tl.log(total)).to(tl.float32))


@triton.jit
def bound(
    top, mass, ids, found, floor, best_A, total_A, N, factor, top_k, top_p, margin,
    K: tl.constexpr, M: tl.constexpr, PIECE: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A logit that the last token kept is not below, and the pieces with such logits.

    k pieces whose largest is above it hold k tokens above it; and a piece holds above it no less than its sum without
    PIECE − 1 tokens that lie just below. ``margin`` is log2(min_p).
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    top_N = tl.load(top + row * N + n, mask=n < N, other=float("-inf"))
    mass_N = tl.load(mass + row * N + n, mask=n < N, other=0.0)
    best = tl.max(top_N, 0)
    peak_N = tl.exp2((top_N - best) * factor)
    mass_N = mass_N * peak_N
    total = tl.sum(mass_N, 0)
    low, high = best * 0.0, best * 0.0 + 64.0  # how far below the largest, in powers of two
    enough = best != best
    for step in range(STEPS + 1):
        depth = tl.where(step == 0, high, (low + high) / 2)
        above_N = top_N >= best - depth / factor
        if K:  # with both, top-p's share is of what these leave
            reached = tl.sum(above_N.to(tl.int32), 0) >= top_k
        else:
            least_N = tl.maximum(peak_N, mass_N - (PIECE - 1) * 1.0001 * tl.exp2(-depth))
            reached = tl.sum(tl.where(above_N, least_N, 0.0), 0) >= top_p * total * 1.00001
        enough = tl.where(step == 0, reached, enough)
        low = tl.where((step > 0) & ~reached, depth, low)
        high = tl.where((step > 0) & reached, depth, high)
    least = tl.where(enough, best - high / factor, float("-inf"))
    if M:
        least = tl.maximum(least, best + margin / factor)
    above_N = (top_N >= least) & (n < N)
    tl.store(ids + row * N + tl.cumsum(above_N.to(tl.int32), 0) - 1, n, mask=above_N)
    tl.store(found + row, tl.sum(above_N.to(tl.int32), 0))
    tl.store(floor + row, least)
    tl.store(best_A + row, best)
    tl.store(total_A + row, total)


@triton.jit
def collect(
    logits, ids, found, floor, values, words, count, stride, V, N,
    ROOM: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The tokens of those pieces that are not below the bound, in the vocabulary's order, as far as there is room."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(found + row)
    least = tl.load(floor + row)
    i, kept = number * 0, number * 0
    while (i < number) & (kept <= ROOM):
        n = i + tl.arange(0, PIECES)
        piece = tl.load(ids + row * N + n, mask=n < number, other=0)
        word = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        there = (n < number)[:, None] & (word < V)
        x = tl.load(logits + row * stride + word, mask=there, other=float("-inf"))
        keep = tl.reshape((there & (x.to(tl.float32) >= least)).to(tl.int32), [PIECES * PIECE])
        at = kept + tl.cumsum(keep, 0) - 1
        keep_there = (keep > 0) & (at < ROOM)
        tl.store(values + row * ROOM + at, tl.reshape(x, [PIECES * PIECE]), mask=keep_there)
        tl.store(words + row * ROOM + at, tl.reshape(word, [PIECES * PIECE]), mask=keep_there)
        kept += tl.sum(keep, 0)
        i += PIECES
    tl.store(count + row, kept)


@triton.jit
def ordered(x):
    """float32 as int32 of the same order."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # −0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def reach(source, number, least, best, factor, MASS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """How many tokens (MASS: how much of Σe) are not below each of ``least``, ordered integers [WAYS]."""
    sum_WB = tl.zeros([WAYS, BLOCK], tl.float32)
    for start in range(0, number, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < number, other=float("-inf")).to(tl.float32)
        one = (at < number).to(tl.float32)
        if MASS:
            one = one * tl.exp2((x - best) * factor)
        sum_WB += tl.where(ordered(x)[None, :] >= least[:, None], one[None, :], 0.0)
    return tl.sum(sum_WB, 1)


@triton.jit
def largest(
    source, number, low, high, need, best, factor, MASS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """The largest ordered integer from low to high that ``need`` is not below; low where there is none."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        step = (high - low) // (WAYS + 1) + 1
        least = tl.minimum(low + (tl.arange(0, WAYS) + 1) * step, high + 1)
        sum_W = reach(source, number, least.to(tl.int32), best, factor, MASS, BLOCK, WAYS)
        ways = tl.sum(((sum_W >= need) & (least <= high)).to(tl.int64), 0)
        low += ways * step
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def block_of(source, start, number, least, best, factor, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < number, other=float("-inf")).to(tl.float32)
    kept = (at < number) & (ordered(x) >= least)
    return tl.where(kept, tl.exp2((x - best) * factor), 0.0).to(tl.float64), x


@triton.jit
def kept_of(source, start, number, least, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < number, other=float("-inf")).to(tl.float32)
    return ((at < number) & (ordered(x) >= least) & (x > float("-inf"))).to(tl.int32), at


@triton.jit
def write_kept(
    source, words, row, number, least, fits, pool, cursor, starts, sizes, state, slot_stride, state_stride, pool_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The set that a live row draws from, into the next free places of the pool."""
    length = tl.load(state + 3 * state_stride + row)
    if length > -2:
        size = number * 0
        for start in range(0, number, BLOCK):
            kept, _ = kept_of(source, start, number, least, BLOCK)
            size += tl.sum(kept, 0)
        begin = tl.atomic_add(cursor, size.to(tl.int64))
        place = tl.load(state + 2 * state_stride + row).to(tl.int64) * slot_stride + length + 1
        tl.store(starts + place, tl.load(cursor + 1) + begin)
        tl.store(sizes + place, size)
        if begin + size <= pool_size:
            for start in range(0, number, BLOCK):
                kept, at = kept_of(source, start, number, least, BLOCK)
                word = tl.where(fits, tl.load(words + at, mask=(kept > 0) & fits, other=0), at)
                tl.store(pool + begin + tl.cumsum(kept, 0) - 1, word, mask=kept > 0)
                begin += tl.sum(kept, 0)


@triton.jit
def draw_truncated(
    logits, uniform, values, words, count, floor, best_A, total_A, token, logp,
    stride, uniform_stride, V, factor, inverse, top_k, top_p, margin,
    pool, cursor, starts, sizes, state, slot_stride, state_stride, pool_size,
    K: tl.constexpr, P: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(count + row)
    fits = number <= ROOM
    number = tl.where(fits, number, V)
    source = tl.where(fits, values + row * ROOM, logits + row * stride)
    best = tl.load(best_A + row)
    whole = tl.load(total_A + row)
    low, high = ordered(tl.load(floor + row)), ordered(best)
    if K:
        low = largest(source, number, low, high, top_k * 1.0, best, factor, False, BLOCK, WAYS)
    if M:
        low = tl.maximum(low, ordered(best + margin / factor))
    if P:
        need = whole * top_p
        if K or M:
            ends = tl.zeros([WAYS], tl.int32) + low
            need = tl.max(reach(source, number, ends, best, factor, True, BLOCK, WAYS), 0) * top_p
        low = largest(source, number, low, high, need, best, factor, True, BLOCK, WAYS)

    if KEEP:
        write_kept(
            source, words + row * ROOM, row, number, low, fits, pool, cursor, starts, sizes, state, slot_stride,
            state_stride, pool_size, BLOCK,
        )  # fmt: skip
    total = whole.to(tl.float64) * 0.0  # NaN where a logit is, and so is logp then
    for start in range(0, number, BLOCK):
        e, _ = block_of(source, start, number, low, best, factor, BLOCK)
        total += tl.sum(e, 0)
    target = tl.load(uniform + row * uniform_stride).to(tl.float64) * total
    target = tl.minimum(
        target, total - total * 2.220446049250313e-16
    )  # below the sum of the same numbers in this order
    start, before = number * 0, total * 0.0
    e, _ = block_of(source, start, number, low, best, factor, BLOCK)
    inside = tl.sum(e, 0)
    while (before + inside <= target) & (start + BLOCK < number):
        before += inside
        start += BLOCK
        e, _ = block_of(source, start, number, low, best, factor, BLOCK)
        inside = tl.sum(e, 0)
    e, x = block_of(source, start, number, low, best, factor, BLOCK)
    at = tl.arange(0, BLOCK)
    place = tl.maximum(pick(e, before, target, at, BLOCK), 0)
    x = tl.sum(tl.where(at == place, x, 0.0), 0)
    place = tl.minimum(start + place, V - 1)
    place = tl.where(fits, tl.load(words + row * ROOM + place, mask=fits & (place < number), other=0), place)
    tl.store(token + row, place.to(tl.int64))
    found = (x - best).to(tl.float64) * inverse - tl.log(total)
    tl.store(logp + row, found.to(tl.float32))
