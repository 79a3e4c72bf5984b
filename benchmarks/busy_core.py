"""`rpg train` on a CPU of which another program takes a core: tokens a second, quiet and busy, in turns.

    python benchmarks/busy_core.py [--repeats 3] [--spins 100 1000 10000]

"rpg" is the command as it is; "default" are threads that spin as long as OpenMP lets them; "passive" ones that never
do; then threads that spin so often. Medians over steps and repeats of the built-in run. Only on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 8
BUSY = [sys.executable, "-c", "while True: pass"]
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def speeds(variables: dict[str, str], busy: bool) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name not in THREADS} | variables
    other = subprocess.Popen(BUSY) if busy else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = ["train", "--output", folder, "--steps", str(STEPS), "--eval.every", "0", "--log.view", "none"]
            command = [sys.executable, "-m", "rpg", *run, "--checkpoint.keep", "0"]
            subprocess.run(command, env=environment, check=True, capture_output=True)
            rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
            return [row["speed/tokens_per_s"] for row in rows if "speed/tokens_per_s" in row][1:]
    finally:
        if other is not None:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spins", nargs="*", default=[])
    how = parser.parse_args()
    settings = {"rpg": {}, "default": {"GOMP_SPINCOUNT": "300000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}
    settings |= {"one thread": {"OMP_NUM_THREADS": "1"}}
    settings |= {f"{count} spins": {"GOMP_SPINCOUNT": count} for count in how.spins}
    found: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in settings for busy in (False, True)}
    for _ in range(how.repeats):
        for name, busy in found:
            found[name, busy] += speeds(settings[name], busy)
    print(f"{os.cpu_count()} cores, medians of {how.repeats} × {STEPS - 1} steps\n{'':12}  quiet    busy   kept")
    for name in settings:
        quiet, busy = (statistics.median(found[name, kind]) for kind in (False, True))
        print(f"{name:12}{quiet:7,.0f} {busy:7,.0f} {busy / quiet:6.0%}")


if __name__ == "__main__":
    main()
