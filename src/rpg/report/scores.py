"""The numbers of the tables: each run's first, last and best evaluation, and their means over seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .metrics import Metrics, Row, finite
from .runs import RunData

METRIC = re.compile(r"eval/(?P<task>.+)/(?P<metric>mean@\d+)")
SAME_ANYWAY = re.compile(
    r"(seed|output|device|name)$|(log|checkpoint)\."
)  # settings that do not make another experiment


@dataclass(frozen=True)
class Score:
    """One run on one task."""

    metric: str  # mean@8
    first: float
    last: float
    best: float
    first_step: int
    last_step: int
    best_step: int
    low: float | None = None  # 95 % interval of last
    high: float | None = None


def scores(run: RunData) -> dict[str, Score]:
    """By task. From the rows, the evaluation before training included; from the summary where rows have none."""
    latest: dict[str, tuple[int, str]] = {}  # by task: the last place that has a score, and which: one k, the latest
    for name in run.rows.columns:
        if (match := METRIC.fullmatch(name)) and len(places := np.flatnonzero(~np.isnan(run.rows.column(name)))):
            found = (int(places[-1]), match["metric"])
            latest[match["task"]] = max(latest.get(match["task"], found), found, key=lambda pair: pair[0])
    by_task = {task: _score(run.rows, task, metric) for task, (_, metric) in latest.items()}
    summary = run.summary.get("eval")
    for task, values in summary.items() if isinstance(summary, dict) else ():
        if task not in by_task and isinstance(values, dict) and finite(values.get("last")) is not None:
            by_task[task] = _of_summary(run, values)
    return by_task


def _score(rows: Metrics, task: str, metric: str) -> Score:
    values = rows.column(f"eval/{task}/{metric}")
    places = np.flatnonzero(~np.isnan(values))
    first, last, best = int(places[0]), int(places[-1]), int(np.nanargmax(values))  # the earliest, if several
    low, high = (finite(float(rows.column(f"eval/{task}/{metric}_{end}")[last])) for end in ("low", "high"))
    steps = int(rows.steps[first]), int(rows.steps[last]), int(rows.steps[best])
    return Score(metric, float(values[first]), float(values[last]), float(values[best]), *steps, low, high)


def _of_summary(run: RunData, values: dict[str, Any]) -> Score:
    def number(name: str, default: float) -> float:
        value = finite(values.get(name))
        return default if value is None else value

    last = number("last", math.nan)
    return Score(
        str(values.get("metric", "mean")),
        number("first", last),
        last,
        number("best", last),
        0,
        int(number("last_step", run.step)),
        int(number("best_step", run.step)),
        finite(values.get("last_low")),
        finite(values.get("last_high")),
    )


# ---- several runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """Runs that are alike but for the seed."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def by_seed(self) -> list[list[RunData]]:
        """Runs of one seed are one: the latest is last, and counts. Of one that was not evaluated nothing counts."""
        seeds: dict[str, list[RunData]] = {}
        for i, run in enumerate(self.runs):
            seed = run.fact("seed")
            seeds.setdefault(f"run {i}" if seed is None else str(seed), []).append(run)
        return [sorted(same, key=lambda run: (bool(scores(run)), _started(run))) for same in seeds.values()]

    @property
    def counted(self) -> tuple[RunData, ...]:
        return tuple(same[-1] for same in self.by_seed)


@dataclass(frozen=True)
class Average:
    mean: float
    deviation: float | None  # of the sample; None: one run
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Average:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _started(run: RunData) -> str:
    return str(run.summary.get("started") or "")


def flat(config: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"optim": {"lr": 1}} -> ("optim.lr", 1)"""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings(run: RunData) -> dict[str, str]:
    read = {key: str(value) for key, value in flat(run.config)}
    return read or {key: str(run.summary[key]) for key in ("algorithm", "model", "task", "steps") if key in run.summary}


def differences(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs; – where a run has none. Seed and output are expected to differ."""
    all_settings = [settings(run) for run in runs]
    keys = dict.fromkeys(key for each in all_settings for key in each if key not in ("seed", "output", "name"))
    table = {key: [each.get(key, "–") for each in all_settings] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def group_by_experiment(runs: Sequence[RunData]) -> list[Experiment]:
    """By algorithm, and where one algorithm was run with several settings, by these too: they are no seeds."""
    experiments: list[Experiment] = []
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        same = [run for run in runs if run.algorithm == algorithm]
        differ = {key: values for key, values in differences(same).items() if not SAME_ANYWAY.match(key)}
        members: dict[tuple[str, ...], list[RunData]] = {}
        for i, run in enumerate(same):
            members.setdefault(tuple(f"{key} {values[i]}" for key, values in differ.items()), []).append(run)
        experiments += [Experiment(_label(algorithm, what), tuple(those)) for what, those in members.items()]
    labels = [e.label for e in experiments]
    return [
        e if labels.count(e.label) == 1 else Experiment(f"{e.label} ({e.runs[0].name})", e.runs) for e in experiments
    ]


def _label(algorithm: str, what: Sequence[str]) -> str:
    more = (f"{len(what) - 3} more",) if len(what) > 3 else ()
    return ", ".join((algorithm, *what[:3], *more))


def averages(experiment: Experiment, task: str) -> tuple[Average, Average] | None:
    """Last and Best on a task: each seed's own, averaged over those that were evaluated on it."""
    each = [score for run in experiment.counted if (score := scores(run).get(task))]
    return (Average.of([s.last for s in each]), Average.of([s.best for s in each])) if each else None
