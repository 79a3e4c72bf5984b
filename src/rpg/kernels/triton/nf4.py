# mypy: ignore-errors
"""The kernel of nf4.py. A byte holds weights j (low) and j + 32 (high) of a block of 64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 64  # of weights, a program that makes them dense


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


def dequantise(packed: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], device=packed.device, dtype=dtype)
    count = scale.numel()
    dequantise_kernel[(triton.cdiv(count, BLOCKS),)](packed, scale, table, out, count, BLOCKS=BLOCKS)
    return out
