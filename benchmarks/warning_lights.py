"""Runs that fail and runs that do not, on the built-in model, and what the warning lights said of each.

    python benchmarks/warning_lights.py                 # all of them, some 20 minutes on a core; --only NAME for one
    python benchmarks/warning_lights.py --table         # no run: the tables of docs/warning-lights.md, from the record
    python benchmarks/warning_lights.py --again 100       # every run with its seed + 100; nothing is recorded
    python benchmarks/warning_lights.py --cost            # seconds of a step with the lights and without

Makes runs in runs/lights/, and the record that tests/training/test_lights.py reads: of each run the metrics that the
lights read, the usual ones beside them, and the held-out accuracy, which counts right answers whatever the reward pays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rpg
from rpg.training.health.lights import LIGHTS, Lights
from rpg.training.health.vitals import Vitals
from rpg.training.loop import Trainer
from rpg.training.update import Updater

RECORD = Path(__file__).parents[1] / "tests" / "training" / "lights.json"
RUNS = Path("runs/lights")
Rows = list[dict[str, float]]
Record = dict[str, dict[str, Rows]]
Signal = Callable[[Rows], list[float]]
KEPT = (
    *("reward/solved", "length/mean", "length/truncated", "entropy", "ess", "kl/old", "grad_norm", "clip/low"),
    *("groups/none_solved", "kl/old_last", "shift/good", "kl/start", "certain"),
)
SMALL: dict[str, Any] = {
    "steps": 24,
    "rollout.prompts": 10,
    "rollout.max_rounds": 2,
    "eval.every": 2,
    "eval.problems": 24,
    "eval.k": 4,
    "checkpoint.keep": 0,
    "log.tensorboard": False,
    "log.report": False,
    "log.view": "none",
    "insist": True,
}


# ---- rewards that are wrong ------------------------------------------------------------------------------------------


def brevity(response: str, answer: str, prompt: str) -> float:
    return 1 / (1 + len(response) / 10)


def length(response: str, answer: str, prompt: str) -> float:
    return len(response) / 100


def noise(response: str, answer: str, prompt: str) -> float:
    return float(zlib.crc32((prompt + response).encode()) % 2)


def paid(correct: float, name: str = "") -> dict[str, Any]:
    """For being right, so much, and for what the function above says. Accuracy is counted by what is right."""
    parts = {"correct": correct} | ({f"{Path(__file__).resolve()}:{name}": 1.0} if name else {})
    return {"task.rewards": parts, "rollout.dynamic_by": "reward"}


# ---- the runs --------------------------------------------------------------------------------------------------------

CONSTANT = {"optim.schedule": "constant"}


def at(lr: float, minibatches: int = 4, **more: Any) -> dict[str, Any]:
    return {"optim.lr": lr, "optim.minibatches": minibatches, **CONSTANT, "steps": 14} | more


FAILING: dict[str, dict[str, Any]] = {
    "lr × 3": at(1.5e-3),
    "lr × 4": at(2e-3),
    "lr × 10": at(5e-3),
    "lr × 2, 8 minibatches": at(1e-3, 8),
    "lr × 2, 32 minibatches": at(1e-3, 32),
    "dapo, lr × 2, 16 minibatches": at(1e-3, 16, algorithm="dapo"),
    "lr × 2, 8 epochs": at(1e-3, 4, **{"optim.epochs": 8}),
    "reinforce, no clip, lr × 2, 16 minibatches": at(1e-3, 16, algorithm="reinforce"),
    "pays for brevity": at(5e-4, **paid(0.3, "brevity")),
    "pays for length": at(5e-4, **paid(0.3, "length")),
    "sign wrong": at(5e-4, **paid(-1)),
    "reward is noise, lr × 2": at(1e-3, **paid(0, "noise")),
    "entropy bonus 0.1": at(5e-4, **{"loss.entropy_bonus": 0.1}),
}
HEALTHY: dict[str, dict[str, Any]] = {
    "default, seed 0": {},
    "default, seed 1": {"seed": 1},
    "grpo": {"algorithm": "grpo", "seed": 2},
    "dapo": {"algorithm": "dapo", "seed": 3},
    "gspo": {"algorithm": "gspo", "seed": 4},
    "lr × 2, 1 minibatch": at(1e-3, 1, seed=5, steps=24),
    "8 minibatches": {"optim.minibatches": 8, "seed": 6},
    "countdown": {"task.name": "countdown", "seed": 7},
}


def make(name: str, settings: dict[str, Any]) -> Rows:
    """The run's rows, short: what is KEPT, with few digits."""
    folder = RUNS / "".join(c if c.isalnum() else "-" for c in name)
    shutil.rmtree(folder, ignore_errors=True)
    rpg.train(output=str(folder), **(SMALL | settings))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    short_rows = []
    for row in rows:
        kept = {"step": row["step"]} | {k: float(f"{row[k]:.3g}") for k in KEPT if row.get(k) is not None}
        if (accuracy := next((row[name] for name in row if name.endswith("/mean@4")), None)) is not None:
            kept["accuracy"] = round(accuracy, 3)
        short_rows.append(kept)
    return short_rows


def write(record: Record) -> None:
    """A line a run, a list a metric."""
    kinds = []
    for kind, runs in record.items():
        lines = []
        for name, rows in runs.items():
            names = dict.fromkeys(column for row in rows for column in row)
            columns = {column: [row.get(column) for row in rows] for column in names}
            lines.append(f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(columns, separators=(',', ':'))}")
        kinds.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8")


def recorded() -> Record:
    """What write() wrote."""

    def rows(columns: dict[str, list[float | None]]) -> Rows:
        steps = range(len(columns["step"]))
        return [{name: x for name, values in columns.items() if (x := values[i]) is not None} for i in steps]

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {kind: {name: rows(columns) for name, columns in runs.items()} for kind, runs in record.items()}


# ---- when a run falls, and which metric says so first ----------------------------------------------------------------


def fall(rows: Rows) -> int | None:
    """After how many steps accuracy is below 0.6 of the best before it, for good; None: it never is.

    The accuracy after a step is that of the responses of the next: all that were sampled, with the right answer.
    """
    scores = [row["reward/solved"] for row in rows if "reward/solved" in row]
    for i in range(1, len(scores) - 1):
        if max(scores[i:]) < 0.6 * max(scores[:i]):
            return i
    return None


def raw(name: str, sign: float = 1.0) -> Signal:
    return lambda rows: [sign * row.get(name, math.nan) for row in rows]


def by_start(name: str, power: int) -> Signal:
    """Above the run's own first steps, by a factor; power −1: below."""

    def signal(rows: Rows) -> list[float]:
        first = [row[name] for row in rows if name in row][:2]
        return [(row.get(name, math.nan) / statistics.fmean(first)) ** power for row in rows]

    return signal


def by_before(name: str, power: int) -> Signal:
    """Above what it was three steps before, by a factor."""

    def signal(rows: Rows) -> list[float]:
        known = [row.get(name, math.nan) for row in rows]
        return [(value / known[max(0, i - 3)]) ** power for i, value in enumerate(known)]

    return signal


def pace(name: str) -> Signal:
    """Its rise a step over the last three."""

    def signal(rows: Rows) -> list[float]:
        known = [0.0, *(row.get(name, math.nan) for row in rows)]
        return [(known[i] - known[max(0, i - 3)]) / min(i, 3) for i in range(1, len(known))]

    return signal


SIGNALS: dict[str, Signal] = {
    "−shift/good": raw("shift/good", -1),
    "kl/old_last": raw("kl/old_last"),
    "kl/start, a step": pace("kl/start"),
    "kl/start": raw("kl/start"),
    "kl/old": raw("kl/old"),
    "1 − ess": lambda rows: [1 - row.get("ess", math.nan) for row in rows],
    "clip/low": raw("clip/low"),
    "grad_norm": raw("grad_norm"),
    "grad_norm, by its start": by_start("grad_norm", 1),
    "entropy, up by its start": by_start("entropy", 1),
    "entropy, down by its start": by_start("entropy", -1),
    "entropy, up within 3 steps": by_before("entropy", 1),
    "entropy, down within 3 steps": by_before("entropy", -1),
    "length, up within 3 steps": by_before("length/mean", 1),
    "length, down within 3 steps": by_before("length/mean", -1),
    "length, up by its start": by_start("length/mean", 1),
    "length, down by its start": by_start("length/mean", -1),
    "truncated": raw("length/truncated"),
    "certain, by its start": by_start("certain", 1),
    "groups/none_solved": raw("groups/none_solved"),
}
MARGIN = 1.5  # of a threshold, above the largest value of any healthy run


def largest(signal: Signal, runs: Iterable[Rows]) -> float:
    values = (value for rows in runs for value in signal(rows[1:]) if not math.isnan(value))
    return max(values, default=-math.inf)  # one optimiser step a batch has no shift/good


def compared(record: Record) -> str:
    """For each signal: the threshold that healthy runs set, false alarms of each healthy run under the threshold that
    the others set, and how many steps before the fall it is passed in runs that fall."""
    healthy = list(record["healthy"].values())
    falling = [(rows, at) for rows in record["failing"].values() if (at := fall(rows)) is not None]
    lines = [
        f"| signal | threshold | false alarms, of {len(healthy)} | lights, of {len(falling)} | by the fall | "
        "steps before |",
        "|---|---|---|---|---|---|",
    ]
    for name, signal in SIGNALS.items():
        others = [[rows for rows in healthy if rows is not one] for one in healthy]
        alarms = [
            largest(signal, [one]) > MARGIN * largest(signal, rest) for one, rest in zip(healthy, others, strict=True)
        ]
        threshold = MARGIN * largest(signal, healthy)
        passed = [next((i for i, x in enumerate(signal(rows[1:]), 1) if x > threshold), None) for rows, _ in falling]
        leads = [at - step for (_, at), step in zip(falling, passed, strict=True) if step is not None]
        early = sum(lead >= 0 for lead in leads)
        middle = f"{statistics.median(leads):g}" if leads else "–"
        lines.append(f"| {name} | {threshold:.2g} | {sum(alarms)} | {len(leads)} | {early} | {middle} |")
    return "\n".join(lines)


# ---- what the lights say ---------------------------------------------------------------------------------------------


def lit(rows: Rows) -> dict[str, int]:
    """Of each light that went on the first step in which it did."""
    lights, first = Lights(), dict[str, int]()
    for row in rows[1:]:
        lights.see(int(row["step"]), dict(row))
    for event in lights.events:
        first.setdefault(event["light"], event["step"])
    return first


def table(record: Record) -> str:
    lines = [
        "| run | accuracy, first → last | falls after step | "
        + " | ".join(f"`{light.name}`" for light in LIGHTS)
        + " |",
        "|---|---|---|" + "---|" * len(LIGHTS),
    ]
    for runs in record.values():
        for name, rows in runs.items():
            scores = [row["accuracy"] for row in rows if "accuracy" in row]
            found, first = fall(rows), lit(rows)
            marks = " | ".join(str(first.get(light.name, "–")) for light in LIGHTS)
            lines.append(f"| {name} | {scores[0]:.2f} → {scores[-1]:.2f} | {found or '–'} | {marks} |")
    return "\n".join(lines)


# ---- what they cost --------------------------------------------------------------------------------------------------


def cost(steps: int = 8, times: int = 3) -> str:
    """Processor seconds of the same steps with and without, in turns; they do the same work, to the bit."""
    spent = {True: [0.0] * times, False: [0.0] * times}
    for turn in range(times):
        for on in (True, False):
            with contextlib.ExitStack() as stack:
                if not on:
                    for place, name, nothing in (
                        (Vitals, "see", lambda *_: None),
                        (Updater, "_gone", lambda _: {}),
                        (Lights, "see", lambda *_: []),
                    ):
                        stack.enter_context(patch.object(place, name, nothing))
                spent[on][turn] = _seconds(steps)
    mine, others = min(spent[True]), min(spent[False])
    return f"{mine / steps:.4f} s a step with the lights, {others / steps:.4f} s without: {mine / others - 1:+.1%}"


def _seconds(steps: int) -> float:
    whole, step = [0.0], Trainer.step

    def timed(*parts: Any) -> None:
        begin = time.process_time()
        step(*parts)
        whole[0] += time.process_time() - begin

    small = {"rollout.prompts": 32, "steps": steps, "eval.every": 0, "eval.problems": 1, "eval.k": 1}
    with patch.object(Trainer, "step", timed), tempfile.TemporaryDirectory() as folder:
        rpg.train(output=f"{folder}/run", **(SMALL | small))
    return whole[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of runs")
    parser.add_argument("--table", action="store_true", help="make no run: the tables of those recorded")
    parser.add_argument("--again", type=int, metavar="N", help="with other seeds, N further; the tables of these alone")
    parser.add_argument("--cost", action="store_true", help="make no run of these: what the lights cost a step")
    asked = parser.parse_args()
    if asked.cost:
        print(cost())
        return
    record = recorded() if RECORD.exists() and asked.again is None else {}
    for kind, runs in {"failing": FAILING, "healthy": HEALTHY}.items():
        for name, settings in runs.items():
            if asked.table or (asked.only and name not in asked.only):
                continue
            seed = settings.get("seed", 0) + (asked.again or 0)
            record.setdefault(kind, {})[name] = make(name, settings | {"seed": seed})
            if asked.again is None:
                write(record)
            print(name, fall(record[kind][name]), lit(record[kind][name]), flush=True)
    print(table(record), compared(record), sep="\n\n")


if __name__ == "__main__":
    main()
