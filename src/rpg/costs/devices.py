"""Memory and rates of devices: of those in a table, and of the one at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..console import choose
from ..kernels.decode import has_8_bits

GPU_OVERHEAD = 42e-6, 8e-3  # seconds a layer of a decoding step (a captured graph), of a training pass (its launches)
CPU_OVERHEAD = 1e-3, 2e-3
REACHED = 779 / 989.4, 4.268 / 4.8  # of the published rates, by the H200 of docs/speed-table.md
LAPTOP = 8 * 2**30  # bytes of memory
PCIE_5, PCIE_4 = 50e9, 25e9  # bytes a second between host and device, of 16 lanes


@dataclass(frozen=True)
class Device:
    name: str
    memory: int  # bytes
    flops: float  # a second, of a large product: bfloat16 on a GPU, float32 on a CPU
    bandwidth: float  # bytes a second, read and written
    decode_layer: float  # seconds: what a layer costs at least
    train_layer: float
    source: str  # of these numbers
    cpu: bool = False
    host_bandwidth: float = PCIE_4  # bytes a second between the host's memory and its own
    eight_bits: bool = True  # whether its kernels can have numbers of 8 bits (e4m3)


def _published(
    name: str,
    gigabytes: float,
    teraflops: float,
    terabytes: float,
    sheet: str,
    host: float = PCIE_4,
    eight_bits: bool = True,
) -> Device:
    """Taken to reach as much of its published rates as the H200 does."""
    flops, bandwidth = teraflops * 1e12 * REACHED[0], terabytes * 1e12 * REACHED[1]
    text = f"{sheet}: {gigabytes:g} GB, {teraflops:g} TFLOP/s dense bf16, {terabytes:g} TB/s, of which an H200 reaches "
    text += f"{REACHED[0]:.0%} and {REACHED[1]:.0%}"
    rates = flops, bandwidth, *GPU_OVERHEAD
    return Device(name, int(gigabytes * 1e9), *rates, text, host_bandwidth=host, eight_bits=eight_bits)


DEVICES: dict[str, Device] = {
    "h200": Device(
        "NVIDIA H200",
        141 * 10**9,
        779e12,
        4.268e12,
        *GPU_OVERHEAD,
        source="NVIDIA's H200 data sheet: 141 GB; rates measured in docs/speed-table.md: 779 TFLOP/s, 4.27 TB/s",
        host_bandwidth=PCIE_5,
    ),
    "h100": _published("NVIDIA H100 SXM", 80, 989.4, 3.35, "NVIDIA's H100 data sheet", PCIE_5),
    "a100": _published("NVIDIA A100 80GB SXM", 80, 312, 2.039, "NVIDIA's A100 data sheet", eight_bits=False),
    "l40s": _published("NVIDIA L40S", 48, 362, 0.864, "NVIDIA's L40S data sheet"),
    "rtx4090": _published("NVIDIA GeForce RTX 4090", 24, 165.2, 1.008, "NVIDIA's Ada architecture white paper"),
}
NAMES = (*DEVICES, "cpu")


def named(name: str) -> Device:
    """One of the table, or this machine's CPU."""
    if name == "cpu":
        return at_hand(torch.device("cpu"))
    if name not in DEVICES:
        raise ValueError(choose("device of --dry-run", name, NAMES))
    return DEVICES[name]


def at_hand(device: torch.device) -> Device:
    """This machine's, its rates measured in a moment."""
    cpu = device.type == "cpu"
    if cpu:
        name, memory = f"CPU ({torch.get_num_threads()} threads)", physical_memory()
    else:
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    size = 512 if cpu else 8192
    x = torch.randn(size, size, device=device, dtype=torch.float32 if cpu else torch.bfloat16)
    flat = torch.zeros(2**22 if cpu else 2**28, device=device)
    other = torch.empty_like(flat)
    product, copy = _seconds(lambda: x @ x, device), _seconds(lambda: other.copy_(flat), device)
    host = torch.empty(2**22 if cpu else 2**26, pin_memory=not cpu)
    part = flat[: host.numel()]
    sent = _seconds(lambda: host.copy_(part, non_blocking=True), device)
    overhead = CPU_OVERHEAD if cpu else GPU_OVERHEAD
    flops, bandwidth = 2 * size**3 / product, 2 * flat.numel() * flat.element_size() / copy
    source = f"measured now: {flops / 1e12:.3g} TFLOP/s, {bandwidth / 1e12:.3g} TB/s"
    return Device(name, memory, flops, bandwidth, *overhead, source, cpu, host.nbytes / sent, has_8_bits(device))


def physical_memory() -> int:
    """Of this machine, in bytes; where the system does not say (Windows), as much as a laptop has."""
    if not hasattr(os, "sysconf"):
        return LAPTOP
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """That this process may have: of the machine, or what its container is limited to."""
    try:
        return min(physical_memory(), int(limit.read_text()))
    except (OSError, ValueError):  # no such file; "max"
        return physical_memory()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some."""
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
