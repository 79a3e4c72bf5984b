"""Sampling: the native engine beside vLLM, transformers' generate and its continuous batching, and beside the floor.

And is what the engine draws what the model says? Pairs of tokens from one prompt against exact probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..costs.operations import Ceilings, Operations
from ..kernels.decode import FP8
from ..kernels.sample_torch import truncate
from ..rollout import NativeEngine
from .synthetic import Sizes, make_model, make_tokenizer, random_prompts, vocabulary
from .table import Quantity, Section, Target, ratio
from .timing import Numbers, Watch, apart, finish, fresh, peak_gib, recorder, timed
from .vllm import vllm_generate

LIMIT, VLLM_LIMIT = 120.0, 300.0  # seconds that a peer, in a process of its own, may take; vLLM starts in 50 to 90
OVER_VLLM, OVER_FLOOR, SMALL_TOKENS, P_VALUE = 1.1, 5.0, 300_000.0, 1e-3
COLUMNS = (
    Quantity("tokens/s", "response tokens by all seconds, prompts included", ",.0f"),
    Quantity("ms a step", "of decoding, one token for every row", ".2f"),
    Quantity("prompts s", "seconds for reading the prompts, where the engine says so", ".3f"),
    Quantity("peak GiB", "of device memory, weights included", ".2f"),
    Quantity("floor ms", "bytes or operations of a decoding step, counted, over the measured rates", ".3f"),
    Quantity("× floor", "ms a step over that", ".2f"),
    Quantity("p", "chi-square test of the sampled pairs of tokens against exact probabilities", ".3f"),
)


def rollout_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    about = (
        f"{sizes.prompts} prompts of {sizes.prompt_tokens} tokens, {sizes.new_tokens} new ones each, temperature 1, "
        f"{sizes.dtype}, random weights; no response can end by itself, so all lengths are equal and no row is ever "
        f"idle. Medians of {sizes.repeats} after one to warm up. The peers have processes of their own. vLLM has its "
        "graphs and prefix cache; generate is timed once after a whole one to warm up; the continuous batching of "
        f"transformers samples {sizes.peer_new_tokens} tokens and takes as much memory as it finds."
    )
    section = Section("rollout", "Rollout: tokens sampled", COLUMNS, about)
    record = recorder(section, sizes, watch)
    rpg, generate = f"rpg {sizes.model}", f"transformers generate {sizes.model}"
    rpg_fp8 = f"rpg {sizes.model}, cache in 8 bits"
    vllm, vllm_logp = f"vLLM {sizes.model}", f"vLLM with log-probabilities {sizes.model}"
    small = f"rpg {sizes.small}, {sizes.slots} rows"

    def native(name: str, prompts: int, cache_dtype: torch.dtype | None = None) -> Numbers:
        model = make_model(name, sizes)
        ids = random_prompts(prompts, sizes.prompt_tokens, vocabulary(model))
        operations = Operations.of(model, sizes.element)  # before the engine changes the layout of weights
        numbers = run_native(model, sizes, ids, sizes.new_tokens, prompts, cache_dtype)
        return with_floor(numbers, operations, prompts) if cache_dtype is None else numbers  # it reads less

    def plain() -> Numbers:
        numbers = apart(plain_generate, sizes, limit=LIMIT)
        return with_floor(numbers, Operations.of(make_model(sizes.model, sizes), sizes.element), sizes.prompts)

    def by_vllm(with_logp: bool) -> Numbers:
        numbers = apart(vllm_generate, sizes, with_logp, limit=VLLM_LIMIT)
        return with_floor(numbers, Operations.of(make_model(sizes.model, sizes), sizes.element), sizes.prompts)

    def with_floor(numbers: Numbers, operations: Operations, rows: int) -> Numbers:
        """At the mean length, half of the response sampled."""
        floor = 1000 * operations.decode_seconds(ceilings, rows, sizes.prompt_tokens, sizes.new_tokens / 2)
        return numbers | {"floor ms": floor, "× floor": numbers["ms a step"] / floor}

    record(rpg, partial(native, sizes.model, sizes.prompts))
    if sizes.device != "cpu":
        record(rpg_fp8, partial(native, sizes.model, sizes.prompts, FP8))
    record(vllm, partial(by_vllm, False))
    record(vllm_logp, partial(by_vllm, True))
    record(generate, plain)
    batching = partial(apart, continuous_batching, sizes, limit=LIMIT)
    record(f"transformers continuous batching {sizes.model}", batching)
    record(small, partial(native, sizes.small, sizes.slots))
    for name, test in distribution_tests(sizes).items():
        record(name, lambda test=test: {"p": test()})  # type: ignore[misc]
        if section.value(name, "p") is not None:
            section.require(name, Target(f"p ≥ {P_VALUE:g}", section.value(name, "p"), least=P_VALUE))
    if sizes.device != "cpu":
        set_targets(section, rpg, vllm_logp, small)
    return section


def set_targets(section: Section, rpg: str, vllm: str, small: str) -> None:
    """``vllm``: the row with log-probabilities, which rpg always gives. ``generate`` is as fast as its host."""
    speed = ratio(section.value(rpg, "tokens/s"), section.value(vllm, "tokens/s"))
    section.require(
        rpg,
        Target(f"≥ {OVER_VLLM:g}× vLLM", speed, least=OVER_VLLM),
        Target(f"≤ {OVER_FLOOR:.0f}× floor", section.value(rpg, "× floor"), most=OVER_FLOOR),
    )
    small_speed = section.value(small, "tokens/s")
    section.require(small, Target(f"≥ {SMALL_TOKENS:,.0f} tok/s", small_speed, least=SMALL_TOKENS))


def run_native(
    model: Any,
    sizes: Sizes,
    prompts: Sequence[Sequence[int]],
    new: int,
    slots: int,
    cache_dtype: torch.dtype | None = None,
) -> Numbers:
    """One response to each prompt. Where the engine has no watch, a step is the whole by the number of tokens."""
    engine = NativeEngine(model, make_tokenizer(vocabulary(model)), slots, cache_dtype=cache_dtype)
    seen: list[tuple[float, float]] = []  # seconds of one decoding step, and of the prompts
    seed = iter(range(1, 1000))

    def generate() -> None:
        begin = perf_counter()
        engine.generate(prompts, 1, new, 1.0, next(seed))
        finish(sizes.device)
        whole, timing = perf_counter() - begin, engine.timing
        seen.append((timing.decode / max(1, timing.steps), timing.prefill) if timing else (whole / new, 0.0))

    seconds = timed(generate, sizes.device, sizes.repeats)
    by_step = sorted(seen[1:], key=lambda pair: pair[0])  # the first warmed up
    step, reading = by_step[len(by_step) // 2]
    numbers = {"tokens/s": len(prompts) * new / seconds, "ms a step": 1000 * step}
    return numbers | ({"prompts s": reading} if engine.timing else {}) | {"peak GiB": peak_gib(sizes.device)}


# ---- transformers, in processes of its own ---------------------------------------------------------------------------


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


def plain_generate(sizes: Sizes) -> Numbers:
    model = make_model(sizes.model, sizes)
    ids = torch.tensor(random_prompts(sizes.prompts, sizes.prompt_tokens, vocabulary(model)), device=sizes.device)

    def generate(new: int) -> None:
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **_sampling(model, new))
        if output.shape[1] != sizes.prompt_tokens + new:
            raise ValueError(f"{output.shape[1] - sizes.prompt_tokens} tokens instead of {new}")

    few, new = max(1, sizes.new_tokens // 20), sizes.new_tokens
    fresh(sizes.device)
    seconds = timed(lambda: generate(new), sizes.device, 1)
    start = timed(lambda: generate(few), sizes.device, 1, warmup=0)
    step = 1000 * (seconds - start) / (new - few)
    return {"tokens/s": sizes.prompts * new / seconds, "ms a step": step, "peak GiB": peak_gib(sizes.device)}


def continuous_batching(sizes: Sizes) -> Numbers:
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
        outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=setup)
        finish(sizes.device)
        seconds = perf_counter() - begin
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [new] * len(prompts):
            raise ValueError(f"{len(lengths)} of {len(prompts)} responses, of {sorted(set(lengths))} tokens, not {new}")
        return seconds

    generate(2)
    fresh(sizes.device)
    seconds, peak = generate(new), peak_gib(sizes.device)
    return {"tokens/s": len(prompts) * new / seconds, "ms a step": 1000 * seconds / new, "peak GiB": peak}


# ---- the distribution of what is drawn -------------------------------------------------------------------------------

VOCABULARY, PROMPT, SPREAD, TOP_P = 64, [5, 9, 33, 2], 0.25, 0.9
FEWEST = 5.0  # expected draws of a cell of the test; rarer cells are put together


def distribution_tests(sizes: Sizes) -> dict[str, Callable[[], float]]:
    """Each gives a p; in float32, where a token at the edge of top-p is on the same side for both."""
    cases = [("float32", 1.0), ("float32", TOP_P)] + ([] if sizes.device == "cpu" else [("bfloat16", 1.0)])
    title = f"rpg, {sizes.draws:,} pairs, "
    return {
        f"{title}{dtype}" + (f", top-p {top_p}" if top_p < 1 else ""): partial(distribution_p, sizes, dtype, top_p)
        for dtype, top_p in cases
    }


def distribution_p(sizes: Sizes, dtype: str, top_p: float) -> float:
    model = spread_out(make_model("tiny", sizes, dtype, vocab_size=VOCABULARY))
    exact = pair_probabilities(model, top_p)  # before the engine puts its own kernels into the model
    engine = NativeEngine(model, make_tokenizer(VOCABULARY), min(4096, sizes.draws))
    (rollouts,) = engine.generate([PROMPT], sizes.draws, 2, 1.0, 7, top_p=top_p)
    return p_value(count_pairs(rollouts), exact)


@torch.no_grad()
def spread_out(model: Any) -> Any:
    """Weights wide enough for predictions that differ from place to place."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, SPREAD)
    return model


def count_pairs(rollouts: list[Any]) -> Tensor:
    """How often each pair of tokens came, [V·V]."""
    pairs = torch.tensor([r.tokens for r in rollouts])
    return torch.bincount(pairs[:, 0] * VOCABULARY + pairs[:, 1], minlength=VOCABULARY**2).double()


@torch.no_grad()
def pair_probabilities(model: Any, top_p: float) -> Tensor:
    """Exact, from forward passes of the same weights in float64, [V·V]."""
    model = deepcopy(model).double()
    first = torch.arange(VOCABULARY, device=model.device)[:, None]
    ids = torch.cat([torch.tensor([PROMPT], device=model.device).repeat(VOCABULARY, 1), first], 1)
    logits_V2V = model(input_ids=ids, use_cache=False).logits[:, -2:].double()
    first_V = truncate(logits_V2V[:1, 0], top_p).softmax(-1)[0]
    second_VV = truncate(logits_V2V[:, 1], top_p).softmax(-1)
    return (first_V[:, None] * second_VV).flatten().cpu()


def p_value(drawn_N: Tensor, probability_N: Tensor) -> float:
    """Pearson's chi-square test; a draw of what cannot be drawn has probability 0."""
    if bool((drawn_N[probability_N == 0] > 0).any()):
        return 0.0
    expected_N = probability_N * drawn_N.sum()
    common_N = expected_N >= FEWEST
    seen, wanted = drawn_N[common_N], expected_N[common_N]
    rare, expected = drawn_N[~common_N].sum(), expected_N[~common_N].sum()
    if expected > 0:
        seen, wanted = torch.cat([seen, rare[None]]), torch.cat([wanted, expected[None]])
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
