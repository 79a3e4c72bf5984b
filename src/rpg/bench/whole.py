"""The whole RL step (rollout, reward, log-probabilities, gradient, optimiser) beside TRL's: section and report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.text import Text

from .. import __version__
from ..console import install, printed
from ..costs.operations import Ceilings, Operations
from .step import WARMUP, SideResult, StepWork, compare
from .synthetic import Sizes, make_model, make_tokenizer, random_prompts, vocabulary
from .table import BenchRow, Quantity, Section, Target, about_machine, cells, ratio, terminal_table
from .timing import Numbers, SideFailed, Watch, machine, recorder

FASTER = 4.0  # than TRL
LIMIT = 150.0  # seconds for a start or a step of a side
PARTS = ("seconds", "rollout", "reward", "train")
COLUMNS = (
    Quantity("step s", "the whole of it", ".3f"),
    Quantity("rollout s", "sampling the responses", ".3f"),
    Quantity("reward s", "scoring them", ".4f"),
    Quantity("train s", "the rest: log-probabilities, advantages, loss, gradient, optimiser, metrics", ".3f"),
    Quantity("tokens/s", "response tokens by the seconds of the whole step", ",.0f"),
    Quantity("peak GiB", "of the side's own process: device memory, on a CPU resident", ".2f"),
    Quantity("floor s", "prompts, decoding steps and training, counted, over the measured rates", ".3f"),
    Quantity("× floor", "seconds over that", ".2f"),
)
REPORT_COLUMNS = (
    Quantity("step", "seconds, the whole of it: median", ".3f"),
    *(replace(column, key=column.key.removesuffix(" s")) for column in COLUMNS[1:5]),
    Quantity("length", "mean tokens of a response", ".1f"),
    Quantity("reward mean", "the same policy on the same prompts", ".3f"),
    Quantity("peak GB", "of the side's own process, libraries included", ".2f"),
)


def summarise(result: SideResult) -> dict[str, Any]:
    steps = result.steps
    return {
        "median": {part: median(getattr(times, part) for times in steps) for part in PARTS},
        "tokens_per_s": median(times.tokens / times.seconds for times in steps),
        "mean_length": sum(times.tokens for times in steps) / sum(times.responses for times in steps),
        "mean_reward": mean(times.score for times in steps),
        "optimiser_steps": steps[0].optimiser_steps,
        "peak_memory_gb": result.peak_memory_gb,
        "steps": [asdict(times) | {"train": times.train} for times in steps],
    }


# ---- a section: the step on made-up prompts --------------------------------------------------------------------------


def step_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    section = Section("step", "The whole RL step", COLUMNS, _about(sizes))
    record = recorder(section, sizes, watch)
    rpg, trl = f"rpg {sizes.model}", f"TRL GRPOTrainer {sizes.model}"

    def numbers(result: SideResult) -> Numbers:
        side = summarise(result)
        seconds = side["median"]["seconds"]
        return {
            "step s": seconds,
            **{f"{part} s": side["median"][part] for part in PARTS[1:]},
            "tokens/s": side["tokens_per_s"],
            "peak GiB": side["peak_memory_gb"],
            "floor s": floor,
            "× floor": seconds / floor,
        }

    with TemporaryDirectory(prefix="rpg-bench-") as name:
        watch("step: model")
        work, floor = _prepare(sizes, ceilings, Path(name))
        record(rpg, lambda: numbers(compare(work, ("rpg",), watch)["rpg"]))
        record(trl, lambda: numbers(_trl(work, watch)))
    if sizes.device != "cpu":
        faster = ratio(section.value(trl, "step s"), section.value(rpg, "step s"))
        section.require(rpg, Target(f"≥ {FASTER:.0f}× TRL", faster, least=FASTER))
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


def _prepare(sizes: Sizes, ceilings: Ceilings, folder: Path) -> tuple[StepWork, float]:
    """Model and prompts as files, which both sides load; and the floor of a step."""
    model = make_model(sizes.model, sizes)
    model.save_pretrained(folder / "model")
    make_tokenizer(vocabulary(model)).save_pretrained(folder / "model")
    count = 2 * (WARMUP + _repeats(sizes)) * sizes.groups + 8  # some are held out
    # numbers of one digit: a token each, also for the tokenizer that transformers takes for the kind of model instead
    prompts = random_prompts(count, sizes.prompt_tokens, 10)
    lines = (json.dumps({"prompt": " ".join(map(str, ids)), "answer": "1"}) for ids in prompts)
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    work = StepWork(
        prompts=sizes.groups,
        samples=sizes.samples,
        max_new_tokens=sizes.new_tokens,
        minibatches=1,
        repeats=_repeats(sizes),
        threads=torch.get_num_threads(),
        device=sizes.device,
        model=str(folder / "model"),
        dtype="float32" if sizes.device == "cpu" else "bfloat16",
        task=str(folder / "prompts.jsonl"),
        reward="rpg.bench.synthetic:last_digit_odd",
        max_prompt_tokens=sizes.prompt_tokens,
        slots=sizes.slots,
        micro=min(sizes.micro, sizes.groups * sizes.samples),
        checkpointing=True,
        limit=LIMIT,
    )
    return work, _floor(Operations.of(model, sizes.element), sizes, ceilings)


def _floor(operations: Operations, sizes: Sizes, ceilings: Ceilings) -> float:
    rows, new = sizes.groups * sizes.samples, sizes.new_tokens
    step = operations.decode_seconds(ceilings, rows, sizes.prompt_tokens, new / 2, sizes.groups)
    prompts = ceilings.seconds(operations.prefill_flops(sizes.groups, sizes.prompt_tokens))
    trained = operations.train_flops(sizes.groups, sizes.samples, sizes.prompt_tokens, new, shared=True)
    return prompts + (new - 1) * step + ceilings.seconds(trained)  # the first token comes with the prompt


def _trl(work: StepWork, watch: Watch) -> SideResult:
    """As fast as the device's memory lets it: all activations kept, computed again, or with half as many responses."""
    if find_spec("trl") is None:
        raise SideFailed(f"TRL is not installed: {install('rpg-rl[audit]')}")
    for attempt in (replace(work, checkpointing=False), work):
        try:
            return compare(attempt, ("trl",), watch)["trl"]
        except SideFailed as error:
            if "OutOfMemory" not in str(error):
                raise
    return compare(replace(work, micro=max(1, (work.micro or 2) // 2)), ("trl",), watch)["trl"]


# ---- a report: the step of the built-in run --------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    work: StepWork
    results: dict[str, SideResult]
    notes: list[str]  # why a side is missing

    @property
    def ratios(self) -> list[float]:
        """TRL's seconds over rpg's, of steps that stood beside each other."""
        pairs = zip(self.results["rpg"].steps, self.results["trl"].steps, strict=True)
        return [trl.seconds / rpg.seconds for rpg, trl in pairs]

    def as_dict(self) -> dict[str, Any]:
        sides = {side: summarise(result) for side, result in self.results.items()}
        speedup: dict[str, Any] = {}
        if "trl" in sides:
            rpg, trl = (sides[side]["median"] for side in ("rpg", "trl"))
            speedup["speedup"] = {part: trl[part] / rpg[part] for part in PARTS}
            speedup["speedup_of_pairs"] = {"quartiles": list(quartiles(self.ratios)), "all": self.ratios}
        about = {"machine": machine(self.work.device, self.work.threads), "work": asdict(self.work), "warmup": WARMUP}
        return {**about, "sides": sides, **speedup, "notes": self.notes}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    shares = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(shares).tolist()
    return low, middle, high


def show(report: StepReport) -> None:
    labels, section = {"rpg": f"rpg {__version__}", "trl": "TRL GRPOTrainer"}, Section("step", "", REPORT_COLUMNS)
    for name, result in report.results.items():
        side = summarise(result)
        numbers = [*side["median"].values(), *(side[key] for key in ("tokens_per_s", "mean_length", "mean_reward"))]
        keys = (column.key for column in REPORT_COLUMNS)
        values = dict(zip(keys, [*numbers, side["peak_memory_gb"]], strict=True))
        section.rows.append(BenchRow(labels[name], values))
    about = machine(report.work.device, report.work.threads)
    with printed() as to:
        to.print(Text(headline(report), style="bold"))
        to.print(about_machine(about, threads=f", {report.work.threads} threads"))
        to.print(terminal_table(*cells(section)))
        for column in REPORT_COLUMNS:
            to.print(Text(f"{column.key:<11}  {column.meaning}", style="dim"))
        to.print(Text(footnote(report), style="dim"))
        for note in report.notes:
            to.print(Text(note, style="yellow"))


def headline(report: StepReport) -> str:
    seconds = {side: median(times.seconds for times in result.steps) for side, result in report.results.items()}
    if "trl" not in seconds:
        return f"rpg: {seconds['rpg']:.3f} s a step."
    low, middle, high = quartiles(report.ratios)
    speed = f"{middle:.2f} times faster" if middle >= 1 else f"{1 / middle:.2f} times slower"
    return (
        f"A step of rpg is {speed} than TRL's. TRL/rpg: median of {len(report.ratios)} pairs {middle:.2f}, "
        f"middle half {low:.2f} to {high:.2f}; ratio of medians {seconds['trl'] / seconds['rpg']:.2f}."
    )


def footnote(report: StepReport) -> str:
    work = report.work
    text = (
        f"A step is {work.prompts} arithmetic prompts × {work.samples} responses of at most {work.max_new_tokens} "
        "tokens at temperature 1 from the built-in model in float32, scored by the task, then "
        f"{work.minibatches} AdamW steps on {work.responses // work.minibatches} responses each; learning rate "
        f"{work.lr:g}, so that lengths stay. Median of {work.repeats} after {WARMUP} to warm up."
    )
    if "trl" in report.results:
        text += (
            " The two take turns in processes of their own; one works at a time. TRL: steps_per_generation and "
            "gradient_accumulation_steps set for the same number of optimiser steps, num_iterations=1, beta=0, no "
            "gradient checkpointing, transformers' generate (its continuous batching is slower on a CPU), logging off; "
            "rpg writes its metrics. TRL computes the log-probabilities of the sampling policy again before training; "
            "rpg keeps those that the responses were drawn with."
        )
    return text
