"""Output that nobody reads: the run goes on without, other commands say so in one line or are silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from running import ENV, TINY, Server, checkpoints, summary, without_lights

LOST = "nobody reads this run's output any more: it goes on without\n"
WHOLE = {"checkpoints", "config.yaml", "metrics.jsonl", "report.html", "samples.jsonl", "summary.json"}


def whole(folder: Path) -> bool:
    return set(os.listdir(folder)) >= WHOLE and summary(folder)["status"] == "finished" and bool(checkpoints(folder))


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_reader_that_stops_early_stops_no_run(server: Server, tmp_path: Path, both: bool) -> None:
    """rpg train | head -1, and rpg train 2>&1 | head -1"""
    pipe, folder = tmp_path / "pipe", tmp_path / "run"
    os.mkfifo(pipe)
    job = server.start("train", "--output", folder, *TINY, "--steps", 2, stdout=pipe, stderr=pipe if both else "")
    with pipe.open() as head:
        line = head.readline()
        assert line.startswith("rpg-reinforce-urkl"), line + head.read()
    assert job.wait().code == 0, job.text
    assert without_lights(job.err) == ("" if both else LOST)
    assert whole(folder)


@pytest.mark.parametrize(("to", "said"), [(None, ""), ("/dev/full", LOST)], ids=["closed", "full"])
def test_stdout_that_is_closed_or_full_stops_no_run(server: Server, tmp_path: Path, to: str | None, said: str) -> None:
    folder = tmp_path / "run"
    job = server.start("train", "--output", folder, *TINY, "--steps", 1, stdout=to, stderr="" if said else to)
    assert job.wait().code == 0, job.text
    assert without_lights(job.err) == said
    assert whole(folder)
    assert not any(line.startswith(("step", "eval")) for line in (folder / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("argv", [("algorithms", "--json"), ("train", "--dry-run"), ("tasks",)])
def test_other_commands_say_that_they_cannot_write(server: Server, tmp_path: Path, argv: tuple[str, ...]) -> None:
    full = server.start(*argv, stdout="/dev/full", cwd=tmp_path).wait()
    assert (full.code, full.err) == (1, f"rpg {argv[0]}: cannot write its output: No space left on device\n")
    closed = server.start(*argv, stdout=None, cwd=tmp_path).wait()
    assert (closed.code, closed.err) == (0, "")


def test_streams_closed_from_the_start() -> None:
    """As a shell closes them: no file of ours takes their numbers."""
    code = "import os; from rpg.console import open_streams; open_streams(); print(os.open('/dev/null', 0) > 2); "
    code += "import sys; print(sys.stdout.fileno(), sys.stderr.fileno(), file=open(sys.argv[1], 'w'))"
    run = [sys.executable, "-c", code]
    found = subprocess.run(["sh", "-c", '"$@" /dev/fd/3 3>&1 <&- >&- 2>&-', "sh", *run], env=ENV, capture_output=True)
    assert (found.returncode, found.stdout.split()) == (0, [b"1", b"2"])
