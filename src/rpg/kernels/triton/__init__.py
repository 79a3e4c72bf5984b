"""The kernels on a GPU. Each has a twin in torch, one folder up, that it must agree with."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor


def has_triton(x: Tensor) -> bool:
    """Kernels run on x: it is on a GPU and Triton is there, or Triton interprets (TRITON_INTERPRET=1)."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    return importlib.util.find_spec("triton") is not None


def nvidia(x: Tensor) -> bool:
    """Instructions of NVIDIA's chips can be used: neither the interpreter's nor another maker's."""
    return x.is_cuda and torch.version.hip is None


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
