"""Runs of a study as processes of their own, some at a time: begun, resumed, stopped, and looked at when they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..console import duration, percent
from ..costs.memory import GPU_SHARE
from ..run.auto import settled
from ..run.config import Config
from ..run.folder import SETTINGS, is_run, locked
from ..run.logs import write_whole
from ..run.settings import build, flat, to_yaml
from ..run.signals import Stop
from .choose import choice
from .design import NO_MATTER, PlannedRun, Study
from .results import FILE, Row, header, read_results, read_summary, row_of, write_results
from .scores import final_mean

LOOK = 0.1  # seconds between looks at the processes
PATIENCE = 20.0  # seconds that a run has to end at once
STOPPED = (129, 130, 143)  # exit codes of rpg train that a signal has stopped
SETUP = 2  # exit code of rpg train: a mistake in the settings, of which nothing came
OTHERS = "results-before.jsonl"
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class SetupFailed(ValueError):
    """A run could not be begun: a mistake to mend, not a result."""


@dataclass
class Process:
    run: PlannedRun
    popen: subprocess.Popen[bytes]
    log: Path
    told: bool = False  # to stop, by us


@dataclass
class Runner:
    """``rows`` are the runs that have ended, by name; ``say`` is told each."""

    study: Study
    folder: Path
    jobs: int
    say: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)  # by arm, what is tuned
    deaths: dict[str, int] = field(default_factory=dict)  # runs that the system killed
    refused: dict[str, str] = field(default_factory=dict)  # runs that could not be set up, and why
    planned: tuple[PlannedRun, ...] = ()  # in the order of what they decide; of arms not tuned yet no more than that

    def go(self, minutes: float | None, retry_failed: bool = False) -> bool:
        """Until all is done, a signal comes or the minutes are over. Whether all is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        until = None if minutes is None else time.monotonic() + 60 * minutes
        with locked(self.folder):
            if retry_failed:
                self.say(f"{self._forget_failed()} failed runs are made again")
            self.rows = self._known()
            self._plan()
            self._write()
            stop, active = Stop(), dict[str, Process]()
            with stop.listening(lambda text: self.say(_of_study(text))):
                try:
                    self._loop(stop, active, until)
                finally:
                    self._end(active)
        if self.refused:
            first, *others = self.refused.values()
            raise SetupFailed(first + (f" (and so could {len(others)} other runs not)" if others else ""))
        return len(self.rows) == self.study.planned

    def _plan(self) -> None:
        """After each run that ends: what tuning has found since."""
        before = len(self.chosen)
        for arm in self.study.arms if self.study.candidates else ():
            if arm.name not in self.chosen and (found := choice(self.study, arm, self.rows)) is not None:
                self.chosen[arm.name] = found
        if not self.planned or len(self.chosen) > before:
            known = self.study.compared(self.chosen)
            ready = (run for run in known if not self.study.candidates or run.arm.name in self.chosen)
            self.planned = (*self.study.tuning, *ready)

    def _loop(self, stop: Stop, active: dict[str, Process], until: float | None) -> None:
        while True:
            for process in [each for each in active.values() if each.popen.poll() is not None]:
                del active[process.run.id]
                self._ended(process)
            over = until is not None and time.monotonic() >= until
            waiting = False
            if stop.by is not None or over:
                for process in active.values():
                    self._tell(process)
            else:
                waiting = self._fill(active)
            if not active and not waiting:
                if over and stop.by is None:
                    self.say("the study's minutes are over")
                return
            time.sleep(LOOK)

    def _fill(self, active: dict[str, Process]) -> bool:
        """Begins runs while there is room. Whether one has to wait: where a study was killed outright, its runs may be
        about to save still, and no two processes train in one folder."""
        leaving = 0
        for run in self.planned:
            if run.id in self.rows or run.id in active or run.id in self.refused:
                continue
            if len(active) + leaving >= self.jobs:
                break
            if _in_use(self.folder / run.id):
                leaving += 1
            elif not self._adopt(run):
                active[run.id] = self._begin(run)
        return leaving > 0

    def _adopt(self, run: PlannedRun) -> bool:
        """Whether it has ended without a line: the study was killed in between, or its file was lost."""
        summary = read_summary(self.folder / run.id)
        if summary.get("status") not in ("finished", "failed"):
            return False
        if differing := self._differing(run):
            raise self._outdated(run.id, differing)
        self._keep(row_of(run, self.folder / run.id, summary["status"], str(summary.get("message") or "")))
        return True

    # ---- a process ---------------------------------------------------------------------------------------------------

    def _begin(self, run: PlannedRun) -> Process:
        """Begun, or resumed where it was stopped."""
        output = self.folder / run.id
        settings = self.folder / "settings" / f"{run.id.replace('/', '.')}.yaml"
        log = self.folder / "logs" / f"{run.id.replace('/', '.')}.txt"
        for file in (settings, log):
            file.parent.mkdir(exist_ok=True)
        write_whole(settings, to_yaml(_as_run(run.config, output)))
        line = [sys.executable, "-m", "rpg", "train", "--config", str(settings)]
        line += ["--resume"] if is_run(output) else []
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // self.jobs))
        with log.open("ab") as said:
            popen = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | {"OMP_NUM_THREADS": threads, GPU_SHARE: str(1 / self.jobs)},
                start_new_session=True,  # Ctrl-C comes to us alone, and we tell the runs
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        return Process(run, popen, log)

    def _tell(self, process: Process) -> None:
        if not process.told:
            process.told = True
            process.popen.send_signal(signal.SIGINT)

    def _end(self, active: dict[str, Process]) -> None:
        """Whatever still runs when we leave in a hurry."""
        for process in active.values():
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGINT)
        until = time.monotonic() + PATIENCE
        for process in active.values():
            try:
                process.popen.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()

    def _ended(self, process: Process) -> None:
        """A row where it came to an end, also to a bad one; else it is begun again, now or by the next call."""
        run, code, output = process.run, process.popen.returncode, self.folder / process.run.id
        summary = read_summary(output)
        status, message = str(summary.get("status")), str(summary.get("message") or "")
        if code == SETUP and not process.told:
            self.refused[run.id] = f"{run.title} could not be set up: {_last_line(process.log)}"
            if not self.rows:  # nothing has worked yet: a mistake to mend before anything else is tried
                raise SetupFailed(self.refused[run.id])
            self.say(self.refused[run.id])
            return
        if status not in ("finished", "failed"):
            if process.told or code in STOPPED:
                return
            self.deaths[run.id] = self.deaths.get(run.id, 0) + 1
            if self.deaths[run.id] <= self.study.config.retries:
                self.say(f"{run.title}: {_how(code)}; it is resumed")
                return
            status, message = "failed", f"{_how(code)}, {self.deaths[run.id]} times"
        self._keep(row_of(run, output, status, message))

    def _keep(self, row: Row) -> None:
        self.rows[row["run"]] = row
        if not self.study.config.keep_checkpoints:
            shutil.rmtree(self.folder / row["run"] / "checkpoints", ignore_errors=True)
        self._write()
        self._plan()
        score = percent(final_mean(row, self.study.config.test_set if row["part"] == "compare" else None))
        how = "" if row["status"] == "finished" else f", {row['status']}: {row['message']}"
        left = self.study.planned - len(self.rows)
        rest = fmean(row["wall"] or 0.0 for row in self.rows.values()) * left / self.jobs
        title = ("tuning " if row["part"] == "tune" else "") + f"{row['arm']}, seed {row['seed']}"
        title += "".join(
            f", {name} {x:g}" if isinstance(x, float) else f", {name} {x}" for name, x in row["tried"].items()
        )
        self.say(
            f"[{len(self.rows)}/{self.study.planned}] {title}: {score} in {duration(row['wall'])}{how}"
            + (f" (some {duration(rest)} left)" if left else "")
        )

    # ---- what is there already ---------------------------------------------------------------------------------------

    def _known(self) -> dict[str, Row]:
        """Of runs that ended in an earlier call; one with other settings than the study has now is refused."""
        rows = {row["run"]: row for row in read_results(self.folder)[1]} if (self.folder / FILE).is_file() else {}
        tuning = {run.id: run for run in self.study.tuning}
        self.rows = {name: row for name, row in rows.items() if name in tuning}
        self._plan()
        planned = tuning | {r.id: r for r in self.study.compared(self.chosen)}
        known = {name: row for name, row in rows.items() if name in planned}
        for name, row in known.items():
            if row["digest"] != planned[name].digest:
                raise self._outdated(name, self._differing(planned[name]))
        if away := len(rows) - len(known):
            shutil.copy(self.folder / FILE, self.folder / OTHERS)
            self.say(f"{away} runs are no part of the study any more; {self.folder / OTHERS} keeps their lines")
        return known

    def _outdated(self, name: str, differing: str) -> ValueError:
        return ValueError(
            f"{self.folder / name} was made with other settings than {self.study.file} has now{differing}: take them "
            "back, or another --output"
        )

    def _differing(self, run: PlannedRun) -> str:
        """A setting that the run's folder has otherwise; empty where there is none, or no folder."""
        with contextlib.suppress(ValueError):
            before = flat(build(Config, file=self.folder / run.id / SETTINGS))
            now = flat(settled(run.config))
            for path in now:
                if not path.startswith(NO_MATTER) and before.get(path) != now[path]:
                    return f" ({path} was {before.get(path)} and is {now[path]})"
        return ""

    def _forget_failed(self) -> int:
        """Failed runs are made again from the beginning: how many. Tuning is over where compared runs finished."""
        if not (self.folder / FILE).is_file():
            return 0
        study, rows = read_results(self.folder)
        over = {row["arm"] for row in rows if row["part"] == "compare" and row["status"] == "finished"}
        failed = [r for r in rows if r["status"] != "finished" and not (r["part"] == "tune" and r["arm"] in over)]
        for row in failed:
            shutil.rmtree(self.folder / row["run"], ignore_errors=True)
        write_results(self.folder, study, [row for row in rows if row not in failed])
        return len(failed)

    def _write(self) -> None:
        write_results(self.folder, header(self.study), self.rows.values())


def _as_run(config: Config, output: Path) -> Config:
    """What a run of a study does without, and one checkpoint to go on from."""
    keep: Any = replace(config.checkpoint, keep=1, best=False)
    log = replace(config.log, tensorboard=False, report=False, view="plain")
    return replace(config, output=str(output), checkpoint=keep, log=log)


def _in_use(folder: Path) -> bool:
    try:
        with locked(folder):
            return False
    except ValueError:
        return True
    except FileNotFoundError:
        return False


def _die_with_parent() -> None:
    """In the child: where the study is killed outright, its runs stop as by a signal, and save."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGTERM)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _of_study(text: str) -> str:
    return f"{text.partition(':')[0]}: each run finishes its present step and saves (again: at once)"
