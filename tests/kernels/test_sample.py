"""The sampling kernels against rpg.rollout.sample, under Triton's interpreter."""

import pytest
import torch

from kernels import sample_checks
from kernels.interpreted import interpreted
from rpg.kernels.sample import fused_sample
from rpg.rollout import sample

CHECKS = [name for name in vars(sample_checks) if name.startswith("check_")]


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name):
    assert interpreted("sample_checks", name) == ""


def test_on_a_cpu_it_is_sample():
    logits, u = sample_checks.draw(40, 50)
    for how in (*sample_checks.HOW, *sample_checks.MIN_P, (0.0, 1.0, 0)):
        got, want = fused_sample(logits, u, *how), sample(logits, u, *how)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
