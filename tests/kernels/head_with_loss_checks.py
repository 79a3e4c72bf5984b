"""What test_head_with_loss.py compares, and the checks of the Triton kernels, run under Triton's interpreter."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

import rpg.kernels.head_with_loss  # noqa: F401
from kernels.logp_checks import Inputs, exact, inputs
from rpg.kernels import logp_torch

module = sys.modules["rpg.kernels.head_with_loss"]


class Found(NamedTuple):
    logp: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def blocks(tokens: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, tokens)) for first in range(0, tokens, most)]


def run(data: Inputs, temperature: float, most: int, columns: int, only: int | None = None, into=None) -> Found:
    """The gradients that come in are those of ``exact``, which are known beforehand here."""
    cut = blocks(len(data.hidden), most)

    def gradient_of(i: int, logp_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, Tensor | None]:
        up = data.up[:, cut[i]].to(logp_N.dtype)
        assert logp_N.shape == entropy_N.shape == up[0].shape
        if only == 0:
            return up[0], None
        return up[0] * (only is None), up[1]

    wide = torch.promote_types(data.weight.dtype, torch.float32)
    total = torch.zeros_like(data.weight, dtype=into or wide)
    done = module.head_with_loss(
        data.hidden, data.weight, data.target, cut, gradient_of, total, temperature, columns=columns
    )
    return Found(*done, total)


def compare(data: Inputs, temperature: float, most: int, columns: int, only: int | None = None, near: float = 2e-5):
    found, expected = run(data, temperature, most, columns, only), exact(data, temperature, False, only)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near * max(1.0, float(b.detach().abs().max())))


def triton(width: int) -> None:
    """From here on head_with_loss runs the kernels, with so many columns to a maximum."""
    from rpg.kernels.triton import logp as logp_triton

    logp_torch.WIDTH = module.WIDTH = width
    module.logp.fastest = lambda _: logp_triton


def check_values_and_gradients() -> None:
    for width, columns, most in ((64, 64, 37), (16, 16, 10), (16, 32, 37), (8, 48, 1)):
        triton(width)
        for only in (None, 0, 1):
            compare(inputs(), 0.7, most, columns, only)


def check_half_types() -> None:
    """The kernels see what logp_torch sees, so they give what it gives."""
    for dtype in (torch.bfloat16, torch.float16):
        data = inputs(dtype)
        triton(16)
        found = run(data, 0.9, 20, 32)
        module.logp.fastest = lambda _: logp_torch
        for a, b in zip(found, run(data, 0.9, 20, 32), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2e-2)


def check_extreme_logits() -> None:
    triton(16)
    extreme()


def extreme() -> None:
    """Logits far apart, the largest of them in the first columns and in the last; powers that are zero."""
    weight = torch.linspace(-1e4, 1e4, 50)[:, None]
    hidden, target = torch.tensor([[1.0], [-1.0], [0.0], [1e-3]]), torch.tensor([49, 0, 7, 3])
    data = Inputs(hidden, weight, target, hidden, weight, torch.ones(3, 4))
    for most in (1, 4):
        found = run(data, 1.0, most, 16)
        assert all(x.isfinite().all() for x in found)
        for a, b in zip(found, exact(data, 1.0, False), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=4e-3)
