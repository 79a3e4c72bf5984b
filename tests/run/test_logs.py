"""A run's files: whole lines, the same bytes after a resume, errors that name the file; and the trackers for real."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpg.console import install
from rpg.run import trackers
from rpg.run.config import LogConfig
from rpg.run.logs import JsonlFile, LogError, RunLogs, encode, write_summary

FILES = LogConfig(tensorboard=False)


def row(step: int, seconds: float = 1.0) -> dict[str, Any]:
    return {"reward/mean": 0.1 * step, "step": step, "kl/old": 1 / (step + 3), "skipped": 0, "time/step": seconds}


def sample(step: int, split: str = "train") -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "group": 0,
        "prompt": "2+2\n=",
        "response": "`4`\u2028é",
        "reward": 1.0,
        "length": 3,
    }


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_is_one_line_with_its_step_first_and_its_numbers_exact() -> None:
    given = {"loss": 0.1 + 0.2, "tiny": 5e-324, "whole": 7, "step": 3, "text": "a\nb"}
    line = encode(given)
    assert line.startswith(b'{"step": 3, ')
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == given
    assert b"0.30000000000000004" in line


def test_scalars_of_torch_and_numpy_are_numbers() -> None:
    line = json.loads(
        encode({"step": np.int64(2), "a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.float64(0.1)})
    )
    assert line == {"step": 2, "a": 0.5, "b": 0.25, "c": 0.1}


def test_what_is_not_finite_is_null_and_named() -> None:
    given = {"step": 1, "loss": math.nan, "kl": -math.inf, "ok": 1.0, "t": torch.tensor(math.inf)}
    assert json.loads(encode(given)) == {
        "step": 1, "loss": None, "kl": None, "ok": 1.0, "t": None, "not_finite": ["loss", "kl", "t"],
    }  # fmt: skip
    assert "not_finite" not in json.loads(encode({"step": 1, "ok": 1.0}))


def test_half_a_surrogate_does_not_stop_a_run() -> None:
    assert json.loads(encode({"step": 1, "response": "a\ud800b"}))["response"] == "a?b"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "new" / "metrics.jsonl")
    for step in range(3):
        file.write(row(step))
        assert [json.loads(line)["step"] for line in file.path.read_bytes().splitlines()] == list(range(step + 1))


def test_truncate_keeps_bytes_drops_later_rows_and_half_a_line(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "metrics.jsonl")
    for step in range(10):
        file.write(row(step))
    whole = file.path.read_bytes().splitlines(keepends=True)
    with file.path.open("ab") as to:
        to.write(whole[3][:17])
    assert file.last_step() == 9
    assert file.truncate_after(4) == 6
    assert file.path.read_bytes() == b"".join(whole[:5])
    assert file.truncate_after(4) == 0
    file.write(row(5))
    assert file.path.read_bytes() == b"".join(whole[:6])
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "tail", [b'{"step": 2, "lo', b'{"step": 1}', b"\x00\x00\x00", b"\n", b'{"step": 2,\n', b"[]\n"]
)
def test_only_the_last_line_may_be_broken(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(row(0)) + tail)
    assert JsonlFile(path).truncate_after(5) == 1
    assert path.read_bytes() == encode(row(0))
    broken = encode(row(0)) + tail.rstrip(b"\n") + b"\n" + encode(row(2))
    if tail == b'{"step": 1}':
        return  # a whole row, once it has its end
    path.write_bytes(broken)
    with pytest.raises(LogError, match=r"metrics\.jsonl: line 2 is not a row"):
        JsonlFile(path).truncate_after(5)
    assert path.read_bytes() == broken


def test_a_failed_truncation_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonlFile(tmp_path / "metrics.jsonl")
    file.write(row(0), row(1), row(2))
    before = file.path.read_bytes()

    def refuse(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(LogError, match=r"cannot write .*metrics\.jsonl: Input/output error"):
        file.truncate_after(0)
    assert file.path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_disk_that_fills_up_is_named_and_leaves_whole_lines(tmp_path: Path) -> None:
    """A real limit on the file's size: the kernel takes a part of the line, then refuses."""
    file = JsonlFile(tmp_path / "metrics.jsonl")
    file.write(row(0))
    before = file.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        with pytest.raises(LogError, match=r"^cannot write .*metrics\.jsonl: File too large$") as caught:
            file.write(row(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert isinstance(caught.value, OSError)
    assert file.path.read_bytes() == before
    file.write(row(1))  # room again
    assert len(file.path.read_bytes().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_is_named() -> None:
    with pytest.raises(LogError, match=r"cannot write /dev/full: No space left on device"):
        JsonlFile("/dev/full").write(row(0))


def test_a_summary_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, {"status": "running", "eval": {"a": {"last": math.nan, "all": [1.0, math.inf]}}})
    assert json.loads((tmp_path / "summary.json").read_text())["eval"] == {"a": {"last": None, "all": [1.0, None]}}
    before = (tmp_path / "summary.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LogError, match=r"cannot write .*summary\.json: No space left"):
        write_summary(tmp_path, {"status": "finished"})
    assert (tmp_path / "summary.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["summary.json"]


# ---- a run -----------------------------------------------------------------------------------------------------------


def train(folder: Path, first: int, last: int, seconds: float, **options: Any) -> None:
    with RunLogs(folder, FILES, "run", {}, **options) as to:
        for step in range(first, last + 1):
            to.samples(step, [sample(step), sample(step)])
            to.metrics(row(step, seconds))


def without_time(path: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read]


@pytest.mark.parametrize("checkpoint", [-1, 0, 4])
def test_a_resumed_run_has_the_files_of_one_never_stopped(tmp_path: Path, checkpoint: int) -> None:
    train(tmp_path / "whole", 0, 9, 1.0)
    train(tmp_path / "killed", 0, 7, 2.0)
    with (tmp_path / "killed" / "samples.jsonl").open("ab") as file:
        file.write(encode(sample(8))[:40])
    train(tmp_path / "killed", checkpoint + 1, 9, 3.0, resume=checkpoint)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes()
    assert without_time(whole / "metrics.jsonl") == without_time(killed / "metrics.jsonl")
    assert len(without_time(whole / "metrics.jsonl")) == 10


def test_two_runs_do_not_mix_in_one_folder(tmp_path: Path) -> None:
    train(tmp_path, 0, 2, 1.0)
    with pytest.raises(LogError, match=r"metrics\.jsonl holds a run already: resume it, or choose another output"):
        RunLogs(tmp_path, FILES, "run", {})


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    read.Reload()
    return read


@needs("tensorboard")
def test_tensorboard_reads_what_was_logged_and_a_resume_purges(tmp_path: Path) -> None:
    with RunLogs(tmp_path, LogConfig(), "run", {}) as to:
        for step in range(6):
            to.metrics(row(step))
        to.samples(5, [sample(5, "train"), sample(5, "eval")])
        # written already, for those who watch
        assert [e.step for e in events(tmp_path).Scalars("reward/mean")] == list(range(6))
    with RunLogs(tmp_path, LogConfig(), "run", {}, resume=3) as to:
        for step in range(4, 8):
            to.metrics({**row(step), "reward/mean": 100.0 + step})
    read = events(tmp_path)
    found = {e.step: e.value for e in read.Scalars("reward/mean")}
    assert len(read.Scalars("reward/mean")) == 8
    assert found == pytest.approx({**{s: 0.1 * s for s in range(4)}, **{s: 100.0 + s for s in range(4, 8)}})
    assert "step" not in read.Tags()["scalars"]


@needs("tensorboard")
def test_tensorboard_shows_responses_of_evaluations(tmp_path: Path) -> None:
    with RunLogs(tmp_path, LogConfig(), "run", {}) as to:
        to.samples(5, [sample(5, "train"), *[sample(5, "eval")] * 9])
    read = events(tmp_path)
    tags = [tag for tag in read.Tags()["tensors"] if tag.startswith("samples/")]
    assert len(tags) == trackers.TEXTS
    text = read.Tensors(tags[0])[0].tensor_proto.string_val[0].decode()
    assert "    2+2\n    =" in text
    assert "    `4`" in text


@needs("tensorboard")
@pytest.mark.parametrize("become", ["moved", "deleted"])
def test_tensorboard_goes_on_where_its_folder_is_moved_or_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: str
) -> None:
    """As the run's other files do; a thread that opens the path once more would print a traceback."""
    said: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: said.append(str(error.exc_value)))
    before, folder = threading.active_count(), tmp_path / "run"
    with RunLogs(folder, LogConfig(), "run", {}, warn=said.append) as to:
        to.metrics(row(0))
        assert threading.active_count() == before
        folder.rename(tmp_path / "moved")
        if become == "deleted":
            shutil.rmtree(tmp_path / "moved")
        for step in range(1, 4):
            to.metrics(row(step))
        to.samples(3, [sample(3, "eval")])
    assert said == []
    assert not folder.exists()
    if become == "moved":
        assert [e.step for e in events(tmp_path / "moved").Scalars("reward/mean")] == list(range(4))


def test_without_tensorboard_there_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    with RunLogs(tmp_path, LogConfig(), "run", {}, warn=said.append) as to:
        to.metrics(row(0))
        to.metrics(row(1))
    assert said == [f"log.tensorboard is off for the rest of the run: needs: {install('tensorboard')}"]
    assert len(without_time(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_stops_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=re.escape(f"log.{name} needs: {install(f'rpg-rl[{name}]')}")):
        RunLogs(tmp_path, LogConfig(tensorboard=False, **{name: "p"}), "run", {})


@pytest.mark.parametrize("where", ["init", "log", "finish"])
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """A stand-in that fails at one call, as a service without a network does."""

    class Service:
        step = 0

        def __getattr__(self, called: str) -> Any:
            if called.startswith("_"):
                raise AttributeError(called)

            def call(*_: Any, **__: Any) -> Any:
                if called == where:
                    raise ConnectionError("no route\nto host")
                return self

            return call

    monkeypatch.setitem(sys.modules, name, Service())  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    with RunLogs(tmp_path, LogConfig(tensorboard=False, **{name: "p"}), "run", {}, warn=said.append) as to:
        for step in range(4):
            to.metrics(row(step))
    assert said == [f"log.{name} is off for the rest of the run: no route to host"]
    assert len(without_time(tmp_path / "metrics.jsonl")) == 4


# Real trackers run in processes of their own: they hold threads, services and settings for as long as one lives.
RUN = """
import sys
from pathlib import Path
from rpg.run.config import LogConfig
from rpg.run.logs import RunLogs
name, folder, first, last, resume = sys.argv[1:]
config = LogConfig(tensorboard=False, **{name: "rpg-test"})
resume = None if resume == "new" else int(resume)
with RunLogs(folder, config, "run", {"steps": 8, "optim": {"lr": 1e-3}}, resume=resume) as to:
    for step in range(int(first), int(last) + 1):
        to.metrics({"step": step, "reward/mean": step / 8, "time/step": 1.0, "loss": float("nan")})
"""


def run(
    name: str, folder: Path, first: int, last: int, resume: str, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, name, str(folder), str(first), str(last), resume]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300, cwd=folder.parent
    )


@needs("trackio")
def test_trackio_locally_and_resumed(tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    for first, last, resume in ((0, 5, "new"), (3, 8, "2")):
        done = run("trackio", tmp_path / "run", first, last, resume, env)
        assert done.returncode == 0, done.stderr
        assert (done.stdout, "warning" in done.stderr.lower()) == ("", False), done.stderr
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as db:
        found = db.execute("SELECT step, metrics, run_name FROM metrics ORDER BY id").fetchall()
    assert [step for step, _, _ in found] == list(range(9))
    assert {name for _, _, name in found} == {
        f"run-{json.loads((tmp_path / 'run/trackers.json').read_text())['trackio']}"
    }
    assert [json.loads(metrics)["reward/mean"] for _, metrics, _ in found] == [s / 8 for s in range(9)]


@needs("wandb")
def test_wandb_offline_and_resumed(tmp_path: Path) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path)}
    for first, last, resume in ((0, 5, "new"), (3, 8, "2")):
        done = run("wandb", tmp_path / "run", first, last, resume, env)
        assert done.returncode == 0, done.stderr
        assert (done.stdout, done.stderr) == ("", "")
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    assert [steps(file) for file in files] == [list(range(6)), [6, 7, 8]]


def steps(file: Path) -> list[int]:
    """Of the history in a .wandb file: 7 bytes, then blocks of 32 KiB with pieces (crc 4, length 2, kind 1)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # no room for a piece's head at a block's end
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                found.append(record.history.step.num)
    return found


@needs("wandb")
def test_wandb_without_a_key_is_told_at_once(tmp_path: Path) -> None:
    env = {"WANDB_MODE": "online", "WANDB_CONFIG_DIR": str(tmp_path), "HOME": str(tmp_path), "WANDB_API_KEY": ""}
    done = run("wandb", tmp_path / "run", 0, 1, "new", env)
    assert done.stderr.strip().splitlines()[-1] == (
        "rpg.run.trackers.SetupError: log.wandb: no API key; run `wandb login`, or set WANDB_MODE=offline"
    )
