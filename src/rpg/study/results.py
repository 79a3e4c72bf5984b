"""What a study keeps: results.jsonl, a line for the study and one for each run, small enough to commit.

The line of a run has its evaluations, of the first and the last how many responses to each problem were right, and a
few curves in four digits. The page and the verdict are made of this file alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..run.folder import read_rows
from ..run.logs import write_whole
from ..run.rows import EVAL
from ..run.settings import flat
from .design import TUNING_SEED, PlannedRun, Study

FILE = "results.jsonl"
CURVES = (
    "reward/mean",
    "reward/solved",
    "entropy",
    "length/mean",
    "length/truncated",
    "kl/old",
    "clip/low",
    "clip/high",
    "ess",
    "grad_norm",
)
POINTS = 60  # of a curve: of longer runs every second, third … step
Row = dict[str, Any]


# ---- a run -----------------------------------------------------------------------------------------------------------


def row_of(run: PlannedRun, folder: Path, status: str, message: str) -> Row:
    """Of a run that has ended, however it did."""
    rows = list(read_rows(folder / "metrics.jsonl", []))
    summary = read_summary(folder)
    trained = [row for row in rows if "tokens_total" in row]
    evaluated = [row for row in rows if _means(row)]
    made: Row = {
        "run": run.id,
        "part": run.part,
        "arm": run.arm.name,
        "seed": run.seed,
        "tried": run.tried,
        "digest": run.digest,
        "status": status,
        "message": message,
        "step": trained[-1]["step"] if trained else 0,
        "tokens": trained[-1]["tokens_total"] if trained else 0,
        "seconds": _short(_trained_seconds(rows)[-1]) if rows else 0.0,
        "wall": _short(summary.get("seconds")),
        "k": run.config.eval.k,
        "evals": _evals(rows),
        "first": _solved(evaluated[0]) if evaluated else {},
        "last": _solved(evaluated[-1]) if evaluated else {},
        "curves": _curves(trained),
    }
    return made


def read_summary(folder: Path) -> Row:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _means(row: Mapping[str, Any]) -> dict[str, float]:
    """By test set."""
    found = ((EVAL.fullmatch(name), x) for name, x in row.items())
    return {match[1]: x for match, x in found if match and isinstance(x, int | float)}


def _solved(row: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(row.get(f"eval/{name}/solved", [])) for name in _means(row)}


def _trained_seconds(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of steps alone, without evaluations and checkpoints, until each row."""
    total, seconds = 0.0, []
    for row in rows:
        parts = (row.get(f"time/{part}") or 0.0 for part in ("eval", "checkpoint"))
        total += max(0.0, (row.get("time/step") or 0.0) - sum(parts))
        seconds.append(total)
    return seconds


def _evals(rows: list[Row]) -> list[list[Any]]:
    """[step, tokens, seconds, {set: mean}] of each evaluation."""
    tokens, evals = 0, []
    for row, seconds in zip(rows, _trained_seconds(rows), strict=True):
        tokens = row.get("tokens_total", tokens)
        if means := _means(row):
            evals.append([row["step"], tokens, _short(seconds), {name: _short(x, 6) for name, x in means.items()}])
    return evals


def _curves(rows: list[Row]) -> dict[str, list[Any]]:
    stride = max(1, -(-len(rows) // POINTS))
    kept = rows[stride - 1 :: stride]
    names = [name for name in CURVES if any(row.get(name) is not None for row in kept)]
    x = {"step": [row["step"] for row in kept], "tokens": [row["tokens_total"] for row in kept]}
    return x | {name: [_short(row.get(name)) for row in kept] for name in names} if kept else {}


def _short(value: Any, digits: int = 4) -> Any:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


# ---- the file --------------------------------------------------------------------------------------------------------


def header(study: Study) -> Row:
    config = study.config
    settings = {path: x for path, x in flat(config).items() if x is not None and x != {}}
    return {
        "study": study.name,
        "file": str(study.file),
        "version": __version__,
        "planned": study.planned,
        "methods": list(config.compare),
        "arms": [
            {"name": arm.name, "method": arm.method, "condition": arm.condition, "settings": arm.settings}
            for arm in study.arms
        ],
        "candidates": list(study.candidates),
        "tuning_seed": TUNING_SEED,
        "against": config.against,
        "seeds": config.seeds,
        "target": config.target,
        "on": config.test_set,
        "budget": {name: x for name, x in vars(config.budget).items() if x is not None},
        "tune_problems": config.tune_problems,
        "tune_seeds": config.tune_seeds,
        "model": study.arms[0].config.model,
        "task": study.arms[0].config.task.name,
        "settings": settings,
    }


def read_results(folder: Path) -> tuple[Row, list[Row]]:
    """(the study, its runs), of a folder or of the file alone; where there is none, a ValueError."""
    problems: list[str] = []
    rows = list(read_rows(folder / FILE if folder.is_dir() else folder, problems))
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    if not rows or "study" not in rows[0]:
        raise ValueError(f"{folder} has no results of a study: no {FILE} of one is there")
    return rows[0], rows[1:]


def write_results(folder: Path, study: Row, rows: Iterable[Row]) -> None:
    """Whole or not at all; in the order of the runs' names, so that a file that is committed changes little."""
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in (study, *sorted(rows, key=_order)))
    write_whole(folder / FILE, "".join(f"{line}\n" for line in lines))


def _order(row: Row) -> tuple[str, str]:
    return row["part"], row["run"]
