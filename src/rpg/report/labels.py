"""Names, badges and spreads of runs, as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..console import tag
from .runs import RunData
from .scores import Average, Score


def plural(n: int, what: str) -> str:
    """1 run, 2 runs, never broken over two lines."""
    return f"{n}\u00a0{what}" if n == 1 else f"{n}\u00a0{what}s"


def spread(average: Average) -> str:
    """90.4 ± 0.5, in percent"""
    more = "" if average.deviation is None else f" ± {100 * average.deviation:.1f}"
    return f"{100 * average.mean:.1f}{more}"


def interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{100 * score.low:.1f}–{100 * score.high:.1f} %"


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """Names, or where two runs share one, folders."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def status_badge(run: RunData) -> str:
    kind = run.status if run.status in ("running", "finished", "stopped", "failed") else "unknown"
    return tag("span", escape(run.status), class_=f"status {kind}")


def swatch(i: int) -> str:
    """The colour of the i-th group."""
    return f'<i class="swatch c{i % 10}"></i>'
