"""Seconds, peak memory and the machine's two rates; and work in a process of its own."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import torch

from .. import __version__
from ..costs.operations import Ceilings
from .synthetic import Sizes
from .table import BenchRow, Section

INSIDE = 5  # runs of what takes a millisecond, between two looks at the watch
Watch = Callable[[str], None]  # shows one line of progress
Numbers = dict[str, float]  # of a row, by the key of their quantity


def finish(device: str) -> None:
    """What a GPU was asked to do is part of the step."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


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
    seconds = []
    for _ in range(repeats):
        finish(device)
        begin = perf_counter()
        function()
        finish(device)
        seconds.append(perf_counter() - begin)
    return median(seconds)


def peak_gib(device: str) -> float:
    """Of this process: on a GPU what torch allocated there, else resident memory."""
    from ..training.phases import gpu_peak_memory_gb, peak_memory_gb

    on_gpu = gpu_peak_memory_gb(torch.device(device))
    return (peak_memory_gb() or 0.0) if on_gpu is None else on_gpu


def recorder(section: Section, sizes: Sizes, watch: Watch) -> Callable[[str, Callable[[], Numbers]], None]:
    """Adds rows to the section: their numbers, or an error's line. One row that fails does not end the others."""

    def record(name: str, measure: Callable[[], Numbers]) -> None:
        watch(f"{section.name}: {name}")
        fresh(sizes.device)
        try:
            row = BenchRow(name, measure())
        except Exception as error:
            row = BenchRow(name, error=error_line(error))
        section.rows.append(row)
        fresh(sizes.device)

    return record


def error_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return (text if isinstance(error, SideFailed) else f"{name}: {text}")[:200] if text else name


# ---- the machine -----------------------------------------------------------------------------------------------------


def measure_ceilings(sizes: Sizes) -> Ceilings:
    """Of a square product of random matrices, and of a copy: each the median of several."""
    dtype, device, repeats = getattr(torch, sizes.dtype), sizes.device, 5 if sizes.quick else 10
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=dtype) for _ in range(2))
    seconds = timed(lambda: [a @ b for _ in range(INSIDE)], device, repeats) / INSIDE
    source = torch.zeros(sizes.copy // 4, device=device)
    target = torch.empty_like(source)
    copying = timed(lambda: [target.copy_(source) for _ in range(INSIDE)], device, repeats) / INSIDE
    return Ceilings(2 * sizes.matmul**3 / seconds, 2 * sizes.copy / copying)


def machine(device: str, threads: int) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "rpg": __version__}
        | {name: _version(name) for name in ("torch", "transformers", "trl")},
    }


def _processor() -> str:
    """Its name, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- processes -------------------------------------------------------------------------------------------------------


class SideFailed(Exception):
    """Why a side has no numbers, in a line that needs no name of an exception before it."""


@contextmanager
def process(
    function: Callable[..., Any], *arguments: Any, limit: float | None
) -> Iterator[tuple[Connection, Callable[[], Any]]]:
    """``function(pipe, *arguments)`` in a process of its own: the pipe to it, and what waits for its next answer."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=_run, args=(other, function, arguments), daemon=True)
    child.start()
    other.close()

    def receive() -> Any:
        try:
            if not pipe.poll(limit):
                child.kill()
                raise SideFailed(f"no answer within {limit:.0f} s")
            answer = pipe.recv()
        except EOFError as error:
            child.join(5)
            raise SideFailed(f"its process ended with exit code {child.exitcode}") from error
        if isinstance(answer, SideFailed):
            raise answer
        return answer

    try:
        yield pipe, receive
    finally:
        pipe.close()
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join(5)  # what it held of the device is needed by the next


def apart(function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
    """The function's result, from a process of its own that is ended after ``limit`` seconds."""
    with process(_call, function, *arguments, limit=limit) as (_, receive):
        return receive()


def _run(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere  # other people's progress lines
        try:
            function(pipe, *arguments)
        except EOFError:  # the parent went away
            pass
        except Exception as error:
            pipe.send(SideFailed(error_line(error)))


def _call(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    pipe.send(function(*arguments))
