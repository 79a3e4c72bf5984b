"""How a decoding step, the head and an optimiser step grow with batch, length, vocabulary and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..costs.operations import Ceilings, Counts, logp_flops
from ..kernels import linear_logp
from .logp import both_ways, make_problem
from .rollout import run_native
from .rows import Column, Row, Section
from .shapes import make_model, random_prompts, vocabulary
from .sizes import Sizes
from .timing import guarded, peak_gib, timed
from .train import train_numbers

NEW = 32  # tokens sampled at each size
LARGE = ("4b",)  # trained with recompute: activations of a pass beside weights and moments would fill the device
Measure = Callable[[], dict[str, float]]
T = TypeVar("T")
COLUMNS = (
    Column("ms", "", ",.2f"),
    Column("peak GiB", "of device memory", ".2f"),
    Column("floor ms", "counted bytes or operations over the measured rates", ",.3f"),
    Column("× floor", "ms over that", ".2f"),
)


def scaling_section(sizes: Sizes, ceilings: Ceilings, watch: Callable[[str], None]) -> Section:
    section = Section("scaling", "How cost grows", COLUMNS, _about(sizes))
    for name, measure in grid(sizes, ceilings).items():
        watch(f"scaling: {name}")
        section.rows.append(guarded(name, sizes.device, partial(_row, name, measure)))
    return section


def _row(name: str, measure: Measure) -> Row:
    return Row(name, measure())


def _about(sizes: Sizes) -> str:
    return (
        f"A decoding step is one token for every row, of different prompts; the last {_new(sizes)} tokens of a length "
        "are sampled. The head is linear_logp, forward "
        "and backward. Training is one optimiser step on groups of eight with a prompt of "
        f"{sizes.prompt_tokens} tokens and responses of {sizes.new_tokens}. One run each after one to warm up."
    )


def _new(sizes: Sizes) -> int:
    return min(NEW, sizes.new_tokens)


def grid(sizes: Sizes, ceilings: Ceilings) -> dict[str, Measure]:
    """Small sizes on a CPU; with --quick the ends of each axis."""
    cpu = sizes.device == "cpu"
    batches = ends(sizes, (2, 4) if cpu else (64, 256, 512))
    lengths = ends(sizes, (32, 64) if cpu else (512, 2048, 8192))
    words = ends(sizes, (64, 128) if cpu else (32_000, 151_936, 256_000))
    models = ends(sizes, ("tiny",) if cpu else ("17m", "0.5b", "1.5b", "4b"))
    rows, length, tokens, hidden = (4, 32, 32, 32) if cpu else (64, 512, 8192, 896)
    once, own = replace(sizes, repeats=1), sizes.model
    decoded = [(own, n, length) for n in batches] + [(own, rows, n) for n in lengths]
    decoded += [(name, rows, length) for name in models]
    trained = [(own, n) for n in batches] + [(name, batches[0]) for name in models]
    found: dict[str, Measure] = {}
    for name, n, long in decoded:
        found[f"decode {name}, {n} rows of {long:,}"] = _decode(once, ceilings, name, n, long)
    for n in words:
        found[f"head, {tokens:,} × {hidden} × {n:,}"] = _head(once, ceilings, tokens, hidden, n)
    for name, n in trained:
        recompute = name in LARGE
        title = f"train {name}, {n} responses" + (", recompute" if recompute else "")
        found[title] = _train(once, ceilings, name, n, recompute)
    return found


def ends(sizes: Sizes, values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((values[0], values[-1]))) if sizes.quick else values


def _decode(sizes: Sizes, ceilings: Ceilings, name: str, rows: int, length: int) -> Measure:
    def measure() -> dict[str, float]:
        model, new = make_model(name, sizes), _new(sizes)
        counts = Counts.of(model, sizes.element)  # before the engine lays weights out anew
        prompts = random_prompts(rows, length - new, vocabulary(model))
        found = run_native(model, sizes, prompts, 1, new, rows)
        floor = counts.decode_seconds(ceilings, rows, length - new, new / 2)
        return _against(found["ms a step"] / 1000, floor, found["peak GiB"])

    return measure


def _head(sizes: Sizes, ceilings: Ceilings, tokens: int, hidden: int, vocab: int) -> Measure:
    def measure() -> dict[str, float]:
        problem = make_problem(tokens, hidden, vocab, sizes)
        seconds = timed(lambda: both_ways(linear_logp, problem), sizes.device, 3)
        return _against(seconds, ceilings.seconds(logp_flops(tokens, hidden, vocab)), peak_gib(sizes.device))

    return measure


def _train(sizes: Sizes, ceilings: Ceilings, name: str, responses: int, recompute: bool) -> Measure:
    def measure() -> dict[str, float]:
        samples = min(8, responses)
        shape = replace(sizes, groups=responses // samples, samples=samples)
        found = train_numbers(make_model(name, sizes), shape, ceilings, recompute)
        return _against(found["seconds"], found["floor s"], found["peak GiB"])

    return measure


def _against(seconds: float, floor: float, memory: float) -> dict[str, float]:
    return {"ms": 1000 * seconds, "peak GiB": memory, "floor ms": 1000 * floor, "× floor": seconds / floor}
