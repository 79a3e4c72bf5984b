"""What a page, and a resume, of a run of 100,000 steps need: python scripts/long_run.py [STEPS]

The run is made up: rows with as many numbers as real ones, 16 responses a step, an evaluation every 10 steps.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = [f"metric/{i}" for i in range(20)] + [f"time/{name}" for name in ("rollout", "reward", "train", "step")]
NAMES += ["reward/mean", "reward/solved", "entropy", "kl/old", "kl/ref", "clip/low", "clip/high", "ess", "grad_norm"]
NAMES += ["length/mean", "length/max", "ratio/p01", "ratio/p99", "tokens_total", "speed/tokens_per_s", "skipped"]
SCORES = [f"eval/arithmetic/{name}" for name in ("mean@8", "mean@8_low", "mean@8_high", "pass@1", "pass@8")]
WAYS = {
    "page": "from rpg import report; report.write([report.read_run(folder)], folder / 'report.html')",
    "resume": "from rpg.run.config import LogConfig\nfrom rpg.run.folder import read_rows\n"
    "from rpg.run.logs import RunLogs\nfrom rpg.run.view import make_view\n"
    "with RunLogs(folder, LogConfig(tensorboard=False), 'long', {}, resume=steps - 5), "
    "make_view('plain', title='', steps=steps) as view:\n"
    "    view.history(read_rows(folder / 'metrics.jsonl', []))",
}


def make(folder: Path, steps: int) -> None:
    rng = random.Random(0)
    text = "".join(rng.choices("0123456789+-*=() answer\n", k=300))
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as samples:
        for step in range(steps + 1):
            scores = SCORES if step % 10 == 0 else ()
            row = {"step": step} | {name: rng.random() for name in (*(NAMES if step else ()), *scores)}
            metrics.write(json.dumps(row) + "\n")
            for i in range(16 if step else 0):
                group = {"step": step, "split": "train", "group": i // 8, "prompt": f"{step} {i // 8}\n", "answer": "7"}
                response = {"response": text, "reward": 1.0, "advantage": 0.1, "length": 120, "finished": True}
                samples.write(json.dumps(group | response) + "\n")


def measure(way: str, folder: Path, steps: int) -> None:
    """In this process: seconds without imports, those of the CPU, and the most memory that it had."""
    import rpg.report
    import rpg.run.logs  # noqa: F401

    begin, cpu = time.perf_counter(), time.process_time()
    exec(WAYS[way], {"folder": folder, "steps": steps})
    seconds, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{way}: {seconds:.1f} s ({time.process_time() - cpu:.1f} s of CPU), {peak:,.0f} MB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        steps = int(sys.argv[1]) if sys.argv[1:] else 100_000
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), steps)
            sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(Path(folder).iterdir())}
            print(f"{steps:,} steps: " + ", ".join(f"{name} {size:.0f} MB" for name, size in sizes.items()), flush=True)
            for way in WAYS:
                subprocess.run([sys.executable, __file__, "measure", way, folder, str(steps)], check=True)
            print(f"report.html: {(Path(folder) / 'report.html').stat().st_size / 1e6:.1f} MB")
