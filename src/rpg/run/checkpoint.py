"""Checkpoints that are whole or not there: checkpoints/step-000040/{model/, trainer/}.

A checkpoint is written into a hidden folder, hashed, flushed to the disk and renamed. One killed on the way leaves a
hidden folder, which the next save or load removes. Tensors are safetensors, the rest is JSON: nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .folder import locked, settings_of

FORMAT = 1
ENDED = {
    "failed": "it failed before its first",
    "finished": "it kept none",
    "stopped": "it was stopped before its first",
}
MANIFEST = "trainer/manifest.json"
NAME = re.compile(r"step-(\d{6,})")
SAVING, REPLACED, REMOVED = ".saving-", ".replaced-", ".removed-"  # hidden folders; only the second is worth keeping
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than the system allows",
    errno.EACCES: "no permission to write",
    errno.EPERM: "no permission to write",
    errno.EROFS: "the disk is read-only",
}


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; its text is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """One that verified when it was loaded."""

    step: int
    folder: Path
    state: dict[str, Any]
    run: str  # id of the run that wrote it; "" of a version that gave none

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What save() was given under this name, on the CPU."""
        try:
            return load_file(self.folder / "trainer" / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: cannot read the tensors of {name!r}: {_line(error)}") from error


def save(
    root: Path,
    step: int,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    run: str = "",
) -> Path:
    """Write a checkpoint, or raise CheckpointError and leave the earlier ones as they are.

    ``write_model`` fills the folder it is given (``model.save_pretrained``). ``state`` is JSON: tuples turn into lists.
    ``run`` is the run's id.
    """
    name = f"step-{step:06d}"
    document = json.dumps(dict(state))  # a mistake in it is the caller's: before anything is written
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, wait=True):
            _clean(root)
            folder = root / f"{SAVING}{name}"
            try:
                (folder / "model").mkdir(parents=True)
                (folder / "trainer").mkdir()
                write_model(folder / "model")
                for key, group in tensors.items():
                    save_file(_owned(group), folder / "trainer" / f"{key}.safetensors", metadata={"format": "pt"})
                (folder / "trainer" / "state.json").write_text(document, encoding="utf-8")
                _seal(folder, step, run)
                _put(folder, root / name, run)
            finally:
                _clean(root)
    except Exception as error:
        if _errno(error) is None:
            raise
        raise CheckpointError(_failure(root, name, error)) from error
    return root / name


def load(root: Path, warn: Callable[[str], None] = warnings.warn, run: str = "") -> Checkpoint | None:
    """The newest checkpoint that is whole, and not another run's; each newer one that is not goes to ``warn``, in one
    line."""
    if root.is_dir():
        with contextlib.suppress(OSError, ValueError), locked(root):  # else someone is saving, or we may only read
            _clean(root)
    for folder in reversed(list(folders(root).values())):
        try:
            found = read(folder)
        except CheckpointError as error:
            warn(str(error))
            continue
        if _is_of(run, found.run):
            return found
        warn(f"{folder} is another run's: left as it is")
    return None


def read(folder: Path, verified: bool = False) -> Checkpoint:
    """This checkpoint, verified, unless another process has just done so."""
    wrong = None if verified else verify(folder)
    if wrong is not None:
        raise CheckpointError(f"{folder} is damaged: {wrong}")
    try:
        state = json.loads((folder / "trainer" / "state.json").read_text(encoding="utf-8"))
        manifest = _manifest(folder)
        return Checkpoint(manifest["step"], folder, state, manifest.get("run", ""))
    except (OSError, ValueError) as error:  # gone or changed since: someone else is at work in there
        raise CheckpointError(f"{folder} cannot be read: {_line(error)}") from error


def folders(root: Path) -> dict[int, Path]:
    """The checkpoints by step, in order, whole or not."""
    names = ((NAME.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def model_of(name: str) -> str:
    """A model's name, or of a run's folder the model in its newest checkpoint."""
    if settings_of(Path(name)) is None:
        return name
    saved = folders(Path(name) / "checkpoints")
    if not saved:
        raise ValueError(lacking(Path(name)))
    return str(saved[max(saved)] / "model")


def lacking(run: Path) -> str:
    """Of a run without checkpoints, in one line: whether there will be one."""
    summary: Any = None
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    ended = ENDED.get(str(summary.get("status"))) if isinstance(summary, dict) else None
    return f"{run} has no checkpoint yet" if ended is None else f"{run} has no checkpoint: {ended}"


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in one line; None: every file has the size and the hash it was saved with."""
    try:
        manifest = _manifest(folder)
        files: dict[str, dict[str, Any]] = manifest["files"]
        if "trainer/state.json" not in files:
            return f"{MANIFEST} does not list trainer/state.json"
        if folder.name != f"step-{manifest['step']:06d}":
            return f"{MANIFEST} is of step {manifest['step']}"
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
        with ThreadPoolExecutor() as pool:
            for name, digest in zip(files, pool.map(_sha256, [folder / name for name in files]), strict=True):
                if digest != files[name]["sha256"]:
                    return f"{name} is not what was saved (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"cannot be read: {_line(error)}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be understood"
    return None


def prune(root: Path, keep: int, best: int | None = None, newest: int | None = None, run: str = "") -> None:
    """Delete all but the newest ``keep`` and the best. Those beyond step ``newest`` were damaged, or the run would have
    gone on from them: they go first. Other runs' stay."""
    checkpoints = {step: folder for step, folder in folders(root).items() if _is_of(run, _run_of(folder))}
    steps = [step for step in checkpoints if newest is None or step <= newest]
    kept = {*steps[max(len(steps) - keep, 0) :], best}
    doomed = [path for step, path in checkpoints.items() if step not in kept]
    if doomed:
        try:
            with locked(root, wait=True):
                for path in doomed:
                    path.rename(root / f"{REMOVED}{path.name}")
                _sync(root)
                _clean(root)
        except OSError as error:
            raise CheckpointError(f"cannot delete old checkpoints in {root}: {_line(error)}") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, no two with a byte in common: what safetensors writes. Neighbours in one storage stay."""
    owned = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, x in sorted(owned.items(), key=lambda item: item[1].data_ptr()):
        if x.data_ptr() < end:
            owned[name] = x.clone()
        else:
            end = x.data_ptr() + x.nbytes
    return owned


def _seal(folder: Path, step: int, run: str) -> None:
    """The manifest, and everything flushed to the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_sha256_and_sync, paths))
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    manifest = folder / MANIFEST
    about = {"format": FORMAT, "step": step, "run": run, "files": files}
    manifest.write_text(json.dumps(about, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(path)


def _put(folder: Path, target: Path, run: str) -> None:
    """Rename; a folder that is in the way stands aside until then, from where _clean brings it back after a crash.
    Another run's stands aside for good."""
    if target.exists() and not _is_of(run, other := _run_of(target)):
        target.rename(target.with_name(f"{target.name}-of-{other}"))
    elif target.exists():
        target.rename(target.with_name(f"{REPLACED}{target.name}"))
    folder.rename(target)
    _sync(target.parent)


def _clean(root: Path) -> None:
    """Under the lock: finish or undo what a killed process had begun."""
    for path in list(root.iterdir()):
        if path.name.startswith(REPLACED) and not (target := root / path.name.removeprefix(REPLACED)).exists():
            path.rename(target)
        elif path.name.startswith((SAVING, REPLACED, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_and_sync(path: Path) -> str:
    digest = _sha256(path)
    _sync(path)
    return digest


# ---- reading and errors ----------------------------------------------------------------------------------------------


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError
    return manifest


def _run_of(folder: Path) -> str:
    """ "" where it does not say, or cannot be read."""
    try:
        return str(_manifest(folder).get("run", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _is_of(run: str, other: str) -> bool:
    """What names no run lies in the folder of one, so it is that one's."""
    return not run or not other or run == other


def _failure(root: Path, name: str, error: Exception) -> str:
    """the disk is full: cannot write runs/a/checkpoints/step-000040; the last checkpoint is step 30 in …"""
    number = _errno(error)
    reason = REASONS.get(number or 0) or (os.strerror(number) if number else _line(error))
    last = None
    with contextlib.suppress(OSError):  # the folder itself cannot be read
        last = next(reversed(folders(root).items()), None)
    rest = f"the last checkpoint is step {last[0]} in {last[1]}" if last else "there is no earlier checkpoint"
    return " ".join(f"{reason}: cannot write {root / name}; {rest}".split())


def _errno(error: Exception) -> int | None:
    """The system's error behind this one (0: a nameless one). safetensors and tokenizers wrap theirs in text."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"\bcode: (\d+)|\(os error (\d+)\)", str(error))
    return int(match[1] or match[2]) if match else None


def _line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
