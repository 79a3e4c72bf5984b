"""A run's folder: one process at a time writes it, and its rows are read as they stand."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Two processes in one folder would spoil each other's files. The lock ends with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ValueError(f"another process is training in {folder}") from error
        yield
    finally:
        os.close(handle)


def read_rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file, as it stands. A last line without its end is still being written, and no fault;
    what else cannot be read is left out, and told to ``problems``."""
    lines = read_text(path, problems).split("\n")
    bad = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            bad += number < len(lines)
            continue
        if isinstance(row, dict):
            yield row
        else:
            bad += 1
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
