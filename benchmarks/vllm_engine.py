"""`rpg train` with vLLM as its engine, step by step: do the weights arrive, and what does it cost?

    python benchmarks/vllm_engine.py --model FOLDER --data FOLDER --steps 6
    python benchmarks/vllm_engine.py --model FOLDER --data FOLDER --cases vllm asleep stale --json steps.json
    python benchmarks/vllm_engine.py --model FOLDER --recipe builtin/dapo -- --rollout.prompts 4  # on a CPU, a tiny one

Cases:

    native  the default engine
    vllm    rollout.engine=vllm
    asleep  the same, put to sleep whenever the model is trained, as `rpg train` does where memory runs out
    stale   the same without new weights after the first: what the comparison says if they did not arrive

Of each step: seconds of sampling, of these vLLM's new weights (waking up included), of training; the memory in use on
the GPU by all when sampling ended, and when training did (what torch keeps for later counts); and the engine's
log-probabilities against those of the trainer with the same weights: KL a token and the largest |log ratio|. They stay
as small as rounding makes them while the weights arrive. FlashInfer and the hub are left alone, as in trl_run.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from what_pays import QUIET, read

CASES = ("native", "vllm", "asleep", "stale")
Row = dict[str, Any]


def used() -> float:
    """GiB on the GPU, by whoever; 0 on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 2**30


def watched(case: str, notes: list[Row]) -> None:
    """Notes of each step: seconds of new weights while it samples, and memory. Evaluations are not steps."""
    from rpg.rollout.vllm import VllmEngine
    from rpg.training.phases import Phases

    sampling, training, ready, sync = Phases.sampling, Phases.training, VllmEngine._ready, VllmEngine.sync

    now: Row = {}

    def at_sampling(self: Any) -> None:
        if "sampled_gb" in now:  # a step has trained
            notes.append(now | {"trained_gb": used()})
            del now["sampled_gb"]
        now["sync"] = 0.0
        sampling(self)

    def at_training(self: Any) -> None:
        now["sampled_gb"] = used()
        if case == "asleep":
            self.engine.release()
        training(self)

    def at_ready(self: Any) -> None:
        used()
        begin = time.perf_counter()
        ready(self)
        used()
        now["sync"] = now.get("sync", 0.0) + time.perf_counter() - begin

    def at_sync(self: Any) -> None:
        if case != "stale":
            sync(self)

    Phases.sampling, Phases.training = at_sampling, at_training  # type: ignore[method-assign]
    VllmEngine._ready, VllmEngine.sync = at_ready, at_sync  # type: ignore[method-assign]


def inside(case: str, folder: Path, options: list[str]) -> None:
    """One run, in a process of its own."""
    from rpg import cli

    cli.more_than_core = lambda: None  # packages of its extra that no run here needs may be missing
    notes: list[Row] = []
    watched(case, notes)
    engine = "native" if case == "native" else "vllm"
    command = ["train", "--output", str(folder / "run"), *QUIET, "--eval.every", "0", "--eval.problems", "64", *options]
    try:
        code = cli.main([*command, "--rollout.engine", engine, "--rollout.old_logp", "recompute"])
    finally:
        (folder / "notes.json").write_text(json.dumps(notes))
    raise SystemExit(code)


def run(case: str, options: list[str]) -> Row:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [sys.executable, __file__, "--inside", str(folder), "--cases", case, "--", *options]
        code = subprocess.run(command, stdout=sys.stderr).returncode
        steps = [row for row in read(folder / "run" / "metrics.jsonl") if "time/train" in row]
        notes = json.loads((folder / "notes.json").read_text()) if (folder / "notes.json").exists() else []
    keys = {"rollout": "time/rollout", "train": "time/train", "tokens": "tokens"}
    keys |= {"kl": "mismatch/kl", "log_ratio": "mismatch/max_log_ratio"}
    found = [
        {"step": row["step"], **{name: row.get(key) for name, key in keys.items()}, **note}
        for row, note in zip(steps, notes, strict=False)
    ]
    return {"case": case, "code": code, "whole": time.perf_counter() - begin, "steps": found}


def table(rows: list[Row]) -> None:
    seconds = ["sampling s", "new weights s", "training s"]
    names = ["step", "tokens", *seconds, "sampled GiB", "trained GiB", "KL", "log ratio"]
    print(f"| case | {' | '.join(names)} |")
    print("|---|" + "---:|" * len(names))
    for row in rows:
        for step in row["steps"]:
            cells = [str(step["step"]), f"{step['tokens']:.0f}"]
            cells += [f"{step[name]:.2f}" for name in ("rollout", "sync", "train")]
            cells += [f"{step[name]:.1f}" for name in ("sampled_gb", "trained_gb")]
            cells += ["" if step[name] is None else f"{step[name]:.2g}" for name in ("kl", "log_ratio")]
            print(f"| {row['case']} | {' | '.join(cells)} |", flush=True)
        if row["code"]:
            print(f"{row['case']} ended with {row['code']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--data", help="folder of the task's files (RPG_DATA)")
    parser.add_argument("--recipe", default="gsm8k/qwen2.5-coder-0.5b/dapo")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="after --: settings of rpg train")
    args = parser.parse_args()
    if args.inside:
        inside(args.cases[0], args.inside, args.options)
    if not args.model:
        parser.error("--model is needed")
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for name, value in (offline | ({"RPG_DATA": args.data} if args.data else {})).items():
        os.environ.setdefault(name, value)
    options = ["--config", args.recipe, "--model", args.model, "--steps", str(args.steps), *args.options]
    rows = []
    for case in args.cases:
        rows.append(run(case, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows))
    table(rows)


if __name__ == "__main__":
    main()
