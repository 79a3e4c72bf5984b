"""How far behind may the samples be? Optimiser steps a batch × methods on the built-in task.

    python benchmarks/lag.py [--lags 1 4 16 64] [--seeds 3] [--steps 30] [--rate 1] [--jobs 2] [--minutes M] [--json F]

A batch of 32 × 8 responses is cut into so many optimiser steps: the last of them sees samples that are as many steps
old. The learning rate is ``--rate`` times the built-in task's at 4 steps a batch, and goes with the square root of the
batch. Runs are made in the order of what they decide (all methods at one lag and seed first), several at a time, and
each that has ended stays in the JSON file: a second call goes on. A run that diverges is a row like any other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

METHODS = ("rpg-reinforce-urkl", "rpg-urkl", "dapo", "grpo", "cispo", "gspo")
RATE, USUAL = 5e-4, 4
COLUMNS = {
    "accuracy": "mean@8 at the end",
    "best": "best mean@8",
    "ess": "least ESS of a step",
    "clipped": "tokens cut, last 5 steps",
    "kl": "KL to the sampler, last 5 steps",
    "entropy": "entropy at the end",
}


def one(method: str, lag: int, seed: int, steps: int, rate: float, device: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", "--algorithm", method, "--seed", seed, "--steps", steps, "--output", f"{folder}/run"]
        run += [
            "--optim.minibatches",
            lag,
            "--optim.lr",
            rate * RATE * math.sqrt(USUAL / lag),
            "--optim.warmup",
            5 * lag // USUAL,
        ]
        run += [
            "--eval.every",
            max(1, steps // 3),
            "--device",
            device,
            "--log.view",
            "none",
            "--log.tensorboard",
            "false",
        ]
        run += ["--log.report", "false", "--checkpoint.keep", 0, "--insist"]
        threads_of = {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "rpg", *map(str, run)]
        done = subprocess.run(command, env=os.environ | threads_of, capture_output=True, text=True)
        path = Path(folder) / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    trained = [row for row in rows if "ess" in row]
    scores = [row["eval/arithmetic/mean@8"] for row in rows if "eval/arithmetic/mean@8" in row]
    last = trained[-5:]
    result: dict[str, Any] = {
        "method": method,
        "lag": lag,
        "seed": seed,
        "steps": len(trained),
        "code": done.returncode,
    }
    if done.returncode:
        result["message"] = done.stderr.strip().splitlines()[-1:]
    if trained and scores:
        result |= {
            "accuracy": scores[-1],
            "best": max(scores),
            "ess": min(row["ess"] for row in trained),
            "clipped": statistics.mean(row.get("clip/low", 0) + row.get("clip/high", 0) for row in last),
            "kl": statistics.mean(row["kl/old"] for row in last),
            "entropy": last[-1].get("entropy", math.nan),
            "ess_by_step": [round(row["ess"], 4) for row in trained],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--lags", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {(row["method"], row["lag"], row["seed"]) for row in rows}
    grid = itertools.product(range(args.seeds), args.lags, args.methods)
    wanted = [(method, lag, seed) for seed, lag, method in grid if (method, lag, seed) not in known]
    end = time.monotonic() + 60 * args.minutes

    def run(key: tuple[str, int, int]) -> None:
        if time.monotonic() < end:
            rows.append(one(*key, args.steps, args.rate, args.device, args.threads))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "ess_by_step"}), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=0))

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, wanted))
    table(rows, args.methods, args.lags)


def table(rows: list[dict[str, Any]], methods: list[str], lags: list[int]) -> None:
    """Means over the seeds that ended, and how many."""
    print("| steps a batch | method | " + " | ".join(COLUMNS.values()) + " | runs |")
    print("|---:|---|" + "---:|" * (len(COLUMNS) + 1))
    for lag, method in itertools.product(lags, methods):
        mine = [row for row in rows if (row["lag"], row["method"]) == (lag, method)]
        whole = [row for row in mine if "accuracy" in row]
        if not mine:
            continue
        cells = [f"{statistics.mean(row[name] for row in whole):.3g}" if whole else "" for name in COLUMNS]
        print(f"| {lag} | {method} | " + " | ".join(cells) + f" | {len(whole)} of {len(mine)} |")


if __name__ == "__main__":
    main()
