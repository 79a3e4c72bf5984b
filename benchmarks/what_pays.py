"""Sampling ahead, groups that serve again, prompts that are chosen: which of them reaches an accuracy sooner?

    python benchmarks/what_pays.py --target 0.9 [--seeds 3] [--json FILE] [-- any flags of rpg train]
    python benchmarks/what_pays.py --target 0.38 -- --config recipes/gsm8k/qwen2.5-coder-0.5b/dapo.yaml --model FOLDER

Each by itself, and all together, beside the plain loop: the cases take turns, seed by seed. Counted are seconds of
steps without evaluations, and tokens sampled, until the first evaluation at the target or above. Runs that have ended
stay in the JSON file, and a second call goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

AHEAD, REUSE, CHOOSE = ["--rollout.ahead", "1"], ["--offpolicy.reuse", "2"], ["--rollout.choose", "signal"]
CASES = {
    "the plain loop": [],
    "rollout.ahead 1": AHEAD,
    "offpolicy.reuse 2": REUSE,
    "rollout.choose signal": CHOOSE,
    "all three": [*AHEAD, *REUSE, *CHOOSE],
}


def one(case: str, seed: int, target: float, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = [
            "train",
            "--output",
            f"{folder}/run",
            "--seed",
            str(seed),
            "--log.view",
            "none",
            "--checkpoint.keep",
            "0",
        ]
        run += ["--log.tensorboard", "false", "--log.report", "false", *options, *CASES[case]]
        done = subprocess.run([sys.executable, "-m", "rpg", *run], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds, reached, scores = 0.0, None, []
    for row in rows:
        seconds += row.get("time/step", 0.0) - row.get("time/eval", 0.0)
        score = next((v for k, v in row.items() if k.startswith("eval/") and "/mean@" in k and k[-1].isdigit()), None)
        if score is not None:
            scores.append(score)
            if reached is None and score >= target:
                reached = {"steps": row["step"], "seconds": seconds, "tokens": row.get("tokens_total", 0)}
    trained = [row for row in rows if "ess" in row]
    sampled, used = (sum(row[name] for row in trained) for name in ("groups/sampled", "groups/kept"))
    again = sum(row.get("replay/groups", 0.0) for row in trained)
    return {
        "case": case,
        "seed": seed,
        "reached": reached,
        "last": scores[-1],
        "sampled_for_one": sampled / (used - again),
        "ess": statistics.mean(row["ess"] for row in trained),
        "lag": max(row.get("lag/max", 0.0) for row in trained),
    }


def table(rows: list[dict[str, Any]], target: float) -> None:
    to = f"to {target:.0%}"
    print(f"| {'':21} | seconds {to} | tokens {to} | of plain | steps | groups sampled for one | ESS |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    plain = None
    for case in CASES:
        mine = [row for row in rows if row["case"] == case]
        there = [row["reached"] for row in mine if row["reached"]]
        if not mine:
            continue
        ratio, sampled = "", f"{statistics.mean(row['sampled_for_one'] for row in mine):.2f}"
        ess = f"{statistics.mean(row['ess'] for row in mine):.3f}"
        if not there:
            print(f"| {case:21} | not reached | | | | {sampled} | {ess} |")
            continue
        seconds, tokens, steps = (statistics.mean(at[name] for at in there) for name in ("seconds", "tokens", "steps"))
        plain = tokens if plain is None and case == "the plain loop" else plain
        if plain:
            ratio = f"{tokens / plain:.2f}"
        some = "" if len(there) == len(mine) else f" ({len(there)} of {len(mine)} runs)"
        print(f"| {case:21} | {seconds:.0f}{some} | {tokens:,.0f} | {ratio} | {steps:.0f} | {sampled} | {ess} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {(row["case"], row["seed"]) for row in rows}
    for seed, case in itertools.product(range(args.seeds), CASES):
        if (case, seed) not in known:
            rows.append(one(case, seed, args.target, args.options))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=0))
    table(rows, args.target)


if __name__ == "__main__":
    main()
