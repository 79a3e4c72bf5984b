"""Fused layers: on a CPU nothing happens; the kernels are tried under Triton's interpreter."""

import importlib.util

import pytest
import torch

import tiny
from kernels import fused_checks, fused_odd_checks
from kernels.interpreted import interpreted
from rpg.kernels import fused
from rpg.kernels.fused import fuse

CHECKS = [(m.__name__, name) for m in (fused_checks, fused_odd_checks) for name in vars(m) if name.startswith("check_")]


@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_kernels(module, name):
    assert interpreted(module.removeprefix("kernels."), name) == ""


def test_cpu():
    model = tiny.make("llama")
    ids = torch.arange(2, 9)[None]
    wanted = model(ids).logits
    assert fuse(model) == []
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, wanted)


def test_no_triton(monkeypatch):
    model, find = tiny.make("llama"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name == "triton" else find(name, *at))
    monkeypatch.setattr(fused, "_takes", lambda device: True)
    assert fuse(model) == []
