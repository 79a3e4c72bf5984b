"""The product with a norm before and an activation behind, as a kernel and in torch."""

import pytest
import torch

from kernels import linear_checks
from kernels.interpreted import interpreted
from kernels.linear_checks import case, near, wanted
from rpg.kernels.linear import norm_linear

CHECKS = [name for name in vars(linear_checks) if name.startswith("check_")]


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name):
    assert interpreted("linear_checks", name) == ""


@pytest.mark.parametrize("kind", [None, 0, 1])
@pytest.mark.parametrize("offset", [False, True])
def test_in_torch(kind, offset):
    x, norm, weight, bias = (part.double() for part in case(5, 24, 12))
    found = norm_linear(x, norm, (1e-3, offset, True), weight, bias, kind)
    near(found, wanted(x, norm + offset, weight, bias, 1e-3, kind), 1e-6)


def test_rounded_as_the_model_rounds():
    x, norm, weight, bias = case(5, 24, 12)
    unit = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    want = torch.nn.functional.linear(norm * unit, weight, bias)
    assert torch.equal(norm_linear(x, norm, (1e-6, False, True), weight, bias), want)
