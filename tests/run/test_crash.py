"""Killed, or refused by the disk, wherever a run touches it: resumed, it ends in the bits of one that was not.

One point of each kind and one of each file are tried; RPG_CRASH=all tries every one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forked import Job, Server
from running import TINY, assert_same, bits, metrics

TESTS = Path(__file__).parents[1]
STEPS = 3
RUN = [
    *("train", *TINY, "--steps", STEPS, "--checkpoint.every", "1", "--checkpoint.keep", "1", "--eval.every", "2"),
    *("--rollout.prompts", "2", "--rollout.max_new_tokens", "12", "--eval.problems", "2", "--rollout.dynamic", "false"),
    *("--rollout.overlong", "false"),
]
ALL = os.environ.get("RPG_CRASH") == "all"
FAULTS = ("ENOSPC", "EIO")


@dataclass(frozen=True)
class Point:
    number: int
    kind: str
    path: str

    @property
    def file(self) -> str:
        """In the run's folder; else the folder itself, or the link to it."""
        parts = Path(self.path).parts
        return parts[1].removesuffix(".new") if len(parts) > 1 else parts[0][:7]


class Runs:
    """Runs that touch the disk in the same order, each in a folder of its own."""

    def __init__(self, server: Server, home: Path):
        self.server, self.home = server, home
        self.count = 0

    def start(self, at: int = 0, fault: str = "") -> tuple[Job, Path]:
        self.count += 1
        home = self.home / f"{self.count}"
        home.mkdir()
        how = (str(home / "runs"), str(home / "points"), at, fault)
        before = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import disk_points; disk_points.install(*{how!r})"
        return self.server.start(*RUN, before=before, cwd=home).wait(), home

    def go_on(self, home: Path) -> Path:
        """As a user would: resume the latest, or where there is none yet, start again. The run's folder."""
        again = ["train", "--resume"] if (home / "runs" / "latest" / "config.yaml").exists() else RUN
        saved = list(home.glob("runs/latest/checkpoints/step-*"))
        job = self.server.start(*again, cwd=home).wait()
        assert job.code == 0, job.text
        assert ("resumed from step" in job.out) == bool(saved), job.text  # and not from the beginning
        return (home / "runs" / "latest").resolve()


@pytest.fixture(scope="module")
def runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, tmp_path_factory.mktemp("crash"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> tuple[Path, list[Point]]:
    """A run that nothing happens to, and the points at which it touched the disk."""
    job, home = runs.start()
    assert job.code == 0, job.text
    lines = (home / "points").read_text().splitlines()
    return (home / "runs" / "latest").resolve(), [Point(n, *line.split(" ", 1)) for n, line in enumerate(lines, 1)]


def chosen(points: list[Point], sort: Callable[[Point], str]) -> list[Point]:
    """All, or one of each sort, from the beginning of a run to its end."""
    if ALL:
        return points
    sorts = [[point for point in points if sort(point) == name] for name in sorted({sort(point) for point in points})]
    return [found[len(found) * i // len(sorts)] for i, found in enumerate(sorts)]


def check(whole: Path, folder: Path, point: Point) -> None:
    try:
        assert_same(bits(whole), bits(folder))
        assert [row["step"] for row in metrics(folder)] == list(range(STEPS + 1))
        assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    except AssertionError as error:
        raise AssertionError(f"{point}: {error}") from error


def test_the_points_are_those_of_a_run(whole: tuple[Path, list[Point]]) -> None:
    """Each file of a run is among them, and each kind of call: else the sweep would be of nothing."""
    folder, points = whole
    assert {point.kind for point in points} >= {
        "mkdir",
        "open",
        "write",
        "fsync",
        "rename",
        "replace",
        "save",
        "symlink",
    }
    touched = {Path(point.path).parts[1] for point in points if len(Path(point.path).parts) > 1}
    assert {path.name for path in folder.iterdir()} <= touched
    assert len(points) > 100


def test_a_kill_at_any_point(runs: Runs, whole: tuple[Path, list[Point]]) -> None:
    for point in chosen(whole[1], lambda point: point.kind):
        job, home = runs.start(point.number)
        assert job.code == -signal.SIGKILL, (point, job.text)
        check(whole[0], runs.go_on(home), point)


def test_an_error_of_the_disk_at_any_point(runs: Runs, whole: tuple[Path, list[Point]]) -> None:
    """One line that says so, or nothing where the run can do without; and then it goes on."""
    for point in chosen(whole[1], lambda point: point.file):
        job, home = runs.start(point.number, FAULTS[point.number % 2])
        told = [line for line in job.err.splitlines() if line.strip()]
        assert "Traceback" not in job.text, (point, job.text)
        if point.file == "report.html":  # the run is whole without it
            assert job.code == 0, (point, job.text)
            assert told[0].startswith("warning: no report.html"), (point, job.text)
        else:
            assert (job.code, len(told)) in ((0, 0), (1, 1), (2, 1)), (point, job.text)
        check(whole[0], runs.go_on(home), point)
