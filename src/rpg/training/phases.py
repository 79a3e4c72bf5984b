"""What lies where while responses are sampled and while the model is trained, and how much memory either took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter

import torch
from torch import Tensor

from ..rollout import Engine
from .optim import MixedOptimizer, State

SLAB = 2**30  # bytes of pinned memory taken at a time: torch rounds each request up to a power of two
ALIGNED = 64


class Phases:
    """``sampling()`` before responses are sampled, ``training()`` before the model is trained: each at every beginning.

    With ``offload`` the optimiser's masters and moments are in host memory in the first phase, and the engine gives its
    cache and its graphs back before the second. They stay the same tensor objects, with the same bits: a checkpoint is
    written from wherever they lie. Host memory is taken once, pinned where the device is a GPU.
    """

    def __init__(self, optimizer: MixedOptimizer, engine: Engine, device: torch.device, offload: bool = False):
        self.optimizer, self.engine, self.device, self.offload = optimizer, engine, device, offload
        self.now: str | None = None
        self.peaks: dict[str, int] = {}  # bytes on the GPU, by phase
        self._host: dict[State, Tensor] = {}
        self._seconds = 0.0

    def sampling(self) -> None:
        self._begin("sampling", self._to_host)

    def training(self) -> None:
        self._begin("training", self._to_device)

    def _begin(self, phase: str, move: Callable[[], None]) -> None:
        if phase == self.now:
            return
        self._note_peak()
        if self.offload:
            begin = perf_counter()
            move()
            self._seconds += perf_counter() - begin
        gpu_peak_memory_gb(self.device, reset=True)  # now that what the phase before had is gone
        self.now = phase

    def _to_host(self) -> None:
        tensors = self.optimizer.idle_in_sampling()
        self._host |= pinned({key: x for key, x in tensors.items() if key not in self._host}, self.device)
        self._move(tensors, {key: self._host[key] for key in tensors})

    def _to_device(self) -> None:
        self.engine.release()
        tensors = self.optimizer.idle_in_sampling()
        self._move(tensors, {key: torch.empty_like(x, device=self.device) for key, x in tensors.items()})

    @torch.no_grad()
    def _move(self, tensors: Mapping[State, Tensor], places: Mapping[State, Tensor]) -> None:
        for key, x in tensors.items():
            places[key].copy_(x, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for key, x in tensors.items():
            x.data = places[key]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what is freed is of other sizes than what comes

    # ---- what it took ------------------------------------------------------------------------------------------------

    def _note_peak(self) -> None:
        if self.device.type == "cuda" and self.now is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks[self.now] = max(peak, self.peaks.get(self.now, 0))

    def metrics(self) -> dict[str, float]:
        """Peaks since the run began: of the process, and of the GPU, in either phase too."""
        self._note_peak()
        peak, on_gpu = peak_memory_gb(), gpu_peak_memory_gb(self.device)
        row = {} if peak is None else {"memory/peak_gb": peak}
        if on_gpu is not None:
            row["memory/gpu_peak_gb"] = on_gpu
        return row | {f"memory/gpu_{phase}_gb": peak / 2**30 for phase, peak in self.peaks.items()}

    def spent(self) -> dict[str, float]:
        """Seconds that moving took since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return {"offload": seconds} if self.offload else {}


def pinned(tensors: Mapping[State, Tensor], device: torch.device) -> dict[State, Tensor]:
    """Places in host memory of the same shapes, pinned where the device is a GPU; large ones in slabs of their own."""
    places: dict[State, Tensor] = {}
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    for key, x in tensors.items():
        size = -(-x.nbytes // ALIGNED) * ALIGNED
        if used + size > slab.numel():
            slab, used = torch.empty(max(SLAB, size), dtype=torch.uint8, pin_memory=device.type == "cuda"), 0
        places[key] = slab[used : used + x.nbytes].view(x.dtype).view(x.shape)
        used += size
    return places


def peak_memory_gb() -> float | None:
    """Of this process, in host memory; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


_highest: dict[torch.device, int] = {}  # bytes, before torch's own count was begun again


def gpu_peak_memory_gb(device: torch.device, reset: bool = False) -> float | None:
    """That this process has had there, or None where it is no GPU; ``reset``: torch counts anew, this does not."""
    if device.type != "cuda":
        return None
    highest = max(torch.cuda.max_memory_allocated(device), _highest.get(device, 0))
    if reset:
        _highest[device] = highest
        torch.cuda.reset_peak_memory_stats(device)
    return highest / 2**30
