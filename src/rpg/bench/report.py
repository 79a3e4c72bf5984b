"""What a benchmark found: the numbers as a dictionary, and the table."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import mean, median
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..console import printed
from .step import WARMUP, Took, Work
from .versus import Result

LABELS = {"rpg": f"rpg {__version__}", "trl": "TRL GRPOTrainer"}
PARTS = ("seconds", "rollout", "reward", "train")


@dataclass(frozen=True)
class Report:
    work: Work
    results: dict[str, Result]
    notes: list[str]  # why a side is missing

    @property
    def ratios(self) -> list[float]:
        """TRL's seconds over rpg's, of steps that stood beside each other."""
        pairs = zip(self.results["rpg"].took, self.results["trl"].took, strict=True)
        return [trl.seconds / rpg.seconds for rpg, trl in pairs]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"machine": machine(self.work), "work": asdict(self.work), "warmup": WARMUP}
        found["sides"] = {side: _side(result) for side, result in self.results.items()}
        if "trl" in self.results:
            rpg, trl = (found["sides"][side]["median"] for side in ("rpg", "trl"))
            low, middle, high = quartiles(self.ratios)
            found["speedup"] = {part: trl[part] / rpg[part] for part in PARTS}
            found["speedup_of_pairs"] = {"quartiles": [low, middle, high], "all": self.ratios}
        return found | {"notes": self.notes}


def _side(result: Result) -> dict[str, Any]:
    steps = result.took
    return {
        "median": {part: median(getattr(took, part) for took in steps) for part in PARTS},
        "tokens_per_s": median(took.tokens / took.seconds for took in steps),
        "mean_length": sum(took.tokens for took in steps) / sum(took.responses for took in steps),
        "mean_reward": mean(took.score for took in steps),
        "optimiser_steps": steps[0].optimiser_steps,
        "peak_memory_gb": result.peak_memory_gb,
        "steps": [asdict(took) | {"train": took.train} for took in steps],
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Of a single value: itself, three times."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)


def machine(work: Work) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name(work.device) if work.device.startswith("cuda") else _processor()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": work.threads,
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


# ---- the table -------------------------------------------------------------------------------------------------------

Cell = Callable[[list[Took], Result], str]


def _median(part: str, digits: int) -> Cell:
    return lambda steps, result: f"{median(getattr(took, part) for took in steps):.{digits}f}"


COLUMNS: dict[str, tuple[str, Cell]] = {
    "step": ("seconds, the whole of it: median", _median("seconds", 3)),
    "rollout": ("sampling the responses", _median("rollout", 3)),
    "reward": ("scoring them", _median("reward", 4)),
    "train": ("the rest: log-probabilities, advantages, loss, gradient, optimiser, metrics", _median("train", 3)),
    "tokens/s": (
        "response tokens by the seconds of the whole step",
        lambda steps, _: f"{median(took.tokens / took.seconds for took in steps):,.0f}",
    ),
    "length": ("mean tokens of a response", lambda steps, _: f"{mean(took.length for took in steps):.1f}"),
    "reward mean": ("the same policy on the same prompts", lambda s, _: f"{mean(took.score for took in s):.3f}"),
    "peak GB": ("of the side's own process, libraries included", lambda _, result: f"{result.peak_memory_gb:.2f}"),
}


def show(report: Report) -> None:
    about, work = machine(report.work), report.work
    versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items() if found)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("", *COLUMNS):
        justify: Literal["left", "right"] = "right" if title else "left"
        table.add_column(title.replace(" ", "\n"), justify=justify, no_wrap=True)
    for side, result in report.results.items():
        table.add_row(LABELS[side], *(cell(result.took, result) for _, cell in COLUMNS.values()))
    with printed() as to:
        to.print(Text(headline(report), style="bold"))
        to.print(f"{about['device']}, {about['cores']} cores, {work.threads} threads; {versions}; {about['date']}")
        to.print(table)
        for title, (meaning, _) in COLUMNS.items():
            to.print(Text(f"{title:<11}  {meaning}", style="dim"))
        to.print(Text(footnote(report), style="dim"))
        for note in report.notes:
            to.print(Text(note, style="yellow"))


def headline(report: Report) -> str:
    if "trl" not in report.results:
        seconds = median(took.seconds for took in report.results["rpg"].took)
        return f"rpg: {seconds:.3f} s a step."
    rpg, trl = (median(took.seconds for took in report.results[side].took) for side in ("rpg", "trl"))
    low, middle, high = quartiles(report.ratios)
    speed = f"{middle:.2f} times faster" if middle >= 1 else f"{1 / middle:.2f} times slower"
    return (
        f"A step of rpg is {speed} than TRL's. TRL/rpg: median of {len(report.ratios)} pairs {middle:.2f}, "
        f"middle half {low:.2f} to {high:.2f}; ratio of medians {trl / rpg:.2f}."
    )


def footnote(report: Report) -> str:
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
            "rpg writes its metrics. TRL computes the log-probabilities of the sampling policy anew before training; "
            "rpg keeps those that the responses were drawn with."
        )
    return text
