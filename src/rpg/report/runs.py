"""A run's folder, read as it stands: finished, still running, killed in the middle of a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..run.folder import SETTINGS, is_run, read_rows, read_text
from ..yaml_text import load_yaml
from .metrics import Metrics, Row, finite
from .responses import read_responses


@dataclass(frozen=True)
class RunData:
    """What the files of one run say."""

    name: str
    folder: Path
    config: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    rows: Metrics = field(default_factory=Metrics)
    samples: list[Row] = field(default_factory=list)
    """responses; of a long run some groups, evenly from first to last"""
    responses: int = 0
    """that were logged"""
    remarks: tuple[str, ...] = ()
    """what could not be read"""

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
        return int(self.rows.steps[-1] if len(self.rows) else finite(self.summary.get("step")) or 0)

    @property
    def seconds(self) -> float | None:
        """The summary of a run that goes on, or was killed, may be older than its rows."""
        return max(finite(self.summary.get("seconds")) or 0.0, float(self.rows.seconds.sum())) or None

    @property
    def tokens(self) -> float | None:
        totals = self.rows.column("tokens_total")
        return float(np.nanmax(totals, initial=finite(self.summary.get("tokens_total")) or 0.0)) or None

    @property
    def lights(self) -> list[Row]:
        """Each time that a warning light went on: its name, the step, what it saw, and until when."""
        told = self.summary.get("lights")
        known = told if isinstance(told, list) else []
        return [e for e in known if isinstance(e, dict) and finite(e.get("step")) is not None and "text" in e]

    @property
    def speed(self) -> float | None:
        """Tokens a second: the median over steps."""
        speeds = self.rows.column("speed/tokens_per_s")
        speeds = np.sort(speeds[~np.isnan(speeds)])
        return float(speeds[len(speeds) // 2]) if len(speeds) else None


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
    rows = Metrics(read_rows(folder / "metrics.jsonl", remarks))
    if rows.left_out:
        remarks.insert(0, "a row of metrics.jsonl without a step was left out")
    summary = _document(folder / "summary.json", json.loads, remarks)
    samples, responses = read_responses(folder / "samples.jsonl", remarks)
    return RunData(
        name=str(summary.get("name") or folder.resolve().name),
        folder=folder,
        config=_document(folder / SETTINGS, _yaml, remarks),
        summary=summary,
        rows=rows,
        samples=samples,
        responses=responses,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def all_rows(folder: Path) -> list[Row]:
    """Every row of metrics.jsonl as it was written, one a step, in order."""
    steps: dict[int, Row] = {}
    for row in read_rows(folder / "metrics.jsonl", []):
        if (step := finite(row.get("step"))) is not None:
            steps[int(step)] = {**steps.get(int(step), {}), **row, "step": int(step)}
    return [steps[step] for step in sorted(steps)]


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
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
