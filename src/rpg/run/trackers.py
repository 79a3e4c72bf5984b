"""Where a run's rows go besides its files: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import install

Row = Mapping[str, Any]
TEXTS = 4  # responses shown in TensorBoard at an evaluation


class SetupError(ValueError):
    """A tracker was asked for that cannot work on this machine: told before the run starts."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told at the start."""

    folder: Path
    name: str
    config: dict[str, Any]
    ids: Mapping[str, str]
    resume: int | None  # the checkpoint's step
    logged: int  # the last step that the run wrote before it was resumed


class Tracker:
    name = ""

    def open(self) -> None: ...

    def row(self, row: Row) -> None: ...

    def texts(self, step: int, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class TensorBoard(Tracker):
    """Event files in the run's folder; the import (0.13 s after torch's) waits for the first row.

    TensorBoard's own writer has a thread that opens the file by its path again and again, and prints a traceback when
    the folder is gone. This one has the file open, as the run has its others.
    """

    name = "log.tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._file: Any = None

    def _open(self) -> None:
        """A file of this process's own. On a resume it says from which step on the older ones are outdated."""
        try:
            self._made_by = importlib.import_module("torch.utils.tensorboard")
            records = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            raise RuntimeError(f"needs: {install('tensorboard')}") from error
        folder = self._run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = records.RecordWriter((folder / name).open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        if self._run.resume is not None:
            start = self._made_by.writer.SessionLog.START
            self._add(step=self._run.resume + 1, session_log={"status": start})

    def _add(self, **event: Any) -> None:
        self._file.write(self._made_by.writer.Event(wall_time=time.time(), **event).SerializeToString())

    def _write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        if self._file is None:
            self._open()
        make = getattr(self._made_by.summary, kind)
        self._add(step=step, summary={"value": [make(name, value).value[0] for name, value in values.items()]})

    def row(self, row: Row) -> None:
        self._write(row["step"], "scalar", numbers(row))

    def texts(self, step: int, rows: Sequence[Row]) -> None:
        self._write(step, "text", {f"samples/{number}": markdown(row) for number, row in enumerate(rows[:TEXTS])})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def numbers(row: Row) -> dict[str, float]:
    """The row's numbers, without its step; what is not finite stays so."""
    values = {name: plain(value) for name, value in row.items() if name != "step"}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def plain(value: Any) -> Any:
    """Scalars of torch and numpy as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def markdown(row: Row) -> str:
    """A response as a text summary; indented, since it may hold any mark-up of its own."""
    facts = "  ".join(f"**{key}** {row[key]}" for key in ("reward", "answer", "length", "finished") if key in row)
    texts = [str(row.get(key, "")).replace("\n", "\n    ") for key in ("prompt", "response")]
    return f"{facts}\n\n    {texts[0]}\n\nresponse:\n\n    {texts[1]}"


def import_tracker(name: str) -> Any:
    """A tracker's package; a mistake of the set-up, so it stops the run before it starts."""
    needs = f"log.{name} needs: {install(f'rpg-rl[{name}]')}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise SetupError(needs) from error
        raise SetupError(f"log.{name}: {name} does not import: {error}") from error
    if not hasattr(module, "init"):  # a folder of that name in the working directory
        raise SetupError(needs)
    return module


class HostedTracker(Tracker):
    """A run at a service. Steps that it had before a resume are the same bits again, and are not sent twice."""

    package = ""

    def __init__(self, run: TrackedRun, module: Any, project: str) -> None:
        self._run, self._module, self._project = run, module, project
        self._hosted: Any = None
        self._next = run.logged + 1  # first step to send

    def row(self, row: Row) -> None:
        if row["step"] >= self._next:
            self._hosted.log(numbers(row), step=row["step"])


class Wandb(HostedTracker):
    name, package = "log.wandb", "wandb"

    def open(self) -> None:
        online = os.environ.get("WANDB_MODE", "online") == "online" and self._module.setup().settings.mode == "online"
        if online and not self._module.login(prompt=False):  # raises without a network
            raise SetupError("log.wandb: no API key; run `wandb login`, or set WANDB_MODE=offline")
        settings = self._module.Settings(silent=True, console="off", init_timeout=60, finish_timeout=60)
        self._hosted = self._module.init(
            project=self._project,
            id=self._run.ids["wandb"],
            name=self._run.name,
            config=self._run.config,
            dir=str(self._run.folder),
            resume="allow",
            settings=settings,
        )
        self._next = self._hosted.step or self._next  # what the server has; 0 offline

    def close(self) -> None:
        self._hosted.finish()


class Trackio(HostedTracker):
    """Local, in $TRACKIO_DIR, unless $TRACKIO_SPACE_ID or $TRACKIO_SERVER_URL say otherwise."""

    name, package = "log.trackio", "trackio"

    def open(self) -> None:
        resume = "never" if self._run.resume is None else "allow"
        name = f"{self._run.name}-{self._run.ids['trackio']}"  # trackio knows a run by its name
        with contextlib.redirect_stdout(io.StringIO()):  # without the lines that it prints
            self._hosted = self._module.init(
                project=self._project, name=name, config=self._run.config, resume=resume, embed=False
            )
        self._next = (
            getattr(self._hosted, "_next_step", 0) or self._next
        )  # a killed run's last rows may not have arrived

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # without the lines that it prints
            self._module.finish()  # not the run's own: that would be finished, and say so, once more at exit
