"""A run's folder: which one it is, whose it is, one process at a time in it, and its rows read as they stand."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes out of one folder there
    fcntl = None  # type: ignore[assignment]

AUTO = "auto"  # output: the next free folder in RUNS
RUNS = Path("runs")
LATEST = RUNS / "latest"
MARKER = "run.id"
SETTINGS = "config.yaml"
WRITTEN = (MARKER, "metrics.jsonl", "summary.json")  # one of them, or a checkpoint, makes a folder a run's
A_FOLDER = getattr(os, "O_DIRECTORY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a link in a folder from elsewhere may lead to any file
FILES = (SETTINGS, "metrics.jsonl", "samples.jsonl", "summary.json", "report.html")
RECORDED = "recorded"  # of log.record: batches and weights for rpg replay
FOLDERS = ("checkpoints", "tensorboard", "bad", RECORDED, "model", "trainer")  # the last two are a checkpoint's


# ---- what is a run's folder ------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether a run has written here. Settings alone are a recipe, whatever their file is called."""
    return any(os.path.isfile(folder / name) for name in WRITTEN) or has_checkpoint(folder)


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step-*"))


def settings_of(folder: Path) -> Path | None:
    """The settings of the run in this folder. None: it is no run's, or they are gone."""
    file = folder / SETTINGS
    return file if os.path.isfile(file) and is_run(folder) else None


def holds_run(folder: Path) -> str | None:
    """The first thing in this folder that a new run would write over, or mix with its own."""
    for name in FILES:
        if (folder / name).is_file() and (folder / name).stat().st_size:
            return name
    return next((name for name in FOLDERS if (folder / name).is_dir() and any((folder / name).iterdir())), None)


# ---- which folder ----------------------------------------------------------------------------------------------------


def next_folder(name: str) -> Path:
    """runs/grpo-3, after runs/grpo-1 and runs/grpo-2."""
    taken = (path.name.removeprefix(f"{name}-") for path in RUNS.glob(f"{glob.escape(name)}-*"))
    return RUNS / f"{name}-{1 + max((int(text) for text in taken if text.isdecimal()), default=0)}"


def folder_to_resume(output: str) -> Path:
    """The run that is meant; auto: the latest, but for those that failed before they had anything to go on from."""
    if output != AUTO:
        return Path(output)
    if LATEST.is_symlink() and not _failed_at_once(followed(LATEST)):
        return followed(LATEST)
    check_place(RUNS)
    files = [file for path in RUNS.glob("*") if not path.is_symlink() and (file := settings_of(path)) is not None]
    runs = [path.parent for path in sorted(files, key=lambda path: path.stat().st_mtime)]
    if not runs:
        raise ValueError(f"nothing to resume: there is no run in {RUNS}/; name its folder with --output")
    return next((run for run in reversed(runs) if not _failed_at_once(run)), runs[-1])


def settings_to_resume(folder: Path) -> Path:
    check_place(folder)
    if (file := settings_of(folder)) is None:
        lacking = "run" if (folder / SETTINGS).is_file() else SETTINGS
        raise ValueError(f"nothing to resume in {folder}: there is no {lacking}")
    return file


def _failed_at_once(run: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        failed = json.loads((run / "summary.json").read_text(encoding="utf-8")).get("status") == "failed"
        return failed and not has_checkpoint(run)
    return False


def link_latest(folder: Path) -> None:
    """runs/latest leads to the run in runs/ that was begun last. What is no link stays as it is; where there can be
    none, the runs do without."""
    with contextlib.suppress(OSError, ValueError):
        target = folder.resolve().relative_to(RUNS.resolve())
        if target == Path() or _is_no_link(LATEST):
            return
        new = LATEST.with_name(f".latest-{new_id()}")
        try:
            new.symlink_to(target)
            new.replace(LATEST)
        finally:
            new.unlink(missing_ok=True)


def followed(path: Path) -> Path:
    """What a link leads to now, as it may lead elsewhere soon."""
    return path.parent / path.readlink() if os.path.islink(path) else path  # islink: also where one may not look


# ---- whose it is -----------------------------------------------------------------------------------------------------


class FolderLost(OSError):
    """The run's folder is gone; its text is one line."""


class RunFolder:
    """The folder that a run writes. It is known by its inode and by the run's id in it, not by its path: a run follows
    a folder that is moved, and never writes into another that has taken its place. One process has it at a time; that
    ends with the process, however it ends.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda text: None):
        self.path, self.run = path, ""
        self._warn = warn
        self._handle: int | None = None

    def begin(self, name: str | None = None) -> None:
        """A new run's, made where there is none; by ``name`` the next free one in runs/."""
        while name is not None:
            self.path = next_folder(name)
            self.path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another run was quicker
                self.path.mkdir()
                break
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        check_free(self.path)
        self.mark(new_id())

    def lock(self) -> None:
        handle = os.open(self.path, os.O_RDONLY | A_FOLDER)
        try:
            _lock(handle, self.path)
        except BaseException:
            os.close(handle)
            raise
        self.close()
        self._handle = handle

    def mark(self, run: str) -> None:
        self.run = run
        file = os.open(self.path / MARKER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666)
        try:
            os.write(file, f"{run}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)

    def marked(self) -> str:
        """The id of the run that the folder says it is of; "" where it does not."""
        return _read(self.path / MARKER)

    def lost(self) -> str | None:
        """Look, before anything is written: None, if the folder is this run's; else what has become of it."""
        if self._handle is None or self._is_mine(self.path):
            return None
        if (place := self._place()) is not None and self._is_mine(place):
            self._warn(f"{self.path} was moved to {place}: the run goes on there")
            self.path = place
            return None
        if not self.path.exists():
            return f"{self.path} was deleted while the run was going on"
        if self._is_same(self.path) and not self.marked():
            return f"{self.path} was emptied while the run was going on"
        return f"{self.path} was replaced by another folder while the run was going on"

    def begin_again(self) -> None:
        """Beside the one that was lost, for what can still be saved."""
        names = (f"{self.path.name}-saved{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
        self.path = next(path for name in names if not (path := self.path.with_name(name)).exists())
        self.begin()

    def _is_mine(self, path: Path) -> bool:
        return self._is_same(path) and _read(path / MARKER) == self.run

    def _is_same(self, path: Path) -> bool:
        assert self._handle is not None
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._handle))
        except OSError:
            return False

    def _place(self) -> Path | None:
        """Where the system says that the folder is now, if it does."""
        try:
            place, here = Path(os.readlink(f"/proc/self/fd/{self._handle}")), Path.cwd()
        except OSError:
            return None
        return place.relative_to(here) if place.is_relative_to(here) else place

    def fixed(self) -> Path:
        """A path that leads into the folder also while it is being moved, where the system has such; see named()."""
        path = Path(f"/proc/self/fd/{self._handle}")
        return self.path if self._handle is None or not path.exists() else path

    def named(self, text: str) -> str:
        """A message with the path that users know."""
        return text.replace(str(self.fixed()), str(self.path))

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_id() -> str:
    return uuid.uuid4().hex


def check_place(folder: Path, warn: Callable[[str], None] = lambda text: None) -> None:
    """That a run can write here; ``warn`` is told where runs/latest cannot lead to it."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(PermissionError):  # of a folder that may not be looked into: the next one
            if path.is_symlink() and not path.exists():
                raise ValueError(f"output: {path} is a link that leads nowhere; give a folder with --output")
            if not path.exists():
                continue
            if not path.is_dir():
                raise ValueError(f"output: {path} is a file; give a folder with --output")
            if not os.access(path, os.W_OK | os.X_OK):
                raise ValueError(f"output: cannot write into {path.absolute()}; give another folder with --output")
            break
    if _is_no_link(LATEST) and folder != LATEST and folder.absolute().is_relative_to(RUNS.absolute()):
        warn(
            f"{LATEST} is no link, so it stays as it is and will not lead to this run: move it away, or give a folder "
            "elsewhere with --output"
        )


def _is_no_link(path: Path) -> bool:
    return os.path.exists(path) and not os.path.islink(path)


def check_free(folder: Path) -> None:
    """For a new run."""
    check_place(folder)
    if (found := holds_run(folder)) is not None:
        raise ValueError(
            f"{folder} holds a run already ({found} is there): give --resume to go on with it, or another --output"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Two processes in one folder would spoil each other's files. The lock ends with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder, wait)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, wait: bool = False) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise ValueError(f"another process is training in {folder}") from error


# ---- its rows --------------------------------------------------------------------------------------------------------


def read_rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file, as it stands. A last line without its end is still being written, and no fault;
    what else cannot be read is left out, and told to ``problems``."""
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for text in file:
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError):
                    bad += text.endswith("\n") and not text.isspace()
                    continue
                if isinstance(row, dict):
                    yield row
                else:
                    bad += 1
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}")
    if bad:
        problems.append(f"{bad} line{'s' if bad > 1 else ''} of {path.name} could not be read")


def read_text(path: Path, problems: list[str]) -> str:
    """Empty where there is no such file, or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}")
        return ""
