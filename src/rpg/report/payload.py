"""What the page's script draws from: one JSON document, thinned where it would be large, and saying so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .charts import TRAINING_ACCURACY, Chart
from .runs import Row, RunData, elapsed, finite
from .scores import Experiment

POINTS, FEWEST = 1000, 300  # of a curve; beyond, neighbouring steps are averaged. Many runs have fewer each
SAMPLES = 600  # responses on a page
TEXT = 4000  # characters of a prompt or response; the middle of a longer one is left out
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
    """Columns over training steps, with the range of each mean if asked for, and the evaluations, never thinned."""
    names = [name for c in charts for name in (c.whole, *c.series) if name] + [TRAINING_ACCURACY]
    tokens, seconds, axes = 0.0, 0.0, []
    for row in run.rows:
        total = finite(row.get("tokens_total"))
        tokens = tokens + (finite(row.get("tokens")) or 0.0) if total is None else total
        seconds += elapsed(row)
        axes.append((row["step"], tokens, seconds))
    bins: dict[int, list[int]] = {}
    for i, row in enumerate(run.rows):
        if any(name in row for name in names):
            bins.setdefault(row["step"] if width == 1 else (row["step"] - 1) // width, []).append(i)
    x = {
        axis: [short(axes[rows[-1]][k], 9) for rows in bins.values()]
        for k, axis in enumerate(("step", "tokens", "time"))
    }
    columns: dict[str, list[Any]] = {}
    lowest: dict[str, list[Any]] = {}
    highest: dict[str, list[Any]] = {}
    lost: dict[str, int] = {}
    for name in names:
        values = [finite(row.get(name)) for row in run.rows]
        binned = [[v for i in rows if (v := values[i]) is not None] for rows in bins.values()]
        if any(binned):
            columns[name] = [short(sum(b) / len(b)) if b else None for b in binned]
            if width > 1 and ranges:
                lowest[name] = [short(min(b), 3) if b else None for b in binned]
                highest[name] = [short(max(b), 3) if b else None for b in binned]
        bad = sum(v is None and name in row for v, row in zip(values, run.rows, strict=True))
        if bad:
            lost[name] = bad
    return {"x": x, "columns": columns, "lowest": lowest, "highest": highest, "lost": lost, "evals": _evals(run, axes)}


def _evals(run: RunData, axes: Sequence[tuple[float, ...]]) -> dict[str, Row]:
    """By task: {"x": {"step": […], …}, "columns": {"mean@8": […], "mean@8_low": […], …}}"""
    places: dict[str, dict[int, Row]] = {}
    for i, row in enumerate(run.rows):
        for name, value in row.items():
            if name.startswith("eval/") and (match := EVAL.fullmatch(name)):
                places.setdefault(match["task"], {}).setdefault(i, {})[match["metric"]] = short(finite(value))
    return {
        task: {
            "x": {axis: [short(axes[i][k], 9) for i in at] for k, axis in enumerate(("step", "tokens", "time"))},
            "columns": {
                name: [values.get(name) for values in at.values()]
                for name in dict.fromkeys(n for f in at.values() for n in f)
            },
        }
        for task, at in places.items()
    }


# ---- sampled responses -----------------------------------------------------------------------------------------------


def gather(run: RunData) -> list[list[Row]]:
    """Responses to one prompt at one step belong together."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for sample in run.samples:
        key = (
            int(sample["step"]),
            str(sample.get("split", "train")),
            str(sample.get("group", 0)),
            _text(sample, "prompt"),
        )
        groups.setdefault(key, []).append(sample)
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
    return shown, sum(len(group["responses"]) for group in shown), sum(len(run.samples) for run in runs)


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
        "groups": [{"label": e.label, "runs": [place[id(run)] for run in e.runs]} for e in experiments],
        "charts": [
            {name: getattr(c, name) for name in ("key", "title", "series", "unit", "stacked", "whole", "quiet")}
            for c in charts
        ],
        "training": TRAINING_ACCURACY,
        "samples": shown,
    }
