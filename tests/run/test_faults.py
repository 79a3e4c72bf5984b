"""What goes wrong around a run: reward functions, losses that are not finite, a full disk, nothing to learn from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpg.models import BUILTIN
from rpg.run import checkpoint
from rpg.training.loop import MAX_STARVED
from running import ENV, TINY, Job, assert_one_line, bits, checkpoints, lines, metrics, summary

# ---- reward functions ------------------------------------------------------------------------------------------------

REWARDS = """
import time

def picked(response):
    return len(response) % 4 == 0

def raises(response, answer, prompt):
    if picked(response):
        raise KeyError("no such key")
    return float(len(response) % 3 == 0)

def hangs(response, answer, prompt):
    while picked(response) and len(response) % 8 == 0:
        time.sleep(1)
    return float(len(response) % 3 == 0)

def nan(response, answer, prompt):
    return float("nan") if picked(response) else float(len(response) % 3 == 0)

def none(response, answer, prompt):
    return None if picked(response) else float(len(response) % 3 == 0)

def dies(response, answer, prompt):
    import os
    if picked(response):
        os._exit(3)
    return float(len(response) % 3 == 0)
"""


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("raises", "raised", "KeyError: 'no such key' (rewards.py:9)"),
        ("hangs", "timed_out", "no answer after 0.3 s"),
        ("nan", "not_finite", "returned nan, not a finite number"),
        ("none", "not_finite", "returned NoneType, not a finite number"),
        ("dies", "raised", "worker died: exit code 3"),
    ],
)
def test_a_reward_function_that_fails(
    train: Callable[..., Job], tmp_path: Path, name: str, kind: str, said: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    job = train(
        tmp_path / "run",
        *("--steps", "2", "--task.reward", f"rewards.py:{name}", "--task.timeout", "0.3", "--task.on_error", "-0.25"),
        *("--rollout.dynamic", "false", "--rollout.overlong", "false", "--log.samples", "100", "--eval.problems", "2"),
        cwd=tmp_path,
    )
    assert job.code == 0, job.text
    assert f"warning: reward function: {said}" in job.out
    rows = metrics(tmp_path / "run")[1:]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    failed = [row for row in samples if row["reward"] == -0.25]
    counted = summary(tmp_path / "run")["reward_failures"]
    assert failed
    assert sum(row["reward/failed"] for row in rows) == sum(row["split"] == "train" for row in failed)
    assert counted == {"raised": 0, "timed_out": 0, "not_finite": 0} | {kind: len(failed)}  # evaluations included
    assert all(len(row["response"]) % 4 == 0 for row in failed)
    assert all(row["loss"] is not None for row in rows)
    assert {row["reward"] for row in samples} > {-0.25, 1.0}


def test_a_reward_file_that_breaks_while_the_run_goes_on(server, tmp_path: Path) -> None:
    """A worker that hung is replaced; the new one cannot import the file any more."""
    (tmp_path / "mine.py").write_text("def score(response, answer, prompt):\n    return float(len(response) % 2)\n")
    job = server.start(
        *("train", "--output", tmp_path / "run", *TINY, "--steps", "500", "--checkpoint.every", "1"),
        *("--task.reward", "mine.py:score", "--task.workers", "1"),
        cwd=tmp_path,
    )
    job.until(lambda: lines(tmp_path / "run") >= 3)
    (tmp_path / "mine.py").write_text("def score(:\n")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(int(children[0]), 9)
    job.wait()
    assert_one_line(job, 1, "cannot import", "mine.py", "SyntaxError")
    assert summary(tmp_path / "run")["status"] == "failed"


# ---- losses that are not finite --------------------------------------------------------------------------------------


def test_three_losses_in_a_row_that_are_not_finite(train: Callable[..., Job], tmp_path: Path) -> None:
    """A learning rate of 1e30: the first optimiser step is fine and ruins the weights, the next three are not."""
    folder = tmp_path / "run"
    options = ["--steps", "20", "--optim.lr", "1e30", "--optim.warmup", "0", "--optim.minibatches", "1"]
    options += ["--rollout.dynamic", "false", "--checkpoint.every", "1", "--checkpoint.keep", "9"]
    for attempt in range(2):  # resumed, the run does the same again and says so again
        job = train(folder, *options, *["--resume"][:attempt])
        assert_one_line(job, 1, "3 optimiser steps in a row had a loss or gradient", "not finite", str(folder / "bad"))
        assert job.out.count("optimiser step skipped, its batch is") == (1 if attempt else 3)
        rows = metrics(folder)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["skipped"] for row in rows[1:]] == [0, 1, 1, 1]
        found = summary(folder)
        assert (found["status"], found["step"]) == ("failed", 4)
        assert "3 optimiser steps in a row" in found["message"]
        assert checkpoints(folder) == ["step-000001", "step-000002", "step-000003"]  # none of the end
        kept = sorted((folder / "bad").glob("*.safetensors"))
        assert [path.name for path in kept] == [f"step-00000{step}-0.safetensors" for step in (2, 3, 4)]
    assert "resumed from step 3" in job.out
    batch = load_file(kept[0])
    assert len(batch["ids_BL"]) == len(batch["advantage"]) == 16
    about = json.loads(kept[0].with_suffix(".json").read_text())
    assert about["step"] == 2
    assert len(about["texts"]) == 16
    assert "nan" in (about["loss"], about["grad_norm"])


def test_a_skipped_step_leaves_the_weights(train: Callable[..., Job], tmp_path: Path) -> None:
    """Losses too large for float32 have no gradient; with a limit that is never reached the run goes on unchanged."""
    folder = tmp_path / "run"
    (tmp_path / "big.py").write_text("def score(response, answer, prompt):\n    return len(response) * 1e37\n")
    job = train(
        folder,
        *("--steps", "2", "--task.reward", "big.py:score", "--optim.max_bad_steps", "100", "--algorithm", "dr-grpo"),
        *("--optim.minibatches", "8"),
        *("--rollout.dynamic", "false", "--rollout.overlong", "false"),
        cwd=tmp_path,
    )
    assert job.code == 0, job.text
    assert [row["skipped"] for row in metrics(folder)[1:]] == [8, 8]
    kept = {path.name.partition(".")[0] for path in (folder / "bad").iterdir()}
    assert kept == {f"step-00000{step}-{i}" for step, numbers in ((1, range(4)), (2, range(4, 8))) for i in numbers}
    saved = load_file(folder / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    before = load_file(BUILTIN / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name].float()) for name in before)


def test_weights_that_overflow_later(train: Callable[..., Job], tmp_path: Path) -> None:
    """One optimiser step a batch: the next rollouts have nothing to sample from."""
    folder = tmp_path / "run"
    options = ["--steps", "9", "--optim.lr", "1e38", "--optim.warmup", "0", "--optim.minibatches", "1"]
    job = train(folder, *options, "--eval.every", "0")
    assert_one_line(job, 1, "logits are not finite")
    assert summary(folder)["status"] == "failed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_a_weight_that_is_not_finite(train: Callable[..., Job], tmp_path: Path, value: float) -> None:
    weights = load_file(BUILTIN / "model.safetensors")
    weights["model.norm.weight"][3] = value
    model = tmp_path / "model"
    model.mkdir()
    for path in BUILTIN.iterdir():
        if path.suffix == ".json":
            (model / path.name).write_bytes(path.read_bytes())
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    job = train(tmp_path / "run", "--model", model)
    assert_one_line(job, 2, "not finite")


# ---- a full disk -----------------------------------------------------------------------------------------------------


def check_full_disk(code: int, err: str, folder: Path) -> int:
    """One line, no traceback, and the newest checkpoint is whole. Its step."""
    assert code == 1, err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    names = checkpoints(folder)
    assert names
    assert not [name for name in names if name.startswith(".")]
    found = checkpoint.load(folder / "checkpoints", pytest.fail)
    assert found is not None
    assert checkpoint.verify(found.folder) is None
    assert load_file(found.model_folder / "model.safetensors")
    return found.step


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk(tmp_path: Path, server) -> None:
    """A real one of 30 MB, in a mount namespace of its own; what it held is copied out before it goes."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("mounting is not permitted")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    argv = [sys.executable, "-m", "rpg.cli", "train", "--output", disk / "run", *TINY, "--steps", "30"]
    argv += ["--checkpoint.every", "1", "--checkpoint.keep", "50", "--log.tensorboard", "true"]
    script = f'mount -t tmpfs -o size=30m none {disk} && {{ "$@"; code=$?; cp -r {disk}/run {copy}; exit $code; }}'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=ENV, timeout=300, check=False)
    step = check_full_disk(done.returncode, done.stderr, copy)
    assert done.stderr.startswith("rpg train: the disk is full: cannot write"), done.stderr
    assert f"the last checkpoint is step {step} in" in done.stderr
    assert step >= 1
    # with room again, the copy goes on from there
    job = server.start("train", "--resume", "--output", copy, "--steps", step + 1, "--checkpoint.keep", "1").wait()
    assert job.code == 0, job.text
    assert f"resumed from step {step}" in job.out
    assert bits(copy)["metrics"]


@pytest.mark.parametrize("size", [12_000, 3_000_000])
def test_a_file_that_may_not_grow(train: Callable[..., Job], tmp_path: Path, size: int) -> None:
    """RLIMIT_FSIZE stops the metrics or samples file after some steps, or the first checkpoint."""
    folder = tmp_path / "run"
    if size < 100_000:  # checkpoints are there already, and the run goes on
        assert train(folder, "--steps", "2", "--checkpoint.every", "1").code == 0
        job = train(folder, "--steps", "99", "--checkpoint.every", "0", "--resume", file_size=size)
        assert check_full_disk(job.code, job.err, folder) == 2
        assert "File too large" in job.err
        assert [row["step"] for row in metrics(folder)] == list(range(lines(folder)))  # every line is whole
        return
    job = train(folder, "--steps", "3", "--checkpoint.every", "1", file_size=size)
    assert_one_line(job, 1, "a file is larger than the system allows", "there is no earlier checkpoint")
    assert summary(folder)["status"] == "failed"


# ---- nothing to learn from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reward", "share"), [("0.0", "none solved"), ("1.0", "all solved")])
def test_no_group_has_unequal_rewards(train: Callable[..., Job], tmp_path: Path, reward: str, share: str) -> None:
    (tmp_path / "same.py").write_text(f"def score(response, answer, prompt):\n    return {reward}\n")
    folder = tmp_path / "run"
    job = train(
        folder,
        *(
            "--steps",
            "50",
            "--task.reward",
            "same.py:score",
            "--rollout.dynamic",
            "true",
            "--rollout.overlong",
            "false",
        ),
        *("--rollout.max_rounds", "2", "--checkpoint.every", "0"),
        cwd=tmp_path,
    )
    assert job.code == 0, job.text
    rows = metrics(folder)
    assert len(rows) == MAX_STARVED + 1
    for row in rows[1:]:
        assert (row["groups/kept"], row["groups/rounds"]) == (0, 2)
        assert row["groups/sampled"] <= 2 * 4 * 4  # rounds, prompts, and at most four times as many
        assert "loss" not in row
    assert job.out.count("nothing learnt") == MAX_STARVED
    assert f"100% {share}" in job.out
    assert job.out.count(f"ended after step {MAX_STARVED}: for {MAX_STARVED} steps no group had unequal rewards") == 1
    found = summary(folder)
    assert (found["status"], found["step"]) == ("finished", MAX_STARVED)
    assert "nothing to learn" in found["message"]
    assert checkpoints(folder) == [f"step-{MAX_STARVED:06d}"]
    assert "eval/arithmetic/mean@2" in rows[-1]


def test_without_dynamic_sampling_equal_rewards_do_not_end_a_run(train: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def score(response, answer, prompt):\n    return 0.0\n")
    job = train(
        tmp_path / "run",
        *("--steps", MAX_STARVED + 2, "--task.reward", "same.py:score", "--algorithm", "grpo"),
        *("--rollout.dynamic", "false", "--rollout.overlong", "false"),
        cwd=tmp_path,
    )
    assert job.code == 0, job.text
    assert [row["groups/kept"] for row in metrics(tmp_path / "run")[1:]] == [4] * (MAX_STARVED + 2)
