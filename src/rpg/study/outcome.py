"""The result of a study, from its rows: tables, differences and a verdict in words, as one JSON document."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .results import Row
from .scores import best_mean, final_mean, first_mean, mean_of, reached, shares
from .statistics import Estimated, estimated, holm

ALPHA = 0.03  # of any false difference in a study: so that of 100 studies of equals 95 say so, with their own luck
ONE_SEED = "one seed: no answer"
NOTHING_SEEN = "no difference seen"


def outcome(study: Row, rows: Sequence[Row]) -> Row:
    """Of what has ended so far."""
    compared = {(row["arm"], row["seed"]): row for row in rows if row["part"] == "compare"}
    start = {row["seed"]: row["first"] for row in compared.values() if row["first"]}
    results = {arm["name"]: _of_arm(study, arm, compared, start) for arm in study["arms"]}
    differences = list(_differences(study, results, _finest(list(compared.values()))))
    arms = [_told(study, arm, compared, results[arm["name"]], rows) for arm in study["arms"]]
    return {
        "study": study["study"],
        "done": len(rows),
        "planned": study["planned"],
        "metric": _metric(study, compared),
        "budget": study["budget"],
        **{name: study[name] for name in ("version", "model", "task", "seeds")},
        "target": study["target"],
        "arms": arms,
        "differences": differences,
        "tuning": list(_tuning(study, arms, rows)),
        "failed": [_failure(row) for row in rows if row["status"] != "finished"],
        "verdict": list(_verdict(study, arms, differences)),
    }


def _metric(study: Row, compared: Mapping[Any, Row]) -> str:
    row = next((row for row in compared.values() if row["evals"]), None)
    if row is None:
        return "mean@k"
    sets = list(row["last"])
    where = study["on"] or (sets[0] if len(sets) == 1 else f"the mean of {', '.join(sets)}")
    return f"mean@{row['k']} on {where}"


def _of_arm(
    study: Row, arm: Row, compared: Mapping[Any, Row], start: Mapping[int, Mapping[str, list[int]]]
) -> dict[int, NDArray[np.float64]]:
    """By seed, the share of right responses to each problem at the run's last evaluation. A run that failed before it
    had one counts as the start model, as other runs with its seed have seen it."""
    by_seed, any_start = {}, next(iter(start.values()), {})
    for seed in range(study["seeds"]):
        row = compared.get((arm["name"], seed))
        if row is not None and len(x := shares(row["last"] or start.get(seed, any_start), row["k"], study["on"])):
            by_seed[seed] = x
    return by_seed


def _together(by_seed: Mapping[int, NDArray[np.float64]], seeds: Sequence[int]) -> NDArray[np.float64]:
    return np.stack([by_seed[seed] for seed in seeds])


# ---- an arm ----------------------------------------------------------------------------------------------------------


def _told(
    study: Row,
    arm: Row,
    compared: Mapping[Any, Row],
    by_seed: Mapping[int, NDArray[np.float64]],
    rows: Sequence[Row],
) -> Row:
    on = study["on"]
    runs = [compared[arm["name"], seed] for seed in range(study["seeds"]) if (arm["name"], seed) in compared]
    tried: Mapping[str, Any] = next((row["tried"] for row in runs), {})
    last = estimated(_together(by_seed, sorted(by_seed)), _finest(runs)) if by_seed else None
    bests = [x for row in runs if (x := best_mean(row, on)) is not None]
    starts = [x for row in runs if (x := first_mean(row, on)) is not None]
    return {
        **{name: arm[name] for name in ("name", "method", "condition", "settings")},
        "tried": tried,
        "at_edge": _at_edges(arm["name"], tried, rows),
        "last": last and _share(last, [float(x.mean()) for x in by_seed.values()]),
        "best": {"mean": fmean(bests), "sd": _deviation(bests)} if bests else None,
        "start": fmean(starts) if starts else None,
        "tokens": median(row["tokens"] for row in runs) if runs else None,
        "seconds": median(row["seconds"] for row in runs) if runs else None,
        "steps": median(row["step"] for row in runs) if runs else None,
        "target": _target(runs, study["target"], on),
        "failed": sum(row["status"] != "finished" for row in runs),
        "curve": _curve(runs, on),
        "runs": [
            {
                "seed": row["seed"],
                "last": final_mean(row, on),
                "best": best_mean(row, on),
                "status": row["status"],
                "step": row["step"],
                "tokens": row["tokens"],
                "seconds": row["seconds"],
            }
            for row in runs
        ],
    }


def _finest(runs: Sequence[Row]) -> float:
    return 1 / runs[0]["k"] if runs else 0.0


def _interval(x: Estimated) -> Row:
    """Infinity is no JSON."""
    low, high = (None if math.isinf(bound) else bound for bound in (x.low, x.high))
    return {"mean": x.mean, "low": low, "high": high, "seeds": x.seeds}


def _share(x: Estimated, values: Sequence[float]) -> Row:
    told = _interval(x)
    bounds = {} if told["low"] is None else {"low": max(0.0, told["low"]), "high": min(1.0, told["high"])}
    return told | bounds | {"sd": _deviation(values)}


def _deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _target(runs: Sequence[Row], target: float | None, on: str | None) -> Row | None:
    """Medians over all runs: of an odd number, a run that never got there counts as later than all."""
    if target is None:
        return None
    times = [reached(row, target, on) for row in runs]
    got = sum(time is not None for time in times)
    told: Row = {"reached": got, "of": len(runs)}
    for i, name in enumerate(("step", "tokens", "seconds")):
        middle = median(math.inf if time is None else time[i] for time in times) if times else math.inf
        told[name] = middle if math.isfinite(middle) else None
    return told


def _curve(runs: Sequence[Row], on: str | None) -> list[Row]:
    """Mean, lowest and highest over the seeds at each evaluation. A run that has ended keeps its last value, so that
    the mean does not rise when a bad one is gone."""
    points: list[Row] = []
    begun = [row["evals"] for row in runs if row["evals"]]
    for step in sorted({e[0] for evals in begun for e in evals}):
        here = [[e for e in evals if e[0] <= step] for evals in begun]
        values = [x for evals in here if evals and (x := mean_of(evals[-1][3], on)) is not None]
        at = [evals[-1] for evals in here if evals and evals[-1][0] == step]
        if values:
            points.append(
                {
                    "step": step,
                    "tokens": fmean(e[1] for e in at),
                    "seconds": fmean(e[2] or 0.0 for e in at),
                    "mean": fmean(values),
                    "low": min(values),
                    "high": max(values),
                }
            )
    return points


def _tuning(study: Row, arms: Sequence[Row], rows: Sequence[Row]) -> Iterator[Row]:
    """Of each arm the values that were tried, and how its runs ended on the problems set aside."""
    for arm in arms:
        mine = [row for row in rows if row["part"] == "tune" and row["arm"] == arm["name"]]
        values: list[Row] = []
        for row in mine:
            if row["tried"] not in values:
                values.append(row["tried"])
        for tried in values:
            runs = [row for row in mine if row["tried"] == tried]
            yield {
                "arm": arm["name"],
                "tried": tried,
                "mean": fmean(final_mean(row, None) or 0.0 for row in runs),
                "runs": len(runs),
                "failed": sum(row["status"] != "finished" for row in runs),
                "chosen": bool(arm["runs"]) and tried == arm["tried"],
            }


def _at_edges(arm: str, tried: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Tuned settings whose value is the lowest or the highest of those tried: a better one may lie beyond."""
    edges = []
    for path, value in tried.items():
        values = {row["tried"].get(path) for row in rows if row["part"] == "tune" and row["arm"] == arm}
        numbers = {x for x in values if isinstance(x, int | float)}
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            edges.append(path)
    return edges


def _failure(row: Row) -> Row:
    return {name: row[name] for name in ("run", "part", "arm", "seed", "tried", "status", "message", "step")}


# ---- differences -----------------------------------------------------------------------------------------------------


def _pairs(study: Row) -> Iterator[tuple[Row, Row]]:
    """Within each condition all with each other, or each with the one that they are compared with."""
    for _, arms in itertools.groupby(study["arms"], key=lambda arm: arm["condition"]):
        for a, b in itertools.combinations(list(arms), 2):
            if study["against"] in (None, a["method"]):
                yield b, a
            elif study["against"] == b["method"]:
                yield a, b


def _differences(study: Row, results: Mapping[str, Mapping[int, NDArray[np.float64]]], finest: float) -> Iterator[Row]:
    found = []
    for a, b in _pairs(study):
        mine, other = results[a["name"]], results[b["name"]]
        seeds = sorted(mine.keys() & other.keys())
        if seeds:
            found.append((a, b, estimated(_together(mine, seeds) - _together(other, seeds), finest)))
    tested = [x for _, _, x in found if x.seeds > 1]
    adjusted = dict(zip(map(id, tested), holm([x.p for x in tested]), strict=True))
    for a, b, x in found:
        p = adjusted.get(id(x))
        seen = p is not None and p < ALPHA
        yield {
            "condition": a["condition"],
            "a": a["method"],
            "b": b["method"],
            **_interval(x),
            "p": None if p is None else x.p,
            "p_holm": p,
            "verdict": ONE_SEED if p is None else NOTHING_SEEN if not seen else _higher(a, b, x),
        }


def _higher(a: Row, b: Row, x: Estimated) -> str:
    return f"{(a if x.mean > 0 else b)['method']} higher"


# ---- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(study: Row, arms: Sequence[Row], differences: Sequence[Row]) -> Iterator[str]:
    for condition in dict.fromkeys(arm["condition"] for arm in arms):
        where = f"{condition}: " if condition else ""
        there = [x for x in differences if x["condition"] == condition]
        if not there:
            yield f"{where}nothing to compare yet."
        else:
            yield where + _in_words([arm for arm in arms if arm["condition"] == condition], there)


def _in_words(arms: Sequence[Row], differences: Sequence[Row]) -> str:
    if all(x["verdict"] == ONE_SEED for x in differences):
        return "one seed: no answer. Differences between single runs are mostly chance."
    seen = [x for x in differences if x["verdict"] not in (ONE_SEED, NOTHING_SEEN)]
    if not seen:
        open_to = max(max(abs(x["low"]), abs(x["high"])) for x in differences if x["low"] is not None)
        return f"no difference seen. The intervals leave room for up to {100 * open_to:.1f} points."
    ranked = sorted((arm for arm in arms if arm["last"]), key=lambda arm: -arm["last"]["mean"])
    sentences = []
    for arm in ranked:
        above = [(_other(x, arm), x) for x in seen if x["verdict"] == f"{arm['method']} higher"]
        if above:
            lower = ", ".join(f"{name} ({_points(x, arm)})" for name, x in above)
            sentences.append(f"{arm['method']} ends higher than {lower}.")
    untold = len(differences) - len(seen)
    rest = f" No difference seen in the other {untold} comparison{'s' if untold > 1 else ''}." if untold else ""
    return " ".join(sentences) + rest


def _other(x: Row, arm: Row) -> str:
    return str(x["b"] if x["a"] == arm["method"] else x["a"])


def _points(x: Row, arm: Row) -> str:
    """+3.1 [1.2, 5.0] points, from this arm's side."""
    sign = 1 if x["a"] == arm["method"] else -1
    low, high = sorted((sign * x["low"], sign * x["high"]))
    return f"{100 * sign * x['mean']:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"
