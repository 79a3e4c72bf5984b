"""What the page's script draws from: one JSON document, thinned where it would be large, and saying so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .charts import TRAINING_ACCURACY, Chart
from .labels import styles
from .metrics import Column, Row, finite
from .responses import group_of
from .runs import RunData
from .scores import Experiment

POINTS, FEWEST = 1000, 300  # of a curve; beyond, neighbouring steps are averaged. Many runs have fewer each
EVALS = 2000  # of a run on a page; of more, the highest and lowest of neighbours
SAMPLES = 600  # responses on a page
TEXT = 4000  # characters of a prompt or response; the middle of a longer one is left out
NONE = np.arange(0)
EVAL = re.compile(r"eval/(?P<task>.+)/(?P<metric>(mean@\d+)(_low|_high)?|pass@\d+|level\d+)")


def embed(value: Any) -> str:
    """JSON that may stand inside a script element, whatever its texts say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def short(value: float | None, digits: int = 5) -> float | int | None:
    """As few digits as a curve needs."""
    if value is None:
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def stride(runs: Sequence[RunData]) -> int:
    """Steps averaged into one point, the same for all runs, so that their points stand above each other."""
    points = max(FEWEST, min(POINTS, 4 * POINTS // max(len(runs), 1)))
    longest = max((len(run.rows) for run in runs), default=0)
    return 1 if longest <= POINTS else -(-longest // points)


def curves(run: RunData, charts: Sequence[Chart], width: int, ranges: bool) -> Row:
    """Columns over training steps, with the range of each mean if asked for, and the evaluations, never averaged."""
    rows = run.rows
    names = dict.fromkeys([*(name for c in charts for name in (c.whole, *c.series) if name), TRAINING_ACCURACY])
    written = {name: rows.columns[name] for name in names if name in rows.columns}
    trained = np.flatnonzero(np.any([~np.isnan(column) for column in written.values()], axis=0)) if written else NONE
    bins = rows.steps[trained] if width == 1 else (rows.steps[trained] - 1) // width
    starts = np.flatnonzero(np.diff(bins, prepend=bins[:1] - 1))  # of each bin
    last = trained[np.append(starts[1:], len(trained)) - 1] if len(trained) else trained
    x = {axis: _short(values[last], 9) for axis, values in rows.axes.items()}
    columns: dict[str, list[Any]] = {}
    lowest: dict[str, list[Any]] = {}
    highest: dict[str, list[Any]] = {}
    lost: dict[str, int] = {}
    for name, column in written.items():
        values = column[trained]
        there = np.isfinite(values)
        if there.any():
            counts = np.add.reduceat(there, starts, dtype=np.int64)
            with np.errstate(invalid="ignore", over="ignore"):
                columns[name] = _short(np.add.reduceat(np.where(there, values, 0.0), starts) / counts)
            if width > 1 and ranges:
                lowest[name] = _short(np.minimum.reduceat(np.where(there, values, np.inf), starts), 3)
                highest[name] = _short(np.maximum.reduceat(np.where(there, values, -np.inf), starts), 3)
        if bad := int(np.isinf(column).sum()):
            lost[name] = bad
    return {
        "x": x,
        "columns": columns,
        "lowest": lowest,
        "highest": highest,
        "lost": lost,
        "evals": _evals(run),
        **_lit(run),
    }


def _lit(run: RunData) -> dict[str, list[Row]]:
    """Where warning lights went on, on each axis."""
    steps = {int(event["step"]) for event in run.lights}
    places = [place for place, step in enumerate(run.rows.steps.tolist()) if step in steps]
    return {"lights": [{axis: short(float(x[place]), 9) for axis, x in run.rows.axes.items()} for place in places]}


def _short(values: Column, digits: int = 5) -> list[float | int | None]:
    return [short(finite(value), digits) for value in values.tolist()]


def _evals(run: RunData) -> dict[str, Row]:
    """By task: {"x": {"step": […], …}, "columns": {"mean@8": […], "mean@8_low": […], …}}"""
    rows = run.rows
    tasks: dict[str, dict[str, Column]] = {}
    for name, column in rows.columns.items():
        if match := EVAL.fullmatch(name):
            tasks.setdefault(match["task"], {})[match["metric"]] = column
    made = {}
    for task, columns in tasks.items():
        places = np.flatnonzero(np.any([~np.isnan(column) for column in columns.values()], axis=0))
        places = places[extremes(next(iter(columns.values()))[places], EVALS)]
        made[task] = {
            "x": {axis: _short(values[places], 9) for axis, values in rows.axes.items()},
            "columns": {metric: _short(column[places]) for metric, column in columns.items()},
        }
    return made


def extremes(values: Column, most: int) -> NDArray[np.int64]:
    """Which of these to draw, where they are more than so many: of neighbours the lowest and the highest; the ends."""
    if len(values) <= most:
        return np.arange(len(values))
    width = -(-len(values) // (most // 2 - 1))
    kept = {0, len(values) - 1}
    for start in range(0, len(values), width):
        part = values[start : start + width]
        part = np.where(np.isfinite(part), part, np.nan)
        if not np.isnan(part).all():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))


# ---- sampled responses -----------------------------------------------------------------------------------------------


def gather(run: RunData) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for sample in run.samples:
        groups.setdefault(group_of(sample), []).append(sample)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def evenly(groups: list[list[Row]], responses: int) -> list[list[Row]]:
    """Whole groups, evenly from first to last, that have about as many responses."""
    total = sum(map(len, groups))
    if total <= responses:
        return groups
    keep = max(1, len(groups) * responses // total)
    places = {round(i * (len(groups) - 1) / max(keep - 1, 1)) for i in range(keep)}
    return [group for i, group in enumerate(groups) if i in places]


def described(group: list[Row], run: int) -> Row:
    first, level = group[0], group[0].get("level")
    return {
        "run": run,
        "step": int(first["step"]),
        "split": str(first.get("split", "train")),
        "group": str(first.get("group", 0)),
        "prompt": _middle(_text(first, "prompt")),
        "answer": _middle(_text(first, "answer")),
        "level": level if isinstance(level, str) else short(finite(level)),
        "responses": [
            {
                "text": _middle(_text(sample, "response")),
                **{name: short(finite(sample.get(name))) for name in ("reward", "advantage", "length")},
                "finished": bool(sample.get("finished", True)),
            }
            for sample in group
        ],
    }


def sampled(runs: Sequence[RunData]) -> tuple[list[Row], int, int]:
    """Groups to show, how many responses these are, and how many there were."""
    share = SAMPLES // max(1, sum(bool(run.samples) for run in runs))
    shown = [described(group, index) for index, run in enumerate(runs) for group in evenly(gather(run), share)]
    logged = sum(max(run.responses, len(run.samples)) for run in runs)
    return shown, sum(len(group["responses"]) for group in shown), logged


def _text(sample: Row, name: str) -> str:
    value = sample.get(name)
    return "" if value is None else str(value)


def _middle(text: str) -> str:
    if len(text) <= TEXT:
        return text
    half = TEXT // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out of this page …]\n\n{text[-half:]}"


def payload(
    runs: Sequence[RunData],
    labels: Sequence[str],
    experiments: Sequence[Experiment],
    charts: Sequence[Chart],
    shown: list[Row],
) -> Row:
    place = {id(run): i for i, run in enumerate(runs)}
    width = stride(runs)
    return {
        "stride": width,
        "runs": [
            {"name": label, "seed": str(run.fact("seed", "–")), **curves(run, charts, width, len(runs) == 1)}
            for run, label in zip(runs, labels, strict=True)
        ],
        "groups": [
            {
                "label": e.label,
                "runs": [place[id(run)] for run in e.counted],
                "swatch": style.swatch,
                "dash": style.dash,
            }
            for e, style in zip(experiments, styles(experiments), strict=True)
        ],
        "charts": [
            {name: getattr(c, name) for name in ("key", "title", "series", "unit", "stacked", "whole", "quiet")}
            for c in charts
        ],
        "training": TRAINING_ACCURACY,
        "samples": shown,
    }
