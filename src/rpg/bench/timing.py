"""Seconds, peak memory and the machine's two rates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..costs.operations import Ceilings
from .rows import Row, error_line
from .sizes import Sizes
from .step import finish, peak_memory_gb

INSIDE = 5  # runs of what takes a millisecond, between two looks at the watch


def fresh(device: str) -> None:
    """Whatever ran before leaves no memory behind, and the peak counts from here."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def timed(function: Callable[[], Any], device: str, repeats: int, warmup: int = 1) -> float:
    """Median seconds, the device's work included."""
    for _ in range(warmup):
        function()
    found = []
    for _ in range(repeats):
        finish(device)
        begin = perf_counter()
        function()
        finish(device)
        found.append(perf_counter() - begin)
    return median(found)


def peak_gib(device: str) -> float:
    return peak_memory_gb(device)


def guarded(name: str, device: str, measure: Callable[[], Row]) -> Row:
    """The row, or the line that the attempt ended with: one side that fails does not end the others."""
    fresh(device)
    try:
        return measure()
    except Exception as error:
        return Row(name, error=error_line(error))
    finally:
        fresh(device)


def measure_ceilings(sizes: Sizes) -> Ceilings:
    """Of a square product of random matrices, and of a copy: each the median of several."""
    dtype, device, repeats = getattr(torch, sizes.dtype), sizes.device, 5 if sizes.quick else 10
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=dtype) for _ in range(2))
    seconds = timed(lambda: [a @ b for _ in range(INSIDE)], device, repeats) / INSIDE
    source = torch.zeros(sizes.copy // 4, device=device)
    target = torch.empty_like(source)
    copying = timed(lambda: [target.copy_(source) for _ in range(INSIDE)], device, repeats) / INSIDE
    return Ceilings(2 * sizes.matmul**3 / seconds, 2 * sizes.copy / copying)
