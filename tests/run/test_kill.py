"""A run that is killed and resumed, however often and wherever, ends in the bits of one that never was."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rpg.run.signals import interruptible
from running import TINY, Job, Server, assert_same, bits, checkpoints, lines, metrics, summary

STEPS = 12
MOMENTS = ("step", "checkpoint", "row", "start")  # of the kills
COMMON = ["--steps", STEPS, "--eval.every", "4", "--optim.lr", "3e-4"]
REWARD = "def score(response, answer, prompt):\n    return 1.0 if answer in response else len(response) % 3 / 10\n"
RUNS: dict[str, list[str]] = {
    "adamw": ["--checkpoint.every", "1"],
    "schedule-free, a copy renewed every 2 steps": [
        *("--optim.name", "schedule-free", "--reference.update", "every", "--reference.every", "2"),
        *("--loss.beta", "0.1", "--checkpoint.every", "1", "--checkpoint.keep", "1"),
    ],
    "moving average": [
        *("--algorithm", "rpg-urkl", "--reference.update", "ema", "--reference.decay", "0.8", "--loss.beta", "0.1"),
        *("--optim.schedule", "cosine", "--checkpoint.every", "3", "--optim.epochs", "2"),
    ],
    "schedule-free, a copy renewed by KL": [
        *("--algorithm", "grpo", "--reference.update", "kl", "--reference.kl", "0.001", "--loss.beta", "0.1"),
        *("--optim.name", "schedule-free", "--checkpoint.every", "3"),
    ],
    "dynamic sampling, a file, a reward of one's own": [
        *("--algorithm", "dapo", "--task.name", "data.jsonl", "--task.reward", "my_reward.py:score"),
        *("--optim.weight_decay", "0.1", "--checkpoint.every", "1", "--rollout.max_rounds", "3"),
    ],
    "sampling ahead, groups that serve again, prompts chosen by a record": [
        *("--algorithm", "dapo", "--task.name", "data.jsonl", "--task.reward", "my_reward.py:score"),
        *(
            "--rollout.ahead",
            "1.5",
            "--offpolicy.reuse",
            "2",
            "--offpolicy.min_ess",
            "0.9",
            "--rollout.choose",
            "signal",
        ),
        *("--checkpoint.every", "1", "--rollout.slots", "24"),
    ],
    "sampling ahead with the keys of old weights": [
        *("--rollout.ahead", "2", "--rollout.cache", "kept", "--rollout.slots", "12", "--checkpoint.every", "3"),
        *("--offpolicy.max_kl", "0.02", "--offpolicy.reuse", "3", "--offpolicy.max_age", "2"),
    ],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_reward.py").write_text(REWARD)
    rows = ({"prompt": f"{a}+{b}\n", "answer": a + b} for a in range(1, 6) for b in range(1, 6))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(server: Server, home: Path, folder: Path, options: list[Any]) -> Job:
    """Anew, or with --resume alone once there is something to resume."""
    if (folder / "config.yaml").exists():
        return server.start("train", "--resume", "--output", folder, cwd=home)
    return server.start("train", "--output", folder, *TINY, *COMMON, *options, cwd=home)


def finish(server: Server, home: Path, folder: Path, options: list[Any]) -> Job:
    job = start(server, home, folder, options).wait()
    assert job.code == 0, job.text
    return job


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def saving(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob(".saving-*"))


def kill_at(moment: str, job: Job, folder: Path, rng: random.Random) -> None:
    """Wait for the moment, or the run's end, and kill."""
    before = lines(folder)
    if moment == "start":
        time.sleep(rng.uniform(0, 0.8))
    elif moment == "checkpoint":
        skipped = rng.randrange(2)  # which of the coming ones
        for _ in range(skipped):
            job.until(lambda: saving(folder))
            job.until(lambda: not saving(folder))
        job.until(lambda: saving(folder), every=0.0002)
        time.sleep(rng.uniform(0, 0.02))
    else:
        # a resumed run first drops the rows beyond its checkpoint, so the file may shrink before it grows
        job.until(lambda: "resumed from" in job.out or "from the beginning" in job.out or lines(folder) != before)
        now, rows = lines(folder), rng.randint(1, 2)
        job.until(lambda: lines(folder) >= now + rows, every=0.0002)
        if moment == "step":
            time.sleep(rng.uniform(0, 0.1))
    job.kill()
    job.wait()


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits(server: Server, home: Path, tmp_path: Path, name: str) -> None:
    options, rng = RUNS[name], random.Random(name)
    finish(server, home, tmp_path / "whole", options)
    killed = tmp_path / "killed"
    landed: list[str] = []
    for moment in MOMENTS:
        job = start(server, home, killed, options)
        kill_at(moment, job, killed, rng)
        if job.code == 0:  # it was through before the signal came
            break
        assert job.code == -signal.SIGKILL, job.text
        landed.append("checkpoint" if saving(killed) else "start" if lines(killed) == 0 else "step")
    assert len(landed) >= len(MOMENTS) - 1, landed
    assert "checkpoint" in landed
    assert "step" in landed
    job = finish(server, home, killed, options)
    assert not saving(killed)
    assert_same(bits(tmp_path / "whole"), bits(killed))
    assert [row["step"] for row in metrics(killed)] == list(range(STEPS + 1))
    assert (killed / "report.html").exists()


def test_a_run_resumed_after_its_end_changes_nothing(server: Server, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(server, home, folder, ["--steps", "3"])
    before = bits(folder)
    finish(server, home, folder, [])
    assert_same(before, bits(folder))


# ---- checkpoints that are damaged ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(server: Server, home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 6 steps, and one that was killed after its checkpoint of step 3 or a later one."""
    folder = tmp_path_factory.mktemp("stopped")
    options = ["--steps", "6", "--checkpoint.every", "1", "--checkpoint.keep", "3"]
    finish(server, home, folder / "whole", options)
    job = start(server, home, folder / "killed", options)
    job.until(lambda: (folder / "killed" / "checkpoints" / "step-000003").exists())
    job.kill()
    assert job.wait().code == -signal.SIGKILL
    return folder / "whole", folder / "killed"


@pytest.mark.parametrize("damage", ["a bit flipped", "cut", "missing", "manifest", "emptied", "half-written"])
def test_a_damaged_checkpoint(
    server: Server, home: Path, stopped: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    whole, killed = stopped
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    newest = folder / "checkpoints" / max(name for name in checkpoints(folder) if name.startswith("step-"))
    step = int(newest.name.removeprefix("step-"))
    model = newest / "model" / "model.safetensors"
    data = bytearray(model.read_bytes())
    if damage == "a bit flipped":
        data[len(data) // 2] ^= 1
        model.write_bytes(data)
    elif damage == "cut":
        model.write_bytes(data[:-100])
    elif damage == "missing":
        (newest / "trainer" / "optimizer.safetensors").unlink()
    elif damage == "manifest":
        (newest / "trainer" / "manifest.json").write_text("{")
    elif damage == "emptied":
        shutil.rmtree(newest / "trainer")
    else:  # what a kill leaves: whole files in a hidden folder, without a manifest
        half = newest.rename(newest.with_name(f".saving-{newest.name}"))
        (half / "trainer" / "manifest.json").unlink()
    job = server.start("train", "--resume", "--output", folder, cwd=home).wait()
    assert job.code == 0, job.text
    assert "Traceback" not in job.text
    assert f"resumed from step {step - 1}" in job.out
    warnings = [line for line in job.out.splitlines() if line.startswith("warning:")]
    if damage == "half-written":
        assert not warnings
    else:
        assert len(warnings) == 1
        assert f"{newest.name} is damaged" in warnings[0]
    assert_same(bits(whole), bits(folder))


def test_every_checkpoint_damaged(server: Server, home: Path, stopped: tuple[Path, Path], tmp_path: Path) -> None:
    whole, killed = stopped
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    for model in (folder / "checkpoints").glob("*/model/model.safetensors"):
        model.write_bytes(b"")
    before = (folder / "metrics.jsonl").read_bytes()
    job = server.start("train", "--resume", "--output", folder, cwd=home).wait()
    assert job.code == 2, job.text
    assert f"no checkpoint in {folder} is whole" in job.text
    assert (folder / "metrics.jsonl").read_bytes() == before  # nothing is thrown away
    shutil.rmtree(folder / "checkpoints")  # as if killed before the first one
    job = server.start("train", "--resume", "--output", folder, cwd=home).wait()
    assert job.code == 0, job.text
    assert "starting from the beginning" in job.out
    assert_same(bits(whole), bits(folder))


def test_a_damaged_newest_one_does_not_cost_the_next(
    server: Server, home: Path, stopped: tuple[Path, Path], tmp_path: Path
) -> None:
    """With keep=1 the checkpoint just written stays, not the damaged one of a later step."""
    folder = tmp_path / "run"
    shutil.copytree(stopped[1], folder)
    steps = [int(name.removeprefix("step-")) for name in checkpoints(folder) if name.startswith("step-")]
    for step in steps[1:]:
        (folder / "checkpoints" / f"step-{step:06d}" / "model" / "config.json").unlink()
    resumed = steps[0] + 1
    job = server.start(
        *("train", "--resume", "--output", folder, "--steps", resumed, "--checkpoint.keep", "1"),
        *("--checkpoint.best", "false"),
        cwd=home,
    ).wait()
    assert job.code == 0, job.text
    assert f"step-{resumed:06d}" in checkpoints(folder)
    assert summary(folder)["step"] == resumed
    job = server.start("train", "--resume", "--output", folder, cwd=home).wait()
    assert f"resumed from step {resumed}" in job.out


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "step"), (signal.SIGHUP, "step"), (signal.SIGTERM, "evaluation")]
)
def test_stopped_by_a_signal(server: Server, home: Path, tmp_path: Path, number: signal.Signals, moment: str) -> None:
    """The step is finished and saved; resumed, the run ends in the same bits as one never stopped."""
    # 25 problems × 32 responses make an evaluation long enough to be hit
    options = ["--steps", "6", "--checkpoint.every", "0"]
    options += ["--eval.every", "4", "--eval.problems", "25", "--eval.k", "32"] if moment == "evaluation" else []
    finish(server, home, tmp_path / "whole", options)
    folder = tmp_path / "stopped"
    job = start(server, home, folder, options)
    if moment == "step":
        job.until(lambda: lines(folder) >= 2)
    else:  # the samples of step 4 are written before its evaluation
        job.until(lambda: b'{"step": 4' in read(folder / "samples.jsonl"))
        time.sleep(0.1)
    job.kill(number)
    job.wait()
    assert job.code == 128 + number, job.text
    step = lines(folder) - 1
    assert step == 4 if moment == "evaluation" else 1 <= step < 6
    name = number.name
    assert f"{name}: finishing the present step, then saving (again, after " in job.out
    assert f"stopped by {name} after step {step}; go on with: " in job.out
    assert f"rpg train --resume --output {folder}" in job.out
    assert checkpoints(folder) == [f"step-{step:06d}"]
    found = summary(folder)
    assert (found["status"], found["step"]) == ("stopped", step)
    finish(server, home, folder, [])
    assert summary(folder)["status"] == "finished"
    one, other = bits(tmp_path / "whole"), bits(folder)
    assert set(other.pop("checkpoints")) >= set(one.pop("checkpoints"))  # and perhaps that of the stop
    assert_same(one, other)


def test_the_second_signal_stops_at_once(server: Server, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--steps", "3", "--rollout.prompts", "64", "--rollout.samples", "32", "--rollout.max_new_tokens", "200"]
    job = start(server, home, folder, options)
    job.until(lambda: lines(folder) == 1)
    time.sleep(0.2)
    job.kill(signal.SIGINT)
    job.until(lambda: "finishing the present step" in job.out)
    job.kill(signal.SIGTERM)  # an echo
    time.sleep(1.0)
    begin = time.monotonic()
    job.kill(signal.SIGINT)
    job.wait()
    assert job.code == 130, job.text
    assert time.monotonic() - begin < 3  # the step would have taken longer
    assert "Traceback" not in job.text
    assert lines(folder) == 1
    assert summary(folder)["status"] == "stopped"


def test_ctrl_c_stays_what_it_is_inside_a_library_that_makes_another_error_of_it() -> None:
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object") from None

    with pytest.raises(KeyboardInterrupt), interruptible():
        library()
    with pytest.raises(ValueError, match="its own"), interruptible():
        raise ValueError("its own")


def test_a_signal_right_after_the_start(server: Server, home: Path, tmp_path: Path) -> None:
    """While the run sets itself up, or evaluates for the first time: no traceback, and it can be started again."""
    rng = random.Random(0)
    folder = tmp_path / "run"
    for _ in range(4):
        job = start(server, home, folder, ["--steps", "500"])
        time.sleep(rng.uniform(0.02, 0.6))
        job.kill(signal.SIGINT)
        assert job.wait().code == 130, job.text
        assert "Traceback" not in job.text
    steps = max(lines(folder), 1)
    resume = ["--resume"] if (folder / "config.yaml").exists() else TINY
    assert server.start("train", "--output", folder, "--steps", steps, *resume, cwd=home).wait().code == 0
    assert [row["step"] for row in metrics(folder)] == list(range(steps + 1))
