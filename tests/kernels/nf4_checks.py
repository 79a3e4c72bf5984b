"""The kernel of 4-bit weights against its counterpart in torch; run by Triton's interpreter."""

import torch

from rpg.kernels import nf4


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
