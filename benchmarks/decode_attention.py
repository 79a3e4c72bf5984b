"""A decoding step's attention on a GPU: prompts read once a row, or once a group; and a sweep of the kernels' settings.

    python benchmarks/decode_attention.py                   # under a minute on an H200
    python benchmarks/decode_attention.py --parts t         # the table alone, no sweep
    python benchmarks/decode_attention.py --device cpu      # tiny shapes, to see that it runs

Random keys and values in pages of random order. Times are microseconds a layer, of a CUDA graph of 24 calls over the
caches of 24 layers: the median of its replays. Floors are bytes, with each prompt once a group, over a copy's rate.
Settings are compiled in several processes before they are timed; what wins is held against the same in torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rpg.kernels.decode import LayerCache, PromptSettings, Unfinished, launch, reference

LAYERS = 24
REPLAYS = 9
PAGE = 64
Settings = dict[str, Any]  # of launch


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    key_heads: int
    width: int
    normed: bool  # whether its heads are


SMALL, LARGE, TINY = Shape("0.5B", 14, 2, 64, False), Shape("4B", 32, 8, 128, True), Shape("tiny", 6, 2, 16, True)


@dataclass(frozen=True)
class Case:
    shape: Shape
    rows: int
    prompt: int
    own: int
    n: int
    fp8: bool = False

    @property
    def bytes(self) -> int:
        token = 2 * self.shape.key_heads * ((self.shape.width + 4) if self.fp8 else 2 * self.shape.width)
        return token * (self.rows * self.own + self.rows // self.n * self.prompt)

    @property
    def title(self) -> str:
        bits = "8 bits" if self.fp8 else "16 bits"
        return f"{self.shape.name:5} {self.rows:6,} {self.prompt:7,} {self.own:6,} {self.n:4} {bits:>8}"


CASES = (
    Case(SMALL, 256, 178, 160, 1),
    Case(SMALL, 512, 178, 160, 8),
    Case(SMALL, 1024, 178, 150, 8),
    Case(SMALL, 1024, 600, 150, 8),
    Case(LARGE, 128, 178, 1500, 8),
    Case(LARGE, 128, 2048, 1500, 16),
)
SWEPT_ROWS = (CASES[0], CASES[2])
SWEPT_PROMPTS = (CASES[2], CASES[3], CASES[5])


def settings_of_rows(case: Case) -> list[Settings]:
    """Of the rows' own kernel: blocks, warps, key heads of a program, stages, the new token first or last."""
    forms = [(32, 1, 1), (32, 2, 1), (64, 1, 1), (64, 2, 1), (16, 1, 2), (32, 1, 2), (32, 2, 2)]
    every = [(*form, stages, True) for form in forms for stages in (2, 3)] + [(*forms[0], 4, True)]
    names = ("block", "warps", "key_heads", "stages", "late")
    if case.n > 1:  # the new token is made before
        return [dict(zip(names, values[:4], strict=False)) | {"samples": case.n} for values in every]
    every += [(*form, stages, False) for form in (forms[0], forms[3]) for stages in (2, 3, 4)]
    return [dict(zip(names, values, strict=True)) for values in every]


def settings_of_prompts() -> list[Settings]:
    forms = [(8, 32, 4), (8, 64, 4), (16, 32, 4), (16, 64, 4), (16, 64, 8)]
    every = [PromptSettings(*form, stages) for form in forms for stages in (2, 3)]
    every += [replace(every[2], early=True), replace(every[2], splits=2), replace(every[6], splits=4)]
    return [{"prompts": settings} for settings in every]


# ---- inputs ----------------------------------------------------------------------------------------------------------


class Inputs:
    """Random ones of a case, for so many layers. ``ragged``: prompts and responses of many lengths, some rows dead."""

    def __init__(self, case: Case, layers: int, device: str, ragged: bool = False):
        shape, dtype = case.shape, torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        A, groups = case.rows, case.rows // case.n
        prompt_G, own_A = torch.full((groups,), case.prompt), torch.full((A,), case.own)
        if ragged:
            prompt_G = torch.randint(case.prompt + 1, (groups,), generator=generator)
            own_A = torch.randint(case.own + 1, (A,), generator=generator)
            own_A[::5] = -1
        of_prompt, of_row = -(-case.prompt // PAGE), case.own // PAGE + 1
        count = groups * of_prompt + A * of_row
        page = torch.randperm(count, generator=generator).int()
        which_A = torch.arange(groups).repeat_interleave(case.n)
        self.tables = (page[: groups * of_prompt].view(groups, -1), page[groups * of_prompt :].view(A, -1))
        self.indices = (which_A, prompt_G[which_A], torch.arange(A), own_A)
        self.tables = tuple(x.to(device) for x in self.tables)
        self.indices = tuple(x.int().to(device) for x in self.indices)
        torch.manual_seed(0)
        joint = torch.randn(A, shape.heads + 2 * shape.key_heads, shape.width, device=device, dtype=dtype)
        sizes = [shape.heads, shape.key_heads, shape.key_heads]
        self.heads = torch.split(joint, sizes, 1)  # side by side, as a joint projection leaves them
        like = self.heads[1][:1, :, None]
        self.caches = [LayerCache.empty(count, like, like, case.fp8, PAGE) for _ in range(layers)]
        for cache in self.caches:
            for x in cache.parts:
                if x.dtype == torch.uint8:
                    x.random_(0, 256).bitwise_and_(0xB7)  # numbers of moderate size
                else:
                    x.uniform_(0.01, 0.05) if case.fp8 else x.normal_()
        rows = torch.randn(2, A, shape.width, device=device, dtype=dtype)
        weights = torch.rand(2, shape.width, device=device, dtype=dtype) + 0.5
        self.unfinished = Unfinished((rows[0], rows[1]), (weights[0], weights[1]) if shape.normed else None, 1e-6)
        self.scaling = shape.width**-0.5

    def call(self, layer: int, function: Callable[..., Tensor], **settings: Any) -> Tensor:
        given = *self.heads, self.caches[layer], *self.tables, *self.indices, self.scaling
        return function(*given, unfinished=self.unfinished, **settings)


# ---- timing ----------------------------------------------------------------------------------------------------------


def microseconds(inputs: Inputs, settings: Settings) -> float:
    """Of one call among many, in a graph."""
    layers = range(len(inputs.caches))
    inputs.call(0, launch, **settings)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            inputs.call(layer, launch, **settings)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * REPLAYS)]
    for _ in range(3):
        graph.replay()
    for begin, end in zip(marks[::2], marks[1::2], strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1000 * median(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True)) / len(layers)


def bandwidth() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.zeros(2**28, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return 2 * source.nbytes / median(times[1:])


def error_of(case: Case, settings: Settings, windows: tuple[int | None, ...] = (None,)) -> float:
    """On a small case with rows of all lengths, against torch in float32: ‖difference‖ / ‖torch's‖."""
    small, worst = replace(case, rows=16 * max(3, case.n // 2), prompt=150, own=200), 0.0
    for window in windows:
        found, wanted = (
            Inputs(small, 1, "cuda", ragged=True).call(0, function, window=window, **own).float()
            for function, own in ((launch, settings | {"splits": 1}), (reference, {}))
        )
        error = float((found - wanted).norm() / wanted.norm())
        worst = error if error != error else max(worst, error)  # NaN stays
    return worst


def compiled(jobs: list[tuple[Case, Settings]]) -> None:
    """In a process of its own: into Triton's cache on disk, for those who time."""
    for case, settings in jobs:
        try:
            Inputs(case, 1, "cuda").call(0, launch, **settings)
        except Exception:  # who times it will say so
            continue


def compile_all(jobs: list[tuple[Case, Settings]]) -> None:
    count = max(1, min(14, (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(compiled, [jobs[i::count] for i in range(count)], chunksize=1)


# ---- what is printed -------------------------------------------------------------------------------------------------


def table(rate: float) -> Iterator[str]:
    yield "shape   rows  prompt    own    n   cache    today   new    gain  floor  new/floor   µs a layer"
    for base in CASES:
        for fp8 in (False, True):
            case = replace(base, fp8=fp8)
            inputs = Inputs(case, LAYERS, "cuda")
            floor = 1e6 * case.bytes / rate
            today = microseconds(inputs, {})
            new = microseconds(inputs, {"samples": case.n}) if case.n > 1 else today
            yield f"{case.title} {today:8.1f} {new:6.1f} {today / new:6.2f} {floor:6.1f} {new / floor:9.2f}"
            del inputs


def said(settings: Settings) -> str:
    shown = {k: v for k, v in settings.items() if k not in ("prompts", "samples")}
    if "prompts" in settings:
        shown |= {f"prompts.{k}": v for k, v in vars(settings["prompts"]).items()}
    return " ".join(f"{k}={int(v)}" for k, v in shown.items())


def ranked(case: Case, every: list[Settings], inputs: Inputs) -> list[tuple[float, Settings]]:
    found = []
    for settings in every:
        try:
            found.append((microseconds(inputs, settings), settings))
        except Exception as error:
            print(f"    failed: {said(settings)}: {str(error).splitlines()[0][:120]}", flush=True)
    return sorted(found, key=lambda pair: pair[0])


def sweep(rate: float) -> Iterator[str]:
    for fp8 in (False, True):
        best: dict[str, Settings] = {}
        for base in dict.fromkeys((*SWEPT_ROWS, *SWEPT_PROMPTS)):
            case = replace(base, fp8=fp8)
            inputs = Inputs(case, LAYERS, "cuda")
            yield f"{case.title}   floor {1e6 * case.bytes / rate:.1f}"
            kinds = [("rows", settings_of_rows(case))] if base in SWEPT_ROWS else []
            kinds += [("prompts", settings_of_prompts())] if base in SWEPT_PROMPTS else []
            for name, every in kinds:
                found = ranked(case, every, inputs)
                for place, (us, settings) in enumerate(found[:5]):
                    error = "" if place else f"error {error_of(case, settings):.1e}"
                    yield f"  {name:8} {us:6.1f}  {error:13}  {said(settings)}"
                if found and case.n > 1:
                    best[name] = found[0][1]
            if len(best) == 2:
                for early in (False, True):
                    both = best["rows"] | {"prompts": replace(best["prompts"]["prompts"], early=early)}
                    for us, settings in ranked(case, [both], inputs):
                        error = error_of(case, settings, (None,) if early else (None, 90))
                        yield f"  {'both':8} {us:6.1f}  error {error:.1e}  {said(settings)}"
            del inputs


def jobs_of(parts: str) -> list[tuple[Case, Settings]]:
    jobs: list[tuple[Case, Settings]] = []
    for fp8 in (False, True):
        if "t" in parts:
            for base in CASES:
                case = replace(base, fp8=fp8)
                jobs += [(case, {})] + ([(case, {"samples": case.n})] if case.n > 1 else [])
        if "s" in parts:
            for base in SWEPT_ROWS:
                jobs += [(replace(base, fp8=fp8), settings) for settings in settings_of_rows(base)]
            for base in (SWEPT_PROMPTS[0], SWEPT_PROMPTS[-1]):  # the other's are the first's
                jobs += [(replace(base, fp8=fp8), settings) for settings in settings_of_prompts()]
    return jobs


def on_cpu() -> None:
    """The same inputs through torch: that they fit, and that the floors are counted."""
    for case in (Case(TINY, 8, 70, 70, 4), Case(TINY, 8, 70, 70, 4, fp8=True)):
        for ragged in (False, True):
            inputs = Inputs(case, 2, "cpu", ragged)
            begin = time.perf_counter()
            found = inputs.call(0, reference)
            seconds = time.perf_counter() - begin
            assert found.isfinite().all()
            print(f"{case.title}: {case.bytes:,} bytes, {1000 * seconds:.1f} ms in torch")
    print(f"{len(jobs_of('ts'))} settings would be compiled on a GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="ts", help="t: the table, s: the sweep")
    args = parser.parse_args()
    if args.device == "cpu":
        on_cpu()
        return
    begin = time.perf_counter()
    compile_all(jobs_of(args.parts))
    rate = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy {rate / 1e12:.2f} TB/s")
    print(f"compiled after {time.perf_counter() - begin:.0f} s\n", flush=True)
    for letter, part in (("t", table), ("s", sweep)):
        if letter not in args.parts:
            continue
        try:
            with torch.inference_mode():
                for line in part(rate):
                    print(line, flush=True)
        except Exception:  # the other part is worth having
            print(f"{letter} failed: {traceback.format_exc()}", flush=True)
        print(f"  ({time.perf_counter() - begin:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
