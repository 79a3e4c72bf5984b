"""Studies that nobody ran: rows of results.jsonl with drawn numbers, and a quick stand-in for ``rpg train``."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rpg.study.design import read_study
from rpg.study.outcome import outcome
from rpg.study.results import header

PROBLEMS, K = 1319, 4  # of GSM8K's test; responses to each
SPREAD = 0.015  # between seeds, as GSM8K has it at 0.5B
INTERACTION = 0.1  # what a training makes of a single problem, by chance

# It writes what a study reads of a run, holds the run's folder as a run does, takes its time to stop and says when it
# began. Whatever is not ``rpg train`` is the real Python's.
STAND_IN = """#!{python} -IS
import fcntl, json, os, re, signal, sys, time
if sys.argv[1:4] != ["-m", "rpg", "train"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
text = open(sys.argv[sys.argv.index("--config") + 1]).read()
folder, algorithm, steps, lr = (re.search("^ *" + name + ": (.*)$", text, re.M)[1] for name in
    ("output", "algorithm", "steps", "lr"))
def say(what):
    with open({log!r}, "a") as log:
        log.write(folder.split("/study/")[-1] + " " + what + "\\n")
if {refused!r} and {refused!r} in folder:
    print("no such thing")
    sys.exit(2)
os.makedirs(folder, exist_ok=True)
lock = os.open(folder, os.O_RDONLY)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    say("TWICE")
    sys.exit(2)
open(folder + "/run.id", "w").write("id")
stopped = []
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, lambda *_: stopped.append(1))
metrics = folder + "/metrics.jsonl"
done = open(metrics).read().count("\\n") if os.path.exists(metrics) else 0
say(f"resumed at {{done - 1}}" if "--resume" in sys.argv else "begun")
def end(status, code, message=""):
    open(folder + "/summary.json", "w").write(json.dumps({{"status": status, "message": message, "seconds": 1.0}}))
    sys.exit(code)
def row(step, mean=None):
    made = {{"step": step, "tokens_total": 100 * step, "time/step": 0.5}}
    if mean is not None:
        made |= {{"eval/arithmetic/mean@8": mean, "eval/arithmetic/solved": [round(8 * mean)] * 8}}
    with open(metrics, "a") as file:
        file.write(json.dumps(made) + "\\n")
best = {{"dapo": 0.75, "grpo": 0.5}}.get(algorithm, 0.25)
if not done:
    row(0, 0.125)
    done = 1
for step in range(done, int(steps) + 1):
    time.sleep({pause})
    if {fails!r} and {fails!r} in folder and step == 2:
        end("failed", 1, "the gradient is not finite")
    if {dies!r} and {dies!r} in folder and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    row(step, best if step == int(steps) else None)
    if stopped:
        time.sleep({saving})
        end("stopped", 143)
end("finished", 0)
"""


def stand_in(
    folder: Path, pause: float = 0.0, saving: float = 0.0, fails: str = "", dies: str = "", refused: str = ""
) -> str:
    """Python that puts it in place of the interpreter; where it writes is ``begun`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "stand-in", folder / "begun"
    values = {"pause": pause, "saving": saving, "fails": fails, "dies": dies, "refused": refused}
    file.write_text(STAND_IN.format(python=sys.executable, log=str(log), **values))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"import sys; sys.executable = {str(file)!r}"


def begun(folder: Path) -> list[str]:
    return (folder / "begun").read_text().splitlines() if (folder / "begun").exists() else []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- drawn results ---------------------------------------------------------------------------------------------------


class Drawn:
    """A study whose runs end with drawn responses. ``effects``: what a method adds to the share that is right."""

    def __init__(self, file: Path, text: str, problems: int = PROBLEMS):
        file.write_text(text)
        self.study = read_study(file)
        self.runs, self.problems = list(self.study.compared()), problems

    def rows(self, rng: np.random.Generator, **effects: float) -> list[dict[str, Any]]:
        """A problem has its difficulty, which a method that differs changes a little, and a seed too."""
        difficulty = rng.uniform(0.2, 0.75, self.problems)
        taste = {name: rng.normal(0, 0.05, self.problems) for name, effect in effects.items() if effect}
        made = []
        for run in self.runs:
            name = run.arm.method
            share = difficulty + effects.get(name, 0.0) + taste.get(name, 0.0)
            share = share + rng.normal(0, SPREAD) + rng.normal(0, INTERACTION, self.problems)
            made.append(row(run, rng.binomial(K, np.clip(share, 0, 1)).tolist()))
        return made

    def result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return outcome(header(self.study), rows)


def row(run: Any, solved: list[int], status: str = "finished", k: int = K) -> dict[str, Any]:
    mean = sum(solved) / k / len(solved)
    return {
        "run": run.id,
        "part": run.part,
        "arm": run.arm.name,
        "seed": run.seed,
        "tried": run.tried,
        "digest": run.digest,
        "status": status,
        "message": "" if status == "finished" else "it broke",
        "step": 20,
        "tokens": 1000,
        "seconds": 10.0,
        "wall": 12.0,
        "k": k,
        "evals": [[0, 0, 0.0, {"test": 0.3}], [20, 1000, 10.0, {"test": mean}]],
        "first": {"test": [1] * len(solved)},
        "last": {"test": solved},
        "curves": {},
    }
