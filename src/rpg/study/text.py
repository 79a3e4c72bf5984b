"""A study's result as Markdown, which a terminal shows as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..console import amount, duration, number, percent
from .results import Row

LAST = "Last: at the end, which counts. Best: the highest of a run's evaluations, so too high. ± is between seeds."
DIFFERENCES = (
    "Differences are paired by seed and problem. 95 %: of each by itself, Student's t over the seeds. The verdict goes "
    "by p (Holm), which counts that there are several comparisons: below 0.03 a difference is seen."
)
FAILED = "Failed runs, which count with their last evaluation, or as the start model if they have none:"


def markdown(result: Row) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Row) -> Iterator[str]:
    budget = ", ".join(f"{x:,} {name}" for name, x in result["budget"].items())
    done = "" if result["done"] == result["planned"] else f", {result['done']} of {result['planned']} runs so far"
    yield f"# {result['study']}: {result['metric']}, {budget} each{done}"
    yield ""
    yield from (f"- {line}" for line in result["verdict"])
    yield ""
    yield from table(*arms_table(result))
    yield ""
    yield LAST
    if result["differences"]:
        yield ""
        yield from table(*differences_table(result))
        yield ""
        yield DIFFERENCES
    if result["failed"]:
        yield ""
        yield FAILED
        yield ""
        yield from (f"- {failure_text(row)}" for row in result["failed"])


def arms_table(result: Row) -> tuple[list[str], list[list[str]]]:
    """(heads, rows)"""
    tuned = list(dict.fromkeys(path for arm in result["arms"] for path in arm["tried"]))
    target = result["target"]
    heads = ["", *tuned, "Last", "95 %", "Best", "seeds", "failed", "tokens", "time"]
    heads += [] if target is None else [f"runs at {percent(target)}", "tokens to it", "time to it"]
    return heads, [_arm_row(arm, tuned, target is not None) for arm in result["arms"]]


def _arm_row(arm: Row, tuned: Sequence[str], with_target: bool) -> list[str]:
    last, best, target = arm["last"], arm["best"], arm["target"] if with_target else None
    cells = [arm["name"], *(_tuned(arm, path) for path in tuned)]
    cells += [spread(last), interval(last), spread(best), str(len(arm["runs"])), str(arm["failed"] or "")]
    cells += [amount(arm["tokens"]), duration(arm["seconds"])]
    if with_target:
        got = target is not None and target["of"]
        cells += [f"{target['reached']} of {target['of']}" if target and got else "–"]
        cells += [amount(target["tokens"]), duration(target["seconds"])] if target else ["–", "–"]
    return cells


def _tuned(arm: Row, path: str) -> str:
    x = arm["tried"].get(path)
    return "–" if x is None else value_text(x) + (" (edge)" if path in arm["at_edge"] else "")


def value_text(x: Any) -> str:
    return number(x) if isinstance(x, float) else str(x)


def spread(x: Mapping[str, Any] | None) -> str:
    """90.4 ± 0.5 %"""
    if x is None:
        return "–"
    return f"{100 * x['mean']:.1f}" + ("" if x["sd"] is None else f" ± {100 * x['sd']:.1f}") + " %"


def interval(x: Mapping[str, Any] | None) -> str:
    return "–" if x is None or x["low"] is None else f"{100 * x['low']:.1f} to {100 * x['high']:.1f}"


def differences_table(result: Row) -> tuple[list[str], list[list[str]]]:
    conditions = any(x["condition"] for x in result["differences"])
    heads = [*(["condition"] if conditions else []), "difference", "points", "95 %", "p (Holm)", "verdict"]
    rows = []
    for x in result["differences"]:
        row = [x["condition"]] if conditions else []
        row += [f"{x['a']} − {x['b']}", f"{100 * x['mean']:+.1f}", interval(x)]
        rows.append([*row, "–" if x["p_holm"] is None else p_text(x["p_holm"]), x["verdict"]])
    return heads, rows


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def failure_text(row: Row) -> str:
    tried = "".join(f", {path} {value_text(x)}" for path, x in row["tried"].items())
    part = "tuning " if row["part"] == "tune" else ""
    return f"{part}{row['arm']}, seed {row['seed']}{tried}: {row['status']} at step {row['step']}: {row['message']}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Of Markdown, its columns under each other."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for line in (heads, ["-" * max(3, width) for width in widths], *rows):
        cells = (cell.ljust(max(3, width)) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
