"""samples.jsonl: all of a short run's responses, of a long one whole groups from places evenly over the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from ..run.folder import read_rows
from .metrics import Row, finite

WHOLE = 8 * 2**20  # bytes that are read whole
PLACES = 200  # in a longer file
WINDOW = 2**20  # bytes in which a group is looked for
CHUNK = 2**20


def group_of(sample: Row) -> tuple[Any, ...]:
    """Responses to one prompt at one step belong together."""
    prompt = sample.get("prompt")
    about = (str(sample.get("split", "train")), str(sample.get("group", 0)), "" if prompt is None else str(prompt))
    return (int(sample["step"]), *about)


def read_responses(path: Path, problems: list[str]) -> tuple[list[Row], int]:
    """Rows, and how many there were to choose from."""
    try:
        size = path.stat().st_size
        if size > WHOLE:
            with path.open("rb") as file:
                return _thinned(file, size), _lines(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}")
        return [], 0
    rows = [row for row in read_rows(path, problems) if finite(row.get("step")) is not None]
    return rows, len(rows)


def _lines(file: BinaryIO) -> int:
    file.seek(0)
    return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(CHUNK), b""))


def _thinned(file: BinaryIO, size: int) -> list[Row]:
    """From each place on the first group that is not cut by it, and the last of the file."""
    chosen: list[Row] = []
    end = 0  # of what was chosen
    for start in (place * size // PLACES for place in range(PLACES)):
        if start < end:
            continue
        groups = groupby(_rows(file, start), key=lambda pair: group_of(pair[0]))
        if start:
            next(groups, None)
        found = list(next(groups, (None, ()))[1])
        chosen += [row for row, _ in found]
        end = found[-1][1] if found else end
    last: list[tuple[Row, int]] = []
    for _, rows in groupby(_rows(file, max(end, size - WINDOW)), key=lambda pair: group_of(pair[0])):
        last = list(rows)
    return chosen + [row for row, _ in last]


def _rows(file: BinaryIO, start: int) -> Iterator[tuple[Row, int]]:
    """Those that begin in the window, each with where it ends."""
    file.seek(max(0, start - 1))
    if start:
        file.readline(WINDOW)  # the rest of one that began before
    while file.tell() < start + WINDOW and (line := file.readline(WINDOW)):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and finite(row.get("step")) is not None:
            yield row, file.tell()
