"""A run's folder, read as it stands: finished, still running, killed in the middle of a line."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..run.folder import read_rows, read_text

Row = dict[str, Any]
FILES = ("metrics.jsonl", "summary.json")  # either makes a folder a run


@dataclass(frozen=True)
class RunData:
    """What the files of one run say."""

    name: str
    folder: Path
    config: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    """metrics, one row a step, in order; a step that was written twice has its later values"""
    samples: list[Row] = field(default_factory=list)
    remarks: tuple[str, ...] = ()
    """what could not be read"""

    @cached_property
    def evaluations(self) -> list[Row]:
        """Rows of steps at which an evaluation ran."""
        return [row for row in self.rows if any(name.startswith("eval/") for name in row)]

    def fact(self, name: str, default: Any = None) -> Any:
        """From the summary, or else the config."""
        value = self.summary.get(name)
        return self.config.get(name, default) if value is None else value

    @property
    def algorithm(self) -> str:
        return str(self.fact("algorithm", "unknown algorithm"))

    @property
    def task(self) -> str:
        value = self.fact("task", "")
        return str(value.get("name", "") if isinstance(value, dict) else value)

    @property
    def status(self) -> str:
        return str(self.summary.get("status") or "unknown")

    @property
    def step(self) -> int:
        """The last one reached."""
        return int(self.rows[-1]["step"] if self.rows else finite(self.summary.get("step")) or 0)

    @property
    def seconds(self) -> float | None:
        """The summary of a run that goes on, or was killed, may be older than its rows."""
        return max(finite(self.summary.get("seconds")) or 0.0, sum(elapsed(row) for row in self.rows)) or None

    @property
    def tokens(self) -> float | None:
        totals = (finite(row.get("tokens_total")) or 0.0 for row in (self.summary, *self.rows))
        return max(totals) or None

    @property
    def speed(self) -> float | None:
        """Tokens a second: the median over steps."""
        speeds = sorted(x for row in self.rows if (x := finite(row.get("speed/tokens_per_s"))) is not None)
        return speeds[len(speeds) // 2] if speeds else None


def finite(value: Any) -> float | None:
    """A number, or None for anything else: text, NaN, infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def elapsed(row: Row) -> float:
    """Seconds that a step took."""
    whole = finite(row.get("time/step"))
    total = sum(finite(value) or 0.0 for name, value in row.items() if name.startswith("time/"))
    return total if whole is None else whole


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def find_runs(folder: str | Path) -> list[Path]:
    """The folder itself if it is a run, else those of its children that are."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    runs = [folder] if is_run(folder) else sorted(child for child in folder.iterdir() if is_run(child))
    if not runs:
        raise ValueError(f"{folder} is not a run, nor a folder of runs: no metrics.jsonl or summary.json in it")
    return runs


def read_run(folder: str | Path) -> RunData:
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run: it has no metrics.jsonl or summary.json")
    remarks: list[str] = []
    steps: dict[int, Row] = {}
    for row in read_rows(folder / "metrics.jsonl", remarks):
        step = finite(row.get("step"))
        if step is None:
            remarks.append("a row of metrics.jsonl without a step was left out")
        else:
            steps[int(step)] = {**steps.get(int(step), {}), **row, "step": int(step)}
    summary = _document(folder / "summary.json", json.loads, remarks)
    return RunData(
        name=str(summary.get("name") or folder.resolve().name),
        folder=folder,
        config=_document(folder / "config.yaml", _yaml, remarks),
        summary=summary,
        rows=[steps[step] for step in sorted(steps)],
        samples=[row for row in read_rows(folder / "samples.jsonl", remarks) if finite(row.get("step")) is not None],
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _document(path: Path, parse: Any, remarks: list[str]) -> Row:
    text = read_text(path, remarks)
    try:
        value = parse(text) if text.strip() else {}
    except (ValueError, RecursionError):
        remarks.append(f"{path.name} could not be read")
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
