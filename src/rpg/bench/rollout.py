"""Sampling: the native engine beside transformers' generate and its continuous batching, and beside the floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..costs.operations import Ceilings, Counts
from .distribution import distribution_rows
from .rows import Column, Row, Section, Target, ratio
from .shapes import make_model, make_tokenizer, random_prompts, vocabulary
from .sizes import Sizes
from .step import finish
from .timing import fresh, guarded, peak_gib, timed
from .versus import apart

LIMIT = 120.0  # seconds that a peer, in a process of its own, may take
OVER_GENERATE, OVER_FLOOR, SMALL_TOKENS, P_VALUE = 20.0, 5.0, 300_000.0, 1e-3

COLUMNS = (
    Column("tokens/s", "response tokens by all seconds, prompts included", ",.0f"),
    Column("ms a step", "of decoding, one token for every row", ".2f"),
    Column("prompts s", "seconds for reading the prompts, where the engine says so", ".3f"),
    Column("peak GiB", "of device memory, weights included", ".2f"),
    Column("floor ms", "bytes or operations of a decoding step, counted, over the measured rates", ".3f"),
    Column("× floor", "ms a step over that", ".2f"),
    Column("p", "chi-square test of the sampled pairs of tokens against exact probabilities", ".3f"),
)


def rollout_section(sizes: Sizes, ceilings: Ceilings, watch: Callable[[str], None]) -> Section:
    section = Section("rollout", "Rollout: tokens sampled", COLUMNS, _about(sizes))
    own, generate = f"rpg {sizes.model}", f"transformers generate {sizes.model}"

    def add(name: str, measure: Callable[[], Row]) -> None:
        watch(f"rollout: {name}")
        section.rows.append(guarded(name, sizes.device, measure))

    add(own, lambda: native_row(own, sizes, ceilings, sizes.model, sizes.prompts, sizes.prompts))
    add(generate, lambda: _generate_row(generate, sizes, ceilings))
    batching = f"transformers continuous batching {sizes.model}"
    add(batching, lambda: Row(batching, apart(continuous_batching, sizes, limit=LIMIT)))
    small = f"rpg {sizes.small}, {sizes.slots} rows"
    add(small, lambda: native_row(small, sizes, ceilings, sizes.small, sizes.slots, sizes.slots))
    watch("rollout: distribution")
    for name, measure in distribution_rows(sizes):
        add(name, partial(_p_row, name, measure))
    if sizes.device != "cpu":
        _set_targets(section, own, generate, small)
    return section


def _set_targets(section: Section, own: str, generate: str, small: str) -> None:
    speed = ratio(section.value(own, "tokens/s"), section.value(generate, "tokens/s"))
    wanted = {
        own: (
            Target(f"≥ {OVER_GENERATE:.0f}× generate", speed, least=OVER_GENERATE),
            Target(f"≤ {OVER_FLOOR:.0f}× floor", section.value(own, "× floor"), most=OVER_FLOOR),
        ),
        small: (Target(f"≥ {SMALL_TOKENS:,.0f} tok/s", section.value(small, "tokens/s"), least=SMALL_TOKENS),),
    }
    for i, row in enumerate(section.rows):
        if row.name in wanted:
            section.rows[i] = Row(row.name, row.values, wanted[row.name], row.error)


def _about(sizes: Sizes) -> str:
    return (
        f"{sizes.prompts} prompts of {sizes.prompt_tokens} tokens, {sizes.new_tokens} new ones each, temperature 1, "
        f"{sizes.dtype}, random weights; no response can end by itself, so all lengths are equal and no row is ever "
        f"idle. Medians of {sizes.repeats} after one to warm up. transformers' generate and its continuous batching "
        "have processes of their own; generate is timed once after a whole one to warm up, continuous batching samples "
        f"{sizes.peer_new_tokens} tokens and takes as much memory as it finds."
    )


# ---- rpg -------------------------------------------------------------------------------------------------------------


def native_row(name: str, sizes: Sizes, ceilings: Ceilings, model_name: str, prompts: int, slots: int) -> Row:
    model = make_model(model_name, sizes)
    ids = random_prompts(prompts, sizes.prompt_tokens, vocabulary(model))
    counts = Counts.of(model, sizes.element)  # before the engine lays weights out anew
    found = run_native(model, sizes, ids, 1, sizes.new_tokens, slots)
    return Row(name, found | _floor(counts, sizes, ceilings, prompts, sizes.new_tokens, found["ms a step"]))


def run_native(
    model: Any, sizes: Sizes, prompts: Sequence[Sequence[int]], n: int, new: int, slots: int
) -> dict[str, float]:
    """Where the engine has no watch of its own, a step is the whole by the number of tokens."""
    from ..rollout import NativeEngine

    engine = NativeEngine(model, make_tokenizer(vocabulary(model)), slots)
    seen: list[tuple[float, float]] = []  # seconds of prompts, and of one decoding step
    seed = iter(range(1, 1000))

    def generate() -> None:
        begin = perf_counter()
        engine.generate(prompts, n, new, 1.0, next(seed))
        finish(sizes.device)
        whole = perf_counter() - begin
        timing = getattr(engine, "timing", None)
        seen.append((timing.prefill, timing.decode / max(1, timing.steps)) if timing else (float("nan"), whole / new))

    seconds = timed(generate, sizes.device, sizes.repeats)
    by_step = sorted(seen[1:], key=lambda pair: pair[1])  # the first warmed up
    reading, a_step = by_step[len(by_step) // 2]
    found = {"tokens/s": len(prompts) * n * new / seconds, "ms a step": 1000 * a_step}
    return found | ({"prompts s": reading} if reading == reading else {}) | {"peak GiB": peak_gib(sizes.device)}


def _floor(
    counts: Counts, sizes: Sizes, ceilings: Ceilings, rows: int, new: int, milliseconds: float
) -> dict[str, float]:
    """At the mean length, half of the response sampled."""
    floor = 1000 * counts.decode_seconds(ceilings, rows, sizes.prompt_tokens, new / 2)
    return {"floor ms": floor, "× floor": milliseconds / floor}


# ---- transformers ----------------------------------------------------------------------------------------------------


def _sampling(model: Any, new: int) -> dict[str, Any]:
    """The whole distribution, and no end token that could be drawn."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": new,
        "pad_token_id": 0,
        "eos_token_id": vocabulary(model),
    }


def _generate_row(name: str, sizes: Sizes, ceilings: Ceilings) -> Row:
    found = apart(plain_generate, sizes, limit=LIMIT)
    counts = Counts.of(make_model(sizes.model, sizes), sizes.element)
    return Row(name, found | _floor(counts, sizes, ceilings, sizes.prompts, sizes.new_tokens, found["ms a step"]))


def plain_generate(sizes: Sizes) -> dict[str, float]:
    model = make_model(sizes.model, sizes)
    ids = torch.tensor(random_prompts(sizes.prompts, sizes.prompt_tokens, vocabulary(model)), device=sizes.device)

    def generate(new: int) -> None:
        with torch.inference_mode():
            found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **_sampling(model, new))
        if found.shape[1] != sizes.prompt_tokens + new:
            raise ValueError(f"{found.shape[1] - sizes.prompt_tokens} tokens instead of {new}")

    few, new = max(1, sizes.new_tokens // 20), sizes.new_tokens
    fresh(sizes.device)
    seconds = timed(lambda: generate(new), sizes.device, 1)
    start = timed(lambda: generate(few), sizes.device, 1, warmup=0)
    step = 1000 * (seconds - start) / (new - few)
    return {"tokens/s": sizes.prompts * new / seconds, "ms a step": step, "peak GiB": peak_gib(sizes.device)}


def continuous_batching(sizes: Sizes) -> dict[str, float]:
    """transformers' own engine with pages and, on a GPU, CUDA graphs, as it sets itself up."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    few = {"num_blocks": 64, "max_batch_tokens": 64} if sizes.device == "cpu" else {}  # else half of all memory
    setup = ContinuousBatchingConfig(**few)
    model = make_model(sizes.model, sizes)
    prompts = random_prompts(sizes.prompts, sizes.prompt_tokens, vocabulary(model))
    new = sizes.peer_new_tokens

    def generate(new: int) -> float:
        config = GenerationConfig(**_sampling(model, new))
        begin = perf_counter()
        found = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=setup)
        finish(sizes.device)
        seconds = perf_counter() - begin
        done = [len(output.generated_tokens) for output in found.values()]
        if done != [new] * len(prompts):
            raise ValueError(f"{len(done)} of {len(prompts)} responses, of {sorted(set(done))} tokens, not {new}")
        return seconds

    generate(2)
    fresh(sizes.device)
    seconds = generate(new)
    return {
        "tokens/s": len(prompts) * new / seconds,
        "ms a step": 1000 * seconds / new,
        "peak GiB": peak_gib(sizes.device),
    }


def _p_row(name: str, measure: Callable[[], float]) -> Row:
    p = measure()
    return Row(name, {"p": p}, (Target(f"p ≥ {P_VALUE:g}", p, least=P_VALUE),))
