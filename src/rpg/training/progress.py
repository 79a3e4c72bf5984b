"""How far a run has got: the numbers that its checkpoints keep in ``state.json``, and summary.json made of them."""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..console import describe
from ..models.policy import Policy
from ..run.config import Config
from .health.lights import Lights
from .phases import gpu_peak_memory_gb, peak_memory_gb


@dataclass
class SamplingPosition:
    """Where the sampling of a run has got to."""

    problem: int = 0  # the next problem of the stream
    keep_rate: float = 1.0  # share of groups that were informative lately
    failures: dict[str, int] = field(default_factory=dict)  # of reward calls in the whole run, evaluations included
    number: int = 0  # of the next group
    pace: float = 1.0  # of rollout.ahead, how much may be: less where too much is dropped
    record: dict[str, list[float]] = field(default_factory=dict)  # of a problem or level: see samples/choice.py

    def count_failures(self, failures: Mapping[str, int]) -> None:
        for name, number in failures.items():
            self.failures[name] = self.failures.get(name, 0) + number


@dataclass
class Progress:
    """Each field is an entry of a checkpoint's ``state.json``, under the same name."""

    step: int = 0  # steps that are done
    tokens_total: int = 0
    starved: int = 0  # steps in a row without a group to learn from
    bad_steps: int = 0  # optimiser steps in a row that were skipped, as they were not finite
    cursor: SamplingPosition = field(default_factory=SamplingPosition)
    mismatch: float | None = None  # KL between engine and trainer, as measured last: see OldLogp
    entropy_bonus: float | None = None  # where a target moves it: what it has become
    entropy_low: bool = False  # whether the last optimiser step was at the target or below: else the bonus rests
    evals: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "mean" over all sets, "sets": {name: {"mean", "low", "high"}}}"""
    lights: Lights = field(default_factory=Lights)  # what the warning lights remember
    spent: float = 0.0  # seconds of steps, without evaluations and checkpoints
    started: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0  # of the run, before this process went on with it

    def __post_init__(self) -> None:
        self.start_clock()

    def start_clock(self) -> None:
        """From here on it counts: what sets a run up does not."""
        self._begin = time.perf_counter()

    def total_seconds(self) -> float:
        return self.seconds + time.perf_counter() - self._begin

    def state(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.total_seconds()}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Progress:
        values = {f.name: state[f.name] for f in fields(cls) if f.name in state}  # one of an older version has less
        parts = {"cursor": SamplingPosition(**state["cursor"]), "lights": Lights(**state.get("lights", {}))}
        return cls(**values | parts)


@contextlib.contextmanager
def read_from(folder: Path) -> Iterator[None]:
    """Within, what a checkpoint lacks or has in excess is one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} is of another version of rpg: its state.json cannot be read ({describe(error)}); "
            "resume with that version, or start a new run from its model/"
        ) from error


# ---- summary.json ----------------------------------------------------------------------------------------------------


def summarise(
    config: Config,
    folder: Path,
    task: str,
    sets: Iterable[str],
    policy: Policy,
    progress: Progress,
    status: str,
    message: str,
    stopped_by: str | None,
) -> dict[str, Any]:
    """``folder`` is the run's; ``sets`` are those that it is evaluated on; ``stopped_by``: a signal, or a budget."""
    summary: dict[str, Any] = {
        "name": folder.name,
        "folder": str(folder),
        "algorithm": config.algorithm,
        "model": config.model,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "task": task,
        "seed": config.seed,
        "device": str(policy.device),
        "steps": config.steps,
        "step": progress.step,
        "status": status,
        "message": message,
        "stopped_by": stopped_by,
        "started": progress.started,
        "seconds": progress.total_seconds(),
        "tokens_total": progress.tokens_total,
        "peak_memory_gb": peak_memory_gb(),
        "peak_gpu_memory_gb": gpu_peak_memory_gb(policy.device),
        "reward_failures": progress.cursor.failures,
        "lights": progress.lights.events,
        "eval": {},
        "versions": {
            "rpg": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    for name in sets:
        scores = [{"step": e["step"], **e["sets"][name]} for e in progress.evals if name in e["sets"]]
        if not scores:
            continue
        last, best = scores[-1], best_of(scores)
        summary["eval"][name] = {
            "metric": f"mean@{config.eval.k}",
            "first": scores[0]["mean"],
            "last": last["mean"],
            "last_step": last["step"],
            "last_low": last["low"],
            "last_high": last["high"],
            "best": best["mean"],
            "best_step": best["step"],
        }
    return summary


def best_of(evals: list[dict[str, Any]]) -> dict[str, Any]:
    """The best evaluation; of equals the latest."""
    return max(evals, key=lambda e: (e["mean"], e["step"]))


def over(config: Config, progress: Progress) -> tuple[str, str] | None:
    """The budget besides the steps that is used up, and what to say of it."""
    if config.minutes is not None and progress.spent >= 60 * config.minutes:
        return "minutes", f"its {config.minutes:g} minutes are over"
    if config.tokens is not None and progress.tokens_total >= config.tokens:
        return "tokens", f"its {config.tokens:,} tokens are sampled"
    return None


def starvation(steps: int, unequal: str, failed: str | None, dropped: bool = False) -> str:
    """Why a run without a signal ends; ``failed`` is what is wrong with the reward functions, if anything is."""
    if dropped:
        return (
            f"for {steps} steps there was nothing to learn from, and in the last one every group was dropped: the "
            "policy had left it too far. Try a lower offpolicy.min_ess or a larger max_kl, or less rollout.ahead, "
            "offpolicy.reuse or optim.lr"
        )
    why = failed or (
        "If all are solved the task is done; if none are, it is too hard for this model: try easier problems, more "
        "rollout.samples or a higher rollout.temperature"
    )
    return f"for {steps} steps no group had {unequal}, so there is nothing to learn. {why}"
