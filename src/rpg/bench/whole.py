"""The whole RL step: rollout, reward, log-probabilities, gradient, optimiser; beside TRL's trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ..costs.operations import Ceilings, Counts
from .rows import Column, Row, Section, Target, ratio
from .shapes import make_model, random_prompts, save_model
from .sizes import Sizes
from .step import WARMUP, Work
from .timing import fresh, guarded
from .versus import Result, SideFailed, compare

FASTER = 4.0  # than TRL
LIMIT = 150.0  # seconds for a start or a step of a side
COLUMNS = (
    Column("step s", "the whole of it", ".3f"),
    Column("rollout s", "sampling the responses", ".3f"),
    Column("reward s", "scoring them", ".4f"),
    Column("train s", "the rest: log-probabilities, advantages, loss, gradient, optimiser, metrics", ".3f"),
    Column("tokens/s", "response tokens by the seconds of the whole step", ",.0f"),
    Column("peak GiB", "of the side's own process: device memory, on a CPU resident", ".2f"),
    Column("floor s", "prompts, decoding steps and training, counted, over the measured rates", ".3f"),
    Column("× floor", "seconds over that", ".2f"),
)


def step_section(sizes: Sizes, ceilings: Ceilings, watch: Callable[[str], None]) -> Section:
    section = Section("step", "The whole RL step", COLUMNS, _about(sizes))
    with TemporaryDirectory(prefix="rpg-bench-") as name:
        watch("step: model")
        work, floor = _prepare(sizes, ceilings, Path(name))
        fresh(sizes.device)
        rpg = f"rpg {sizes.model}"
        section.rows.append(guarded(rpg, sizes.device, lambda: _row(rpg, compare(work, ("rpg",), watch)["rpg"], floor)))
        trl = f"TRL GRPOTrainer {sizes.model}"
        if find_spec("trl") is None:
            section.rows.append(Row(trl, error="TRL is not installed: pip install 'rpg-rl[audit]'"))
        else:
            section.rows.append(guarded(trl, sizes.device, lambda: _row(trl, _trl(work, watch), floor)))
    if sizes.device != "cpu":
        faster = ratio(section.value(trl, "step s"), section.value(rpg, "step s"))
        target = Target(f"≥ {FASTER:.0f}× TRL", faster, least=FASTER)
        section.rows[0] = replace(section.rows[0], targets=(target,))
    return section


def _about(sizes: Sizes) -> str:
    return (
        f"{sizes.groups} prompts of {sizes.prompt_tokens} tokens × {sizes.samples} responses of {sizes.new_tokens}, "
        f"temperature 1, {sizes.dtype}, scored by the parity of their last word, then one AdamW step on all of them; "
        "each side in a process of its own. rpg: Trainer.step of rpg train. TRL: its own generation with transformers, "
        f"beta 0, default loss, {sizes.micro} responses in a pass (where that does not fit, with gradient "
        f"checkpointing, its default, or half of them), no logging; its weights and moments are {sizes.dtype}, where "
        f"rpg keeps float32 ones. Median of {_repeats(sizes)} after {WARMUP} to warm up."
    )


def _repeats(sizes: Sizes) -> int:
    return min(2, sizes.repeats)


def _prepare(sizes: Sizes, ceilings: Ceilings, folder: Path) -> tuple[Work, float]:
    """Model and prompts as files, which both sides load; and the floor of a step."""
    save_model(sizes, folder / "model")
    count = 2 * (WARMUP + _repeats(sizes)) * sizes.groups + 8  # some are held out
    # words of one digit: a token each, also for the tokenizer that transformers takes for the kind of model instead
    prompts = random_prompts(count, sizes.prompt_tokens, 10)
    lines = (json.dumps({"prompt": " ".join(map(str, ids)), "answer": "1"}) for ids in prompts)
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    work = Work(
        prompts=sizes.groups,
        samples=sizes.samples,
        max_new_tokens=sizes.new_tokens,
        minibatches=1,
        repeats=_repeats(sizes),
        threads=_threads(),
        device=sizes.device,
        model=str(folder / "model"),
        dtype="float32" if sizes.device == "cpu" else "bfloat16",
        task=str(folder / "prompts.jsonl"),
        reward="rpg.bench.words:odd_end",
        max_prompt_tokens=sizes.prompt_tokens,
        slots=sizes.slots,
        micro=min(sizes.micro, sizes.groups * sizes.samples),
        checkpointing=True,
        limit=LIMIT,
    )
    return work, _floor(sizes, ceilings)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _floor(sizes: Sizes, ceilings: Ceilings) -> float:
    counts = Counts.of(make_model(sizes.model, sizes), sizes.element)
    rows, new = sizes.groups * sizes.samples, sizes.new_tokens
    step = counts.decode_seconds(ceilings, rows, sizes.prompt_tokens, new / 2, sizes.groups)
    prompts = ceilings.seconds(counts.prefill_flops(sizes.groups, sizes.prompt_tokens))
    trained = counts.train_flops(sizes.groups, sizes.samples, sizes.prompt_tokens, new, shared=True)
    return prompts + (new - 1) * step + ceilings.seconds(trained)  # the first token comes with the prompt


def _trl(work: Work, watch: Callable[[str], None]) -> Result:
    """As fast as the device's memory lets it: all activations kept, computed anew, or with half as many responses."""
    half = max(1, (work.micro or 2) // 2)
    tries = [replace(work, checkpointing=False), work, replace(work, micro=half)]
    for number, attempt in enumerate(tries, 1):
        try:
            return compare(attempt, ("trl",), watch)["trl"]
        except SideFailed as error:
            if "OutOfMemory" not in str(error) or number == len(tries):
                raise
    raise AssertionError


def _row(name: str, result: Result, floor: float) -> Row:
    def middle(part: str) -> float:
        return float(median(getattr(took, part) for took in result.took))

    seconds = middle("seconds")
    found = {f"{part} s": middle(part) for part in ("rollout", "reward", "train")}
    return Row(
        name,
        {
            "step s": seconds,
            **found,
            "tokens/s": median(took.tokens / took.seconds for took in result.took),
            "peak GiB": result.peak_memory_gb,
            "floor s": floor,
            "× floor": seconds / floor,
        },
    )
