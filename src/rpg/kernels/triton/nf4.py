# mypy: ignore-errors
"""The kernels of nf4.py. A byte holds weights j (low) and j + 32 (high) of a block of 64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import next_power_of_2

BLOCKS = 64  # of weights, a program that makes them dense
COLUMNS, STEP = 16, 128  # of a program of the product: columns of the result, and bytes of each row at a time
STAGES, WARPS = 3, 4
PROGRAMS = 512  # rows of few columns are cut into parts until there are so many
LEAST = 4  # steps of a part


@triton.jit
def dequantise_kernel(packed, scale, table, out, count, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    real = block[:, None] < count
    j = tl.arange(0, 32)
    byte = tl.load(packed + block[:, None] * 32 + j, mask=real, other=0).to(tl.int32)
    largest = tl.load(scale + block, mask=block < count, other=0.0).to(tl.float32)[:, None]
    place = out + block[:, None] * 64 + j
    tl.store(place, (tl.load(table + (byte & 15)) * largest).to(out.dtype.element_ty), mask=real)
    tl.store(place + 32, (tl.load(table + (byte >> 4)) * largest).to(out.dtype.element_ty), mask=real)


@triton.jit
def product_kernel(
    x, packed, scale, table, out, rows, columns, width, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``width``: bytes of a row. Part p of the sum takes its ``steps`` of STEP bytes; out is [parts, rows, columns]."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, lane = tl.program_id(1), tl.arange(0, STEP)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        at = step * STEP + lane
        block, real = at // 32, at < width
        of_row = (row[:, None] < rows) & real[None, :]
        of_column = (column[:, None] < columns) & real[None, :]
        first = x + row[:, None] * (2 * width) + (block * 64 + at % 32)[None, :]
        low_x, high_x = tl.load(first, mask=of_row, other=0.0), tl.load(first + 32, mask=of_row, other=0.0)
        start = column[:, None].to(tl.int64)
        byte = tl.load(packed + start * width + at[None, :], mask=of_column, other=0).to(tl.int32)
        largest = tl.load(scale + start * (width // 32) + block[None, :], mask=of_column, other=0.0).to(tl.float32)
        low = (tl.load(table + (byte & 15)) * largest).to(low_x.dtype)
        high = (tl.load(table + (byte >> 4)) * largest).to(low_x.dtype)
        sums = tl.dot(low_x, tl.trans(low), sums)
        sums = tl.dot(high_x, tl.trans(high), sums)
    place = out + (part * rows + row[:, None]) * columns + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns))


def dequantise(packed: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], device=packed.device, dtype=dtype)
    count = scale.numel()
    dequantise_kernel[(triton.cdiv(count, BLOCKS),)](packed, scale, table, out, count, BLOCKS=BLOCKS)
    return out


def product(x: Tensor, packed: Tensor, scale: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, I] · Wᵀ, the weights read once and never written; the parts of a sum are added in a fixed order."""
    rows, (columns, width) = x.shape[0], packed.shape
    tiles, total = triton.cdiv(columns, COLUMNS), triton.cdiv(width, STEP)
    parts = max(1, min(PROGRAMS // tiles, total // LEAST))
    steps = triton.cdiv(total, parts)
    parts = triton.cdiv(total, steps)
    plain = parts == 1 and bias is None
    out = torch.empty(parts, rows, columns, device=x.device, dtype=x.dtype if plain else torch.float32)
    product_kernel[(tiles, parts)](
        x.contiguous(), packed, scale, table, out, rows, columns, width, steps,
        ROWS=max(16, next_power_of_2(rows)), COLUMNS=COLUMNS, STEP=STEP, num_stages=STAGES, num_warps=WARPS,
    )  # fmt: skip
    sums = out[0] if parts == 1 else out.sum(0)
    return (sums if bias is None else sums + bias).to(x.dtype)
