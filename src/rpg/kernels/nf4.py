"""Weights in 4 bits (NF4), and the product with them. The numbers of the table are those of QLoRA (arXiv 2305.14314,
appendix E): the quantiles of a normal distribution, with an exact zero.

A row is cut into blocks of 64 weights. Of a block its largest magnitude is kept in bfloat16, and of each weight the
nearest of 16 multiples of that: 4.25 bits a weight. A byte holds two weights of a block, the one at j and the one at
j + 32. A layer's matrix is made dense where it is multiplied and thrown away again, forward and backward; a decoding
step of a few rows on a GPU multiplies without that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .merged import within_merging
from .triton import has_triton

BLOCK = 64
BYTES = 0.5 + 2 / BLOCK  # a weight
FEW_ROWS = 64  # up to here a decoding step reads the packed weights and makes nothing dense
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def fits(weight_OI: Tensor) -> bool:
    """Whether its rows are whole blocks."""
    return weight_OI.dim() == 2 and weight_OI.shape[1] % BLOCK == 0


@torch.no_grad()
def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Packed weights [O, I/2] and the scales of their blocks [O, I/64]: the same numbers on every device."""
    rows, width = weight_OI.shape
    shapes = (rows, width // 2), (rows, width // BLOCK)
    if weight_OI.is_meta:
        return weight_OI.new_empty(shapes[0], dtype=torch.uint8), weight_OI.new_empty(shapes[1], dtype=torch.bfloat16)
    blocks = weight_OI.reshape(-1, BLOCK).float()
    scale = blocks.abs().amax(1, keepdim=True).bfloat16()
    ratio = blocks / torch.where(scale == 0, 1, scale).float()
    table = _table(weight_OI.device)
    code = torch.bucketize(ratio, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    packed = code[:, : BLOCK // 2] | code[:, BLOCK // 2 :] << 4
    return packed.view(shapes[0]), scale.view(shapes[1])


@torch.no_grad()
def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense matrix [O, I]."""
    rows, width = packed.shape[0], 2 * packed.shape[1]
    if packed.is_meta:
        return packed.new_empty((rows, width), dtype=dtype)
    if has_triton(packed):
        return _kernels().dequantise(packed, scale, _table(packed.device), dtype)  # type: ignore[no-any-return]
    half = packed.view(-1, BLOCK // 2)
    code = torch.cat([half & 15, half >> 4], 1).int()
    dense = _table(packed.device)[code] * scale.view(-1, 1).float()
    return dense.to(dtype).view(rows, width)


def linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias. Gradients go to x and to the bias; the weights have none."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(x, packed, scale, bias)  # type: ignore[no-any-return,no-untyped-call]
    if _few(x):
        out = _kernels().product(x.reshape(-1, x.shape[-1]), packed, scale, _table(x.device), bias)
        return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
    return F.linear(x, dequantise(packed, scale, x.dtype), bias)


def _few(x: Tensor) -> bool:
    """In a decoding step only: elsewhere log-probabilities with and without gradients are the same bits."""
    return within_merging() and x.element_size() == 2 and x.numel() <= FEW_ROWS * x.shape[-1] and has_triton(x)


class _Product(torch.autograd.Function):
    """The dense matrix is not kept for the backward pass, which makes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, scale)
        return F.linear(x, dequantise(packed, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dy, (packed, scale) = grads[0], ctx.saved_tensors
        dx = dy @ dequantise(packed, scale, dy.dtype) if ctx.needs_input_grad[0] else None
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return dx, None, None, dbias


@functools.cache
def _table(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(TABLE, device=device)


@functools.cache
def _kernels() -> Any:
    from .triton import nf4

    return nf4
