"""Sampling ahead, groups that serve again, prompts that are chosen, a cache in 8 bits: what reaches an accuracy sooner?

    python benchmarks/what_pays.py --target 0.9 [--seeds 3] [--cases plain ahead] [--json FILE] [-- flags of rpg train]
    python benchmarks/what_pays.py --target 0.38 -- --config recipes/gsm8k/qwen2.5-coder-0.5b/dapo.yaml --model FOLDER

Each by itself, and the first three together, beside the plain loop: the cases take turns, seed by seed. Counted are
seconds of steps without evaluations, and tokens sampled, until accuracy is at the target. An evaluation is noisy, so a
lucky one does not count: a run ends at its second evaluation at the target or above, evaluations that fall are pooled
with those before them (isotonic regression), and the target is reached on the line between two of what is left. Runs
that have ended stay in the JSON file, with all their evaluations, and a second call goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

AHEAD = ["--rollout.ahead", "1", "--rollout.cache", "kept"]
REUSE, CHOOSE = ["--offpolicy.reuse", "2"], ["--rollout.choose", "signal"]
CASES = {
    "plain": [],
    "ahead": AHEAD,
    "reuse": REUSE,
    "choose": CHOOSE,
    "ahead + choose": [*AHEAD, *CHOOSE],
    "all three": [*AHEAD, *REUSE, *CHOOSE],
    "8 bits": ["--rollout.cache_dtype", "fp8"],
}
QUIET = ["--log.view", "none", "--checkpoint.keep", "0", "--log.tensorboard", "false", "--log.report", "false"]
Row = dict[str, Any]


def one(case: str, seed: int, target: float, options: list[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", "--output", f"{folder}/run", "--seed", str(seed), *QUIET, *options, *CASES[case]]
        path, said = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "said"
        with said.open("w") as errors:
            process = subprocess.Popen([sys.executable, "-m", "rpg", *run], stdout=errors, stderr=errors)
            while process.poll() is None:
                time.sleep(0.5)
                if sum(score >= target for *_, score in scores(read(path))) >= 2:
                    process.terminate()  # it ends after its step
                    process.wait()
                    break
        rows = read(path)
        if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise RuntimeError(said.read_text())
    trained = [row for row in rows if "ess" in row]
    if not trained:
        raise RuntimeError("no step had anything to train on: more prompts, or longer responses")
    sampled, used = (sum(row[name] for row in trained) for name in ("groups/sampled", "groups/kept"))
    again = sum(row.get("replay/groups", 0.0) for row in trained)
    parts = {name: statistics.median(row[f"time/{name}"] for row in trained) for name in ("step", "rollout", "train")}
    return {
        "case": case,
        "seed": seed,
        "scores": scores(rows),
        "sampled_for_one": sampled / (used - again),
        "ess": statistics.mean(row["ess"] for row in trained),
        "lag": statistics.mean(row.get("lag/mean", 0.0) for row in trained),
        "busy": statistics.mean(row.get("slots/busy", math.nan) for row in trained),
        "seconds": parts,
    }


def read(path: Path) -> list[Row]:
    """The whole lines that are there."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def scores(rows: list[Row]) -> list[tuple[int, float, int, float]]:
    """Of each evaluation: steps, seconds of these, tokens sampled, accuracy."""
    seconds, found = 0.0, []
    for row in rows:
        seconds += row.get("time/step", 0.0) - row.get("time/eval", 0.0)
        score = next((v for k, v in row.items() if k.startswith("eval/") and "/mean@" in k and k[-1].isdigit()), None)
        if score is not None:
            found.append((row["step"], seconds, row.get("tokens_total", 0), score))
    return found


def pooled(found: list[tuple[int, float, int, float]]) -> list[tuple[float, ...]]:
    """Evaluations that never fall: neighbours that do become their mean, at the mean of their places."""
    blocks: list[list[tuple[float, ...]]] = []
    for point in found:
        blocks.append([point])
        while len(blocks) > 1 and statistics.mean(p[3] for p in blocks[-2]) >= statistics.mean(
            p[3] for p in blocks[-1]
        ):
            last = blocks.pop()
            blocks[-1] += last
    return [tuple(statistics.mean(column) for column in zip(*block, strict=True)) for block in blocks]


def reached(row: Row, target: float) -> tuple[float, float, float] | None:
    """Steps, seconds and tokens to the target."""
    before = None
    for now in pooled(row["scores"]):
        if now[3] >= target:
            share = 1.0 if before is None else (target - before[3]) / (now[3] - before[3])
            begin = before or (0, 0.0, 0)
            return tuple(begin[i] + share * (now[i] - begin[i]) for i in range(3))  # type: ignore[return-value]
        before = now
    return None


def table(rows: list[Row], target: float) -> None:
    to = f"to {target:.0%}"
    print(f"| {'':14} | seconds {to} | of plain | tokens {to} | of plain | steps | s a step | groups for one | ESS |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    plain: tuple[float, ...] | None = None
    for case in CASES:
        mine = [row for row in rows if row["case"] == case]
        if not mine:
            continue
        rest = f"{statistics.mean(row['seconds']['step'] for row in mine):.2f} | "
        rest += f"{statistics.mean(row['sampled_for_one'] for row in mine):.2f} | "
        rest += f"{statistics.mean(row['ess'] for row in mine):.3f}"
        there = [found for row in mine if (found := reached(row, target))]
        if len(there) < len(mine):
            best = max(score for row in mine for *_, score in row["scores"])
            print(f"| {case:14} | {len(there)} of {len(mine)} runs, best {best:.1%} | | | | | {rest} |")
            continue
        steps, seconds, tokens = (statistics.mean(found[i] for found in there) for i in range(3))
        plain = (seconds, tokens) if case == "plain" else plain
        ratios = [f"{seconds / plain[0]:.2f}", f"{tokens / plain[1]:.2f}"] if plain else ["", ""]
        print(
            f"| {case:14} | {seconds:.0f} | {ratios[0]} | {tokens:,.0f} | {ratios[1]} | {steps:.0f} | {rest} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {(row["case"], row["seed"]) for row in rows}
    for seed, case in itertools.product(range(args.seeds), args.cases):
        if (case, seed) not in known:
            try:
                rows.append(one(case, seed, args.target, args.options))
            except RuntimeError as error:  # the other cases are worth having
                print(f"{case}, seed {seed}, failed: {error}", file=sys.stderr, flush=True)
                continue
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=0))
    table(rows, args.target)


if __name__ == "__main__":
    main()
