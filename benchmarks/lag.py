"""What is inside the runs of a study: how far samples lag behind, what is cut, how the policy moves.

    rpg study studies/builtin-lag.yaml --jobs 13                    # makes the runs, in hours
    python benchmarks/lag.py studies/builtin-lag [--svg FILE]       # the table, and curves, of its results.jsonl
    python benchmarks/lag.py studies/builtin-lag --together         # each method beside one, over all conditions
    python benchmarks/lag.py studies/builtin-lag --tuning           # each rate that was tried

One row for each condition and method; means over seeds. A run that failed is counted in its last column.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rpg
from rpg.clip import Unweighted
from rpg.console import number
from rpg.study.results import FILE, read_results
from rpg.study.scores import final_mean, shares
from rpg.study.statistics import estimated, holm

Row = dict[str, Any]
LAST = 5  # steps
CUT = f"tokens cut, last {LAST} steps"
COLUMNS: dict[str, Callable[[Row], float | None]] = {
    "least ESS of a step": lambda curves: min(known(curves["ess"]), default=None),
    CUT: lambda curves: added(mean(curves["clip/low"]), mean(curves["clip/high"])),
    f"KL to the sampler, last {LAST} steps": lambda curves: mean(curves["kl/old"]),
    "entropy at the end": lambda curves: mean(curves["entropy"][-1:]),
    "tokens a response, at the end": lambda curves: mean(curves["length/mean"][-1:]),
}
CURVES = {"entropy": "entropy", "kl/old": "KL to the sampler", "clip/low": "tokens cut", "length/mean": "length"}
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f", "#d4a017", "#555555", "#2a9d8f", "#bc4b7b")


def known(values: Sequence[float | None]) -> list[float]:
    return [x for x in values if x is not None]


def mean(values: Sequence[float | None]) -> float | None:
    last = known(values[-LAST:])
    return statistics.fmean(last) if last else None


def added(*values: float | None) -> float | None:
    return sum(known(values)) if known(values) else None


def cuts(method: str) -> bool:
    loss = rpg.algorithm(method).loss
    return (loss.clip is not None or loss.token_clip is not None) and not isinstance(loss.clip, Unweighted)


def table(study: Row, rows: Sequence[Row]) -> str:
    lines = ["| condition | method | rate | mean@k at the end | " + " | ".join(COLUMNS) + " | runs | failed |"]
    lines.append("|---|---|" + "---:|" * (len(COLUMNS) + 4))
    for arm in study["arms"]:
        mine = [row for row in rows if row["part"] == "compare" and row["arm"] == arm["name"]]
        if not mine:
            continue
        rate = number(mine[0]["tried"].get("optim.lr", arm["settings"].get("optim.lr")))
        scores = known([final_mean(row, study["on"]) for row in mine])
        spread = f" ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        cells = [arm["condition"], arm["method"], rate]
        cells.append(f"{100 * statistics.fmean(scores):.1f}{spread}" if scores else "–")
        for name, column in COLUMNS.items():
            if name == CUT and not cuts(arm["method"]):
                cells.append("–")
                continue
            found = known([column(row["curves"]) for row in mine if row["curves"].get("ess")])
            cells.append(f"{statistics.fmean(found):.3g}" if found else "–")
        failed = sum(row["status"] != "finished" for row in mine)
        lines.append("| " + " | ".join([*cells, str(len(mine)), str(failed or "")]) + " |")
    return "\n".join(lines)


def together(study: Row, rows: Sequence[Row]) -> str:
    """Each method minus the one that the study compares with, paired by seed, problem and condition: the mean over all
    conditions. Of seeds that are done in all of them."""
    compared = {(row["arm"], row["seed"]): row for row in rows if row["part"] == "compare"}
    names: dict[str, list[str]] = {}
    for arm in study["arms"]:
        names.setdefault(arm["method"], []).append(arm["name"])
    seeds = [seed for seed in range(study["seeds"]) if all((arm["name"], seed) in compared for arm in study["arms"])]
    k = next(iter(compared.values()))["k"]

    def scores(method: str) -> Any:
        by_arm = [[shares(compared[name, seed]["last"], k, study["on"]) for seed in seeds] for name in names[method]]
        return np.mean(np.array(by_arm), 0)

    against = study["against"]
    found = {method: estimated(scores(method) - scores(against), 1 / k) for method in names if method != against}
    adjusted = holm([x.p for x in found.values()])
    lines = [f"| over {len(names[against])} conditions, {len(seeds)} seeds | points | 95 % | p (Holm) |"]
    lines.append("|---|---:|---:|---:|")
    for (method, x), p in zip(found.items(), adjusted, strict=True):
        cells = [f"{100 * x.mean:+.1f}", f"{100 * x.low:.1f} to {100 * x.high:.1f}", f"{p:.3f}"]
        lines.append(f"| {method} − {against} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tried(study: Row, rows: Sequence[Row]) -> str:
    """Of the runs that chose the rates: accuracy at the end, and the least ESS of a step."""
    tuning = [row for row in rows if row["part"] == "tune"]
    found: dict[str, list[Row]] = {}
    for row in sorted(tuning, key=lambda row: row["tried"]["optim.lr"]):
        found.setdefault(row["arm"], []).append(row)
    count = max(map(len, found.values()))
    names = ["lowest", *["middle"] * (count - 2), "highest"]
    lines = ["| condition | method | " + " | ".join(f"{name} rate" for name in names) + " | least ESS at each |"]
    lines.append("|---|---|" + "---:|" * (count + 1))
    for arm in study["arms"]:
        mine = found.get(arm["name"], [])
        scores = [f"{100 * (final_mean(row, None) or 0):.1f}" for row in mine]
        least = [f"{min(known(row['curves']['ess']), default=float('nan')):.2f}" for row in mine]
        lines.append("| " + " | ".join([arm["condition"], arm["method"], *scores, ", ".join(least)]) + " |")
    return "\n".join(lines)


# ---- curves ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP, LEFT, TOP = 230, 120, 26, 70, 46


def picture(study: Row, rows: Sequence[Row], methods: Sequence[str], conditions: Sequence[str]) -> str:
    """A row of panels for each metric, a column for each condition, a line for each method: means over its seeds."""
    wide, high = LEFT + len(conditions) * (WIDTH + GAP), TOP + len(CURVES) * (HEIGHT + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    for i, method in enumerate(methods):
        x = LEFT + 150 * i
        parts.append(
            f'<rect x="{x}" y="9" width="14" height="4" fill="{COLOURS[i]}"/><text x="{x + 19}" y="15">{method}</text>'
        )
    for column, condition in enumerate(conditions):
        x = LEFT + column * (WIDTH + GAP)
        parts.append(f'<text x="{x}" y="{TOP - 8}" font-weight="bold">{condition}</text>')
    for line, (metric, name) in enumerate(CURVES.items()):
        y = TOP + line * (HEIGHT + GAP)
        drawn = {
            (condition, method): averaged(study, rows, condition, method, metric)
            for condition in conditions
            for method in methods
        }
        top = max((x for curve in drawn.values() for x in curve), default=0.0) or 1.0
        parts.append(f'<text x="4" y="{y + 12}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 26}" text-anchor="end">{top:.2g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + HEIGHT}" text-anchor="end">0</text>')
        for column, condition in enumerate(conditions):
            x = LEFT + column * (WIDTH + GAP)
            parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>')
            for i, method in enumerate(methods):
                curve = drawn[condition, method]
                points = " ".join(
                    f"{x + WIDTH * k / max(1, len(curve) - 1):.1f},{y + HEIGHT * (1 - value / top):.1f}"
                    for k, value in enumerate(curve)
                )
                parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.6"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def averaged(study: Row, rows: Sequence[Row], condition: str, method: str, metric: str) -> list[float]:
    names = {arm["name"] for arm in study["arms"] if (arm["condition"], arm["method"]) == (condition, method)}
    mine = [row["curves"] for row in rows if row["part"] == "compare" and row["arm"] in names]
    if metric == "clip/low" and not cuts(method):
        return []
    if metric == "clip/low":
        curves = [
            [(a or 0.0) + (b or 0.0) for a, b in zip(one["clip/low"], one["clip/high"], strict=True)]
            for one in mine
            if one.get("clip/low")
        ]
    else:
        curves = [[x or 0.0 for x in one[metric]] for one in mine if one.get(metric)]
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a study")
    parser.add_argument("--svg", type=Path, help="where the curves go")
    parser.add_argument("--together", action="store_true", help="differences over all conditions instead")
    parser.add_argument("--tuning", action="store_true", help="the runs that chose the rates instead")
    parser.add_argument("--methods", nargs="+", default=["rpg-reinforce-urkl", "dapo", "grpo", "reinforce"])
    args = parser.parse_args()
    study, rows = read_results(args.folder / FILE)
    print(together(study, rows) if args.together else tried(study, rows) if args.tuning else table(study, rows))
    if args.svg:
        conditions = list(dict.fromkeys(arm["condition"] for arm in study["arms"]))
        args.svg.write_text(picture(study, rows, args.methods, conditions), encoding="utf-8")


if __name__ == "__main__":
    main()
