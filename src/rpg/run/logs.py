"""What a run writes: metrics.jsonl, samples.jsonl, summary.json, and a row of each step to the trackers.

The files are the record: a failure to write one is an error. A tracker is a convenience: it fails with one warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..console import complain
from ..secrets import hidden
from .config import LogConfig
from .folder import NO_LINK
from .trackers import Row, SetupError, TensorBoard, TrackedRun, Tracker, Trackio, Wandb, import_tracker, plain

Warn = Callable[[str], None]


class LogError(OSError):
    """A file of the run could not be read or written; its text is one line that names it."""


@contextlib.contextmanager
def _naming(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except LogError:
        raise
    except OSError as error:
        raise LogError(f"cannot {verb} {path}: {error.strerror or error}") from error


# ---- files -----------------------------------------------------------------------------------------------------------


def encode(row: Row) -> bytes:
    """One line of JSON, "step" first; numbers that are not finite become null and are listed in "not_finite"."""
    flat: dict[str, Any] = {"step": row["step"]} if "step" in row else {}
    flat.update((name, plain(value)) for name, value in row.items())
    bad = [name for name, value in flat.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        flat.update(dict.fromkeys(bad), not_finite=bad)
    text = hidden(json.dumps(flat, ensure_ascii=False, allow_nan=False))
    return text.encode("utf-8", "replace") + b"\n"


ROW = re.compile(rb'\{"step": (-?\d{1,18})[,}]')  # as ``encode`` begins it


def _step_of(line: bytes) -> int | None:
    """None of what is no row. Most need no parsing, which for the samples of a long run would take minutes."""
    if line.endswith(b"}\n") and (match := ROW.match(line)):
        return int(match[1])
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


class JsonlFile:
    """One JSON object a line, appended whole or not at all, and on its way to the disk when ``write`` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows = 0  # written by this process, and before it those that truncate_after has counted
        self._file: int | None = None
        self._open()

    def _open(self) -> None:
        with _naming("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            how = os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINK | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, how, 0o666)

    def _handle(self) -> int:
        if self._file is None:
            raise LogError(f"cannot write {self.path}: it is closed")
        return self._file

    def write(self, *rows: Row) -> None:
        data = b"".join(map(encode, rows))
        file = self._handle()
        with _naming("write", self.path):
            before = os.fstat(file).st_size
            try:
                written = os.write(file, data)
                while written < len(data):  # a disk filling up takes a part first and fails at the next call
                    written += os.write(file, data[written:])
            except OSError:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    os.ftruncate(file, before)
                raise
        self.rows += len(rows)

    def empty(self) -> bool:
        return os.fstat(self._handle()).st_size == 0

    def last_step(self) -> int:
        """Of the last whole row; -1 if there is none."""
        return max((step for step, _ in self._lines() if step is not None), default=-1)

    def truncate_after(self, step: int) -> int:
        """Drop the rows from the first beyond ``step`` on, and a half-written last line; the rest stays as it is.
        Returns how many lines went."""
        kept = dropped = self.rows = 0
        for at, line in self._lines():
            if dropped or at is None or at > step:
                dropped += 1
            else:
                kept += len(line)
                self.rows += 1
        if dropped:
            with _naming("write", self.path):
                os.ftruncate(self._handle(), kept)
        return dropped

    def keep(self, name: str) -> str:
        """A copy of the file as it is now, under another name beside it. Gives the name."""
        kept = self.path.with_name(name)
        if not kept.exists():  # else kept by a resume that was killed, or the same steps were lost before
            with _replacing(kept) as copy, self.path.open("rb") as file:
                shutil.copyfileobj(file, copy)
        return name

    def _lines(self) -> Iterator[tuple[int | None, bytes]]:
        """Each with its step. Only the last may be broken, and has none: a run was killed while it wrote."""
        broken = 0
        with _naming("read", self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if broken:
                    raise LogError(f"cannot read {self.path}: line {broken} is not a row of a run; remove it to resume")
                step = _step_of(line)
                broken = number if step is None else 0
                yield step, line

    def sync(self) -> None:
        """Onto the disk itself, as before a checkpoint that must not be ahead of its metrics."""
        with _naming("write", self.path):
            os.fsync(self._handle())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def write_summary(folder: str | Path, summary: Row) -> None:
    write_whole(Path(folder) / "summary.json", json.dumps(_finite(summary), indent=1, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """NaN and infinity as None, at any depth."""
    value = plain(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    with _replacing(path) as file:
        file.write(hidden(text).encode("utf-8", "replace"))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the place of this one: the old content or the new, never a part of it."""
    new = path.with_name(path.name + ".new")
    try:
        with _naming("write", path):
            new.unlink(missing_ok=True)  # of a process that was killed, or a link out of a folder from elsewhere
            with new.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


# ---- a run -----------------------------------------------------------------------------------------------------------


def _to_stderr(text: str) -> None:
    complain(f"warning: {text}")


def check_trackers(config: LogConfig) -> None:
    """A mistake is told before anything is begun."""
    for kind in _asked(config):
        import_tracker(kind.package)


def _asked(config: LogConfig) -> dict[type[Wandb] | type[Trackio], str]:
    """The projects, by tracker."""
    return {kind: project for kind, project in ((Wandb, config.wandb), (Trackio, config.trackio)) if project}


class RunLogs:
    """Everything a run logs to. A context manager; ``warn`` is told, once each, about trackers that gave up.

    resume  the checkpoint's step: rows beyond it are dropped and trackers go on with the same run; -1 drops all.
            None starts a new run, and refuses a folder that holds metrics already.
    most    steps that a resumed run may drop; of more than that, the old files are kept, and named in ``aside``.
    logged  the last step that was in the metrics.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LogConfig,
        run_name: str,
        config_dict: Mapping[str, Any],
        *,
        resume: int | None = None,
        most: int = 0,
        warn: Warn = _to_stderr,
    ) -> None:
        self.folder = Path(folder)
        self._warn = warn
        self._trackers: list[Tracker] = []
        asked = _asked(config)
        modules = {kind: import_tracker(kind.package) for kind in asked}
        self._metrics = JsonlFile(self.folder / "metrics.jsonl")
        self._samples = JsonlFile(self.folder / "samples.jsonl")
        self.logged, self.aside = -1, list[str]()
        if resume is None:
            if not self._metrics.empty():
                raise LogError(f"{self._metrics.path} holds a run already: resume it, or choose another output")
            self._samples.truncate_after(-1)
        else:
            self.logged = self._metrics.last_step()
            files = self._metrics, self._samples
            if self.logged - max(resume, 0) > most:
                self.aside = [file.keep(f"{file.path.stem}-to-step-{self.logged:06d}.jsonl") for file in files]
            for file in files:
                file.truncate_after(resume)
        ids = self._ids([kind.package for kind in asked], new=resume is None)
        run = TrackedRun(self.folder, run_name, dict(config_dict), ids, resume, self.logged)
        if config.tensorboard:
            self._trackers.append(TensorBoard(run))
        for kind, project in asked.items():
            self._try(kind(run, modules[kind], project), lambda tracker: tracker.open())

    def _ids(self, names: list[str], *, new: bool) -> dict[str, str]:
        """The run's id at each tracker, kept in the folder so that a resumed run goes on with it."""
        path = self.folder / "trackers.json"
        ids: dict[str, str] = {}
        if names and not new and path.exists():
            with _naming("read", path):
                ids = dict(json.loads(path.read_text(encoding="utf-8")))
        if missing := [name for name in names if name not in ids]:
            ids.update((name, uuid.uuid4().hex[:8]) for name in missing)
            write_whole(path, json.dumps(ids, indent=1) + "\n")
        return ids

    def metrics(self, row: Row) -> None:
        """One row for one step; it names its "step"."""
        self._metrics.write(row)
        self._each(lambda tracker: tracker.row(row))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Responses of a step, all or none of them written."""
        rows = [{"step": step, **row} for row in rows]
        self._samples.write(*rows)
        if evaluated := [row for row in rows if row.get("split") == "eval"]:
            self._each(lambda tracker: tracker.texts(step, evaluated))

    def rows(self) -> dict[str, int]:
        """How many each file has."""
        return {file.path.name: file.rows for file in (self._metrics, self._samples)}

    def sync(self) -> None:
        """Metrics and samples onto the disk itself; call it before a checkpoint is made final."""
        self._metrics.sync()
        self._samples.sync()

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers = []
        self._metrics.close()
        self._samples.close()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            self._try(tracker, call)

    def _try(self, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        """Other people's services fail in their own ways: one warning, then without them."""
        try:
            call(tracker)
        except SetupError:
            raise
        except Exception as error:
            if tracker in self._trackers:
                self._trackers.remove(tracker)
            text = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"{tracker.name} is off for the rest of the run: {text[:300]}")
        else:
            if tracker not in self._trackers:
                self._trackers.append(tracker)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class NoLogs(RunLogs):
    """Of a rank that is not the first: nothing is written."""

    def __init__(self) -> None: ...

    def metrics(self, row: Row) -> None: ...

    def samples(self, step: int, rows: Sequence[Row]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
