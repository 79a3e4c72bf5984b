# mypy: ignore-errors
"""The kernels of step.py, a row a lane. State rows: 0 prompt, 1 its length, 2 slot, 3 length, 4 token."""

import triton
import triton.language as tl


@triton.jit
def begin_kernel(state, state_stride, uniform, uniform_stride, ids, position, drawn, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    length = tl.load(state + 3 * state_stride + row, mask=real, other=-2)
    alive = real & (length >= 0)
    prompt_length = tl.load(state + state_stride + row, mask=alive, other=0)
    slot = tl.load(state + 2 * state_stride + row, mask=alive, other=0).to(tl.int64)
    token = tl.load(state + 4 * state_stride + row, mask=alive, other=0)
    number = tl.load(uniform + slot * uniform_stride + length + 1, mask=alive, other=0.0)
    tl.store(ids + row, token.to(tl.int64), mask=real)
    tl.store(position + row, tl.where(alive, prompt_length + length, 0).to(tl.int64), mask=real)
    tl.store(drawn + row, number, mask=real)


@triton.jit
def end_kernel(
    token, logp, state, state_stride, tokens, logps, table_stride, count, ended, limit, ends, rows,
    END_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    length = tl.load(state + 3 * state_stride + row, mask=real, other=-2)
    alive = real & (length > -2)
    slot = tl.load(state + 2 * state_stride + row, mask=alive, other=0).to(tl.int64)
    drawn = tl.load(token + row, mask=alive, other=0)
    new = length + 1
    tl.store(tokens + slot * table_stride + new, drawn.to(tl.int32), mask=alive)
    tl.store(logps + slot * table_stride + new, tl.load(logp + row, mask=alive, other=0.0), mask=alive)
    is_end = drawn < 0
    for i in tl.static_range(END_COUNT):
        is_end = is_end | (drawn == tl.load(ends + i))
    over = is_end | (new + 1 >= tl.load(limit))
    tl.store(count + slot, new + 1, mask=alive & over)
    tl.store(ended + slot, is_end.to(tl.int32), mask=alive & over)
    tl.store(state + 3 * state_stride + row, tl.where(over, -2, new), mask=alive)
    tl.store(state + 4 * state_stride + row, drawn.to(tl.int32), mask=alive)
