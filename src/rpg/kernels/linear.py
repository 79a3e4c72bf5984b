"""Products in a decoding step whose input is normed before, and the gated activation behind one, without gradients.

On a GPU this is one kernel where `TILES` has sizes for it: the norm's root divides the sums, so that a norm's output is
not rounded and not written. Elsewhere it is a norm, a product and an activation, each as the model computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused
from .decode import norm_in_torch
from .triton import early, early_launch, has_triton

NormForm = tuple[float, bool, bool]  # eps, offset, rounds: of norm_in_torch
SILU, GELU_TANH = 0, 1
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh")}
MOST_ROWS = 512  # more, and arithmetic decides: the library's own product is better at that

# rows, columns and depth of a program, warps, stages: with an activation or not, and by the input's width. One that is
# not here was not measured, or is not faster so
TILES: dict[tuple[bool, int], tuple[int, int, int, int, int]] = {}


def normed(x_AH: Tensor, weight_H: Tensor, form: NormForm) -> Tensor:
    if fused._runs(x_AH) and x_AH.dtype == weight_H.dtype:
        return fused._kernels().norm(x_AH, weight_H, *form)  # type: ignore[no-any-return]
    return norm_in_torch(x_AH, weight_H, *form)


def norm_linear(
    x_AH: Tensor, norm_H: Tensor, form: NormForm, weight_NH: Tensor, bias_N: Tensor | None, kind: int | None = None
) -> Tensor:
    """linear(norm(x)); with a ``kind`` the weight is of gate and up, and this is act(gate) · up."""
    tile = TILES.get((kind is not None, x_AH.shape[1]))
    if tile is not None and fits(x_AH, norm_H, form, weight_NH, tile):
        return launch(x_AH, norm_H, form[0], weight_NH, bias_N, kind, tile)
    found = F.linear(normed(x_AH, norm_H, form), weight_NH, bias_N)
    if kind is None:
        return found
    gate, up = found.chunk(2, -1)
    if fused._runs(found):
        return fused._kernels().act_mul(gate, up, kind)  # type: ignore[no-any-return]
    return ACTIVATIONS[kind](gate) * up


def fits(x_AH: Tensor, norm_H: Tensor, form: NormForm, weight_NH: Tensor, tile: tuple[int, int, int, int, int]) -> bool:
    """bfloat16 alone: in float16 what is not yet divided by the root might be too large."""
    alike = x_AH.dtype == norm_H.dtype == weight_NH.dtype == torch.bfloat16
    return alike and has_triton(x_AH) and not form[1] and len(x_AH) <= MOST_ROWS and x_AH.shape[1] % tile[2] == 0


def launch(
    x_AH: Tensor,
    norm_H: Tensor,
    eps: float,
    weight_NH: Tensor,
    bias_N: Tensor | None,
    kind: int | None,
    tile: tuple[int, int, int, int, int],
) -> Tensor:
    """norm_linear by the kernel."""
    from .triton.linear import norm_linear

    rows, cols, depth, warps, stages = tile
    (A, H), N = x_AH.shape, len(weight_NH) // (1 if kind is None else 2)
    if x_AH.stride(1) != 1:
        x_AH = x_AH.contiguous()
    found_AN = x_AH.new_empty(A, N)
    norm_linear[(-(-A // rows), -(-N // cols))](
        x_AH, norm_H, weight_NH, weight_NH if bias_N is None else bias_N, found_AN, A, N, eps, x_AH.stride(0),
        H, bias_N is not None, -1 if kind is None else kind, rows, cols, depth, early(x_AH),
        num_warps=warps, num_stages=stages, **early_launch(x_AH),
    )  # fmt: skip
    return found_AN
