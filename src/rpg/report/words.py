"""Numbers and names in words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .markup import tag
from .runs import Run
from .scores import Average, Score


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return (
        f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{seconds:.1f} s" if seconds < 10 else f"{s} s"
    )


def amount(value: float | None) -> str:
    """1.2 M"""
    if value is None:
        return "–"
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def plural(n: int, what: str) -> str:
    return f"{n}\u00a0{what}" if n == 1 else f"{n}\u00a0{what}s"


def spread(average: Average) -> str:
    """90.4 ± 0.5, in percent"""
    more = "" if average.deviation is None else f" ± {100 * average.deviation:.1f}"
    return f"{100 * average.mean:.1f}{more}"


def interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{100 * score.low:.1f}–{100 * score.high:.1f} %"


def labels(runs: Sequence[Run]) -> list[str]:
    """Names, or where two runs share one, folders."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def status(run: Run) -> str:
    """As a badge."""
    kind = run.status if run.status in ("running", "finished", "stopped", "failed") else "unknown"
    return tag("span", escape(run.status), class_=f"status {kind}")


def swatch(i: int) -> str:
    """The colour of the i-th group."""
    return f'<i class="swatch c{i % 10}"></i>'
