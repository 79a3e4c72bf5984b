"""The kernels of 4-bit weights against their counterparts in torch; run by Triton's interpreter."""

import torch

from rpg.kernels import nf4
from rpg.kernels.merged import merging


def weights(rows, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return nf4.quantise(torch.randn(rows, width, generator=g) * width**-0.5)


def torch_only(function, *args):
    before, nf4.has_triton = nf4.has_triton, lambda x: False
    try:
        return function(*args)
    finally:
        nf4.has_triton = before


def check_dequantise():
    for rows, width in ((3, 64), (37, 320)):  # blocks that do not fill a program, and more than one program
        for dtype in (torch.float32, torch.bfloat16):
            args = *weights(rows, width), dtype
            found, expected = nf4.dequantise(*args), torch_only(nf4.dequantise, *args)
            last = 0.0 if dtype == torch.float32 else 2**-7  # where the interpreter cuts, a GPU rounds
            assert torch.allclose(found, expected, rtol=last, atol=0), (rows, width, dtype)


def check_product():
    table = torch.tensor(nf4.TABLE)
    for rows, width, columns in ((1, 64, 5), (5, 2112, 48), (20, 448, 33)):  # 2112: a sum in two parts, one short
        packed, scale = weights(columns, width)
        g = torch.Generator().manual_seed(1)
        x, bias = torch.randn(rows, width, generator=g), torch.randn(columns, generator=g)
        dense = torch_only(nf4.dequantise, packed, scale, torch.float32)
        for some in (None, bias):
            expected = torch.nn.functional.linear(x, dense, some)
            found = nf4._kernels().product(x, packed, scale, table, some)
            assert torch.allclose(found, expected, atol=1e-5), (rows, width, columns)


def check_a_decoding_step_takes_it():
    packed, scale = weights(48, 128)
    g, taken = torch.Generator().manual_seed(2), []
    x = torch.randn(2, 1, 128, generator=g).half()  # the interpreter multiplies no bfloat16
    kernel = nf4._kernels().product
    nf4._kernels().product = lambda *args: taken.append(1) or kernel(*args)
    outside = nf4.linear(x, packed, scale, None)
    assert not taken
    with merging():
        inside = nf4.linear(x, packed, scale, None)
        many = nf4.linear(x.expand(-1, 33, -1), packed, scale, None)
    assert len(taken) == 1
    assert inside.shape == outside.shape
    assert many.shape == (2, 33, 48)
    assert torch.allclose(inside.float(), outside.float(), atol=2e-2)
