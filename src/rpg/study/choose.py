"""What tuning has found: for each arm the values whose runs end highest on the problems set aside."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from .design import Arm, Study
from .results import Row
from .scores import final_mean


def choice(study: Study, arm: Arm, rows: dict[str, Row]) -> dict[str, Any] | None:
    """None: its runs have not all ended. Of equals the first in the file; a value with a failed run is taken only where
    all have one."""
    scored: list[tuple[bool, float, int]] = []
    values: list[dict[str, Any]] = []
    for place, candidate in enumerate(study.candidates):
        values.append(study.tried(arm, candidate))
        runs = [run for run in study.tuning if run.arm is arm and run.tried == values[-1]]
        made = [rows[run.id] for run in runs if run.id in rows]
        if len(made) < len(runs):
            return None
        whole = all(row["status"] == "finished" for row in made)
        scored.append((whole, fmean(final_mean(row, None) or 0.0 for row in made), -place))
    return values[-max(scored)[2]]
