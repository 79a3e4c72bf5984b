"""How a decoding step, the head and an optimiser step grow with batch, length, vocabulary and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..costs.operations import Ceilings, Operations, logp_flops
from ..kernels import linear_logp
from .logp import both_ways, make_inputs
from .rollout import run_native
from .synthetic import Sizes, make_model, random_prompts, vocabulary
from .table import Quantity, Section
from .timing import Numbers, Watch, peak_gib, recorder, timed
from .train import train_numbers

NEW = 32  # tokens sampled at each size
LARGE = ("4b",)  # trained with recompute: activations of a pass beside weights and moments would fill the device
T = TypeVar("T")
COLUMNS = (
    Quantity("ms", "", ",.2f"),
    Quantity("peak GiB", "of device memory", ".2f"),
    Quantity("floor ms", "counted bytes or operations over the measured rates", ",.3f"),
    Quantity("× floor", "ms over that", ".2f"),
)


def scaling_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    about = (
        f"A decoding step is one token for every row, of different prompts; the last {min(NEW, sizes.new_tokens)} "
        "tokens of a length are sampled. The head is linear_logp, forward "
        "and backward. Training is one optimiser step on groups of eight with a prompt of "
        f"{sizes.prompt_tokens} tokens and responses of {sizes.new_tokens}. One run each after one to warm up."
    )
    section = Section("scaling", "How cost grows", COLUMNS, about)
    record = recorder(section, sizes, watch)
    for name, measure in grid(sizes, ceilings).items():
        record(name, measure)
    return section


def grid(sizes: Sizes, ceilings: Ceilings) -> dict[str, Callable[[], Numbers]]:
    """Small sizes on a CPU; with --quick the ends of each axis."""
    cpu = sizes.device == "cpu"
    batches = _ends(sizes, (2, 4) if cpu else (64, 256, 512))
    lengths = _ends(sizes, (32, 64) if cpu else (512, 2048, 8192))
    vocabularies = _ends(sizes, (64, 128) if cpu else (32_000, 151_936, 256_000))
    models = _ends(sizes, ("tiny",) if cpu else ("17m", "0.5b", "1.5b", "4b"))
    rows, length, tokens, hidden = (4, 32, 32, 32) if cpu else (64, 512, 8192, 896)
    once, main = replace(sizes, repeats=1), sizes.model
    decoded = [(main, n, length) for n in batches] + [(main, rows, n) for n in lengths]
    decoded += [(name, rows, length) for name in models]
    trained = [(main, n) for n in batches] + [(name, batches[0]) for name in models]
    points: dict[str, Callable[[], Numbers]] = {}
    for name, n, long in decoded:
        points[f"decode {name}, {n} rows of {long:,}"] = partial(_decode, once, ceilings, name, n, long)
    for n in vocabularies:
        points[f"head, {tokens:,} × {hidden} × {n:,}"] = partial(_head, once, ceilings, tokens, hidden, n)
    for name, n in trained:
        title = f"train {name}, {n} responses" + (", recompute" if name in LARGE else "")
        points[title] = partial(_train, once, ceilings, name, n)
    return points


def _ends(sizes: Sizes, values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((values[0], values[-1]))) if sizes.quick else values


def _decode(sizes: Sizes, ceilings: Ceilings, name: str, rows: int, length: int) -> Numbers:
    model, new = make_model(name, sizes), min(NEW, sizes.new_tokens)
    operations = Operations.of(model, sizes.element)  # before the engine changes the layout of weights
    prompts = random_prompts(rows, length - new, vocabulary(model))
    numbers = run_native(model, sizes, prompts, new, rows)
    floor = operations.decode_seconds(ceilings, rows, length - new, new / 2)
    return _over_floor(numbers["ms a step"] / 1000, floor, numbers["peak GiB"])


def _head(sizes: Sizes, ceilings: Ceilings, tokens: int, hidden: int, vocab: int) -> Numbers:
    inputs = make_inputs(tokens, hidden, vocab, sizes)
    seconds = timed(lambda: both_ways(linear_logp, inputs), sizes.device, 3)
    return _over_floor(seconds, ceilings.seconds(logp_flops(tokens, hidden, vocab)), peak_gib(sizes.device))


def _train(sizes: Sizes, ceilings: Ceilings, name: str, responses: int) -> Numbers:
    samples = min(8, responses)
    sizes = replace(sizes, groups=responses // samples, samples=samples)
    numbers = train_numbers(name, sizes, ceilings, recompute=name in LARGE)
    return _over_floor(numbers["seconds"], numbers["floor s"], numbers["peak GiB"])


def _over_floor(seconds: float, floor: float, memory: float) -> Numbers:
    return {"ms": 1000 * seconds, "peak GiB": memory, "floor ms": 1000 * floor, "× floor": seconds / floor}
