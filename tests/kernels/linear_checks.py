"""Checks of the product with a norm before and an activation behind, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from kernels import decode_checks  # noqa: F401  repairs the interpreter
from rpg.kernels.linear import ACTIVATIONS, launch, norm_linear

TILE = (16, 16, 32, 4, 2)


def repair_product() -> None:
    """The interpreter multiplies bfloat16 as the integers in which it keeps them."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = InterpreterBuilder.create_fmul

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return own(self, a, b)
        one, other = (torch.from_numpy(x.data.view("int16").copy()).view(torch.bfloat16) for x in (a, b))
        return TensorHandle((one * other).view(torch.int16).numpy().view("uint16"), tl.bfloat16)

    InterpreterBuilder.create_fmul = create_fmul


if os.environ.get("TRITON_INTERPRET") == "1":
    repair_product()


def case(rows: int, width: int, out: int, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    """x, as a part of a wider tensor, the norm's weight, the product's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, width + 16), (width,), (out, width), (out,)
    x, norm, weight, bias = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return [x[:, :width] * 3, norm, (weight.float() * width**-0.5).bfloat16(), bias]


def wanted(x, norm, weight, bias, eps, kind):
    """In float64, with nothing rounded."""
    x, norm, weight = x.double(), norm.double(), weight.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm @ weight.t()
    y = y if bias is None else y + bias.double()
    if kind is None:
        return y
    gate, up = y.chunk(2, -1)
    return ACTIVATIONS[kind](gate) * up


def near(found, want, tolerance=2e-2):
    off = (found.double() - want).norm() / want.norm()
    assert off < tolerance, float(off)  # NaN fails


def check_norm_linear():
    for rows, width, out in ((5, 64, 40), (16, 32, 16), (33, 96, 50)):
        for biased in (False, True):
            for kind in (None, 0, 1):
                x, norm, weight, bias = case(rows, width, out)
                given = x, norm, weight, bias if biased else None
                found = launch(given[0], norm, 1e-2, weight, given[3], kind, TILE)
                near(found, wanted(*given, 1e-2, kind))


def check_rows_of_very_different_sizes():
    """The root is each row's own, and a row of zeros is divided by that of eps."""
    x, norm, weight, bias = case(6, 64, 32)
    x = x * torch.tensor([0.0, 1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None].bfloat16()
    for row in range(6):
        found = launch(x, norm, 1e-6, weight, bias, None, TILE)[row]
        near(found, wanted(x, norm, weight, bias, 1e-6, None)[row])


def check_it_is_taken_where_there_are_sizes_for_it():
    from rpg.kernels import linear

    x, norm, weight, bias = case(5, 64, 40)
    for kind in (None, 0):
        plain = norm_linear(x, norm, (1e-6, False, True), weight, bias, kind)
        linear.TILES |= {(kind is not None, width): TILE for width in (64, 48)}
        fused = norm_linear(x, norm, (1e-6, False, True), weight, bias, kind)
        assert not torch.equal(plain, fused)  # one rounding less
        near(fused, plain.double(), 2e-2)
        for given in (
            (x.float(), norm.float(), weight.float(), bias.float()),
            (x[:, :48], norm[:48], weight[:, :48], bias),
        ):
            near(norm_linear(*given[:2], (1e-6, False, True), *given[2:], kind), wanted(*given, 1e-6, kind), 2e-2)
        offset = norm_linear(x, norm, (1e-6, True, False), weight, bias, kind)
        near(offset, wanted(x, norm.double() + 1, weight, bias, 1e-6, kind), 2e-2)
        linear.TILES.clear()
