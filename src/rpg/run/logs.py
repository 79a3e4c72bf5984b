"""What a run writes: metrics.jsonl, samples.jsonl, summary.json, and a row of each step to the trackers.

The files are the record: a failure to write one is an error. A tracker is a convenience: it fails with one warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from .config import LogConfig
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
    text = json.dumps(flat, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


class JsonlFile:
    """One JSON object a line, appended whole or not at all, and on its way to the disk when ``write`` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._open()

    def _open(self) -> None:
        with _naming("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)

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

    def empty(self) -> bool:
        return os.fstat(self._handle()).st_size == 0

    def last_step(self) -> int:
        """Of the last whole row; -1 if there is none."""
        steps = [row["step"] for row, _ in self._rows()]
        return max(steps, default=-1)

    def truncate_after(self, step: int) -> int:
        """Drop rows beyond ``step`` and a half-written last line; the rest stays as it is, byte for byte.
        Returns how many lines went. The file is replaced at once, or not at all."""
        with _naming("read", self.path), self.path.open("rb") as old:
            dropped = sum(1 for _ in old) - sum(int(row["step"] <= step) for row, _ in self._rows())
        if dropped:
            with _replacing(self.path) as new:
                new.writelines(line for row, line in self._rows() if row["step"] <= step)
            self.close()
            self._open()
        return dropped

    def _rows(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Whole rows with their bytes. Only the last line may be broken: a run was killed while it wrote."""
        broken = 0
        with _naming("read", self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if broken:
                    raise LogError(f"cannot read {self.path}: line {broken} is not a row of a run; remove it to resume")
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row, line
                else:
                    broken = number

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
        file.write(text.encode("utf-8", "replace"))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the place of this one: the old content or the new, never a part of it."""
    new = path.with_name(path.name + ".new")
    try:
        with _naming("write", path), new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


# ---- a run -----------------------------------------------------------------------------------------------------------


def _to_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class RunLogs:
    """Everything a run logs to. A context manager; ``warn`` is told, once each, about trackers that gave up.

    resume  the checkpoint's step: rows beyond it are dropped and trackers go on with the same run; -1 drops all.
            None starts a new run, and refuses a folder that holds metrics already.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LogConfig,
        run_name: str,
        config_dict: Mapping[str, Any],
        *,
        resume: int | None = None,
        warn: Warn = _to_stderr,
    ) -> None:
        self.folder = Path(folder)
        self._warn = warn
        self._trackers: list[Tracker] = []
        projects = {Wandb: config.wandb, Trackio: config.trackio}
        asked = {kind: project for kind, project in projects.items() if project}
        modules = {kind: import_tracker(kind.package) for kind in asked}  # mistakes are told before anything is started
        self._metrics = JsonlFile(self.folder / "metrics.jsonl")
        self._samples = JsonlFile(self.folder / "samples.jsonl")
        logged = -1
        if resume is None:
            if not self._metrics.empty():
                raise LogError(f"{self._metrics.path} holds a run already: resume it, or choose another output")
            self._samples.truncate_after(-1)
        else:
            logged = self._metrics.last_step()
            self._metrics.truncate_after(resume)
            self._samples.truncate_after(resume)
        ids = self._ids([kind.package for kind in asked], new=resume is None)
        run = TrackedRun(self.folder, run_name, dict(config_dict), ids, resume, logged)
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
