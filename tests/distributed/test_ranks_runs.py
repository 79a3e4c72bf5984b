"""Runs of two processes (gloo, on the CPU, FSDP2) against runs of one. float32: sampled tokens are equal, metrics agree
to 1e-3 of their size, weights to 1e-5 of their norm, as sums are added up in another order.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forked import ENV, LONG
from launching import Launch, Launcher
from rpg.distributed.ranks import LOST
from running import CHANGING, TINY, assert_same, bits, lines, metrics, summary

TERSE = [
    *TINY,
    "--log.report",
    "false",
    "--optim.minibatches",
    "2",
    "--checkpoint.keep",
    "9",
    "--checkpoint.every",
    "2",
]
NOISE = ("mismatch/",)  # is rounding, and nothing else
RENEWED = ["--algorithm", "grpo-corrected", "--reference.update", "every", "--reference.every", "2"]
RENEWED += ["--rollout.dynamic", "true", "--steps", "4", "--optim.name", "schedule-free"]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("ranks"))
    yield launcher
    launcher.close()


def run(launcher: Launcher, folder: Path, *argv: str, ranks: int = 2, **env: str) -> Launch:
    job = launcher.start("train", "--output", folder, *argv, ranks=ranks, **env).wait()
    assert job.codes == [0] * ranks, job.text
    return job


def assert_close(one: Path, other: Path) -> None:
    """The same tokens; the same metrics and weights, up to rounding; the same files."""
    for row, found in zip(metrics(one), metrics(other), strict=True):
        fixed = [name for name in row if not name.startswith(CHANGING)]
        assert fixed == [name for name in found if not name.startswith(CHANGING)]
        for name in fixed:
            if not name.startswith(NOISE):
                assert found[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), (row["step"], name)
    assert sampled(one) == sampled(other)
    at = sorted((one / "checkpoints").iterdir())[-1].name
    files = [
        sorted(p.relative_to(x / "checkpoints" / at) for p in (x / "checkpoints" / at).rglob("*")) for x in (one, other)
    ]
    assert files[0] == files[1]
    for path in files[0]:
        if path.suffix == ".safetensors":
            mine, theirs = (load_file(x / "checkpoints" / at / path) for x in (one, other))
            assert mine.keys() == theirs.keys()
            for name, tensor in mine.items():
                assert (tensor.shape, tensor.dtype) == (theirs[name].shape, theirs[name].dtype), name
                if "/exp_avg" not in name:  # moments of gradients that cancel have rounding of their own
                    far = (tensor.double() - theirs[name].double()).norm()
                    assert far <= 1e-5 * tensor.double().norm(), (path, name, far)


def sampled(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["step"] for row in rows}) > 2
    return [tuple(row[key] for key in ("step", "split", "group", "response", "length", "reward")) for row in rows]


def copied(source: Path, target: Path, step: int) -> Path:
    """A run's folder as it was after this step, as far as resuming goes."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    return target


def test_two_ranks_are_one(launcher: Launcher, tmp_path: Path) -> None:
    """The sampling policy is the reference; dynamic and truncated sampling; micro-batches below a rank's share."""
    argv = [*TERSE, "--steps", "3", "--optim.micro_tokens", "120", "--optim.recompute", "true"]
    argv += ["--rollout.top_p", "0.9"]
    one, two = tmp_path / "one", tmp_path / "two"
    run(launcher, one, *argv, ranks=1)
    job = run(launcher, two, *argv)
    assert_close(one, two)
    assert any(row["groups/sampled"] > row["groups/kept"] for row in metrics(two)[1:]), "nothing was left out"
    assert "step 3/3" in job.out[0]
    assert (job.out[1], job.err) == ("", ["", ""])

    same = copied(two, tmp_path / "same", 2)
    run(launcher, same, "--resume", *argv)
    assert_same(bits(two), bits(same))


def test_a_teacher_is_shared_out_too(launcher: Launcher, tmp_path: Path) -> None:
    """A run as the teacher, by its folder. Checkpoints have its name alone; a killed run goes on to the same."""
    teacher, one, two = tmp_path / "teacher", tmp_path / "one", tmp_path / "two"
    run(launcher, teacher, *TERSE, "--steps", "1", "--rollout.dynamic", "false", "--optim.lr", "0.01", ranks=1)
    argv = [
        *TERSE,
        "--steps",
        "2",
        "--algorithm",
        "distill",
        "--reference.model",
        str(teacher),
        "--checkpoint.every",
        "1",
    ]
    run(launcher, one, *argv, ranks=1)
    run(launcher, two, *argv)
    assert_close(one, two)
    rows = metrics(two)[1:]
    assert all(row["kl/ref"] > 0 for row in rows)
    assert not any(row["reference/updated"] for row in rows)
    newest = two / "checkpoints" / "step-000002"
    assert not (newest / "trainer" / "reference.safetensors").exists()
    state = json.loads((newest / "trainer" / "state.json").read_text(encoding="utf-8"))["reference"]
    assert state["teacher"] == str(teacher / "checkpoints" / "step-000001" / "model")
    same = copied(one, tmp_path / "same", 1)
    run(launcher, same, "--resume", *argv, ranks=1)
    assert_same(bits(one), bits(same))


def test_checkpoints_of_any_number_of_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """A reference that is renewed every two steps; weights that are not the ones in model/, which has their average.
    Written by two, read by one and by two; by one, read by two."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(launcher, one, *TERSE, *RENEWED, ranks=1)
    run(launcher, two, *TERSE, *RENEWED)
    assert_close(one, two)
    assert [row["reference/updated"] for row in metrics(two)[1:]] == [0, 1, 0, 1]

    same = copied(two, tmp_path / "same", 2)
    run(launcher, same, "--resume", *TERSE, *RENEWED)
    assert_same(bits(two), bits(same))

    fewer = copied(two, tmp_path / "fewer", 2)
    job = run(launcher, fewer, "--resume", *TERSE, *RENEWED, ranks=1)
    assert "made with 2 processes, this is 1" in job.text
    assert_close(one, fewer)

    more = copied(one, tmp_path / "more", 2)
    run(launcher, more, "--resume", *TERSE, *RENEWED)
    assert_close(two, more)


def test_sharding_changes_no_bit(launcher: Launcher, tmp_path: Path) -> None:
    """One rank with FSDP2 and without, in bfloat16: masters, moving averages, schedule-free's averages; and what is
    sharded may lie on the host while responses are sampled."""
    argv = [*TERSE, "--algorithm", "grpo-corrected", "--reference.update", "ema", "--dtype", "bfloat16", "--steps", "2"]
    argv += ["--optim.name", "schedule-free"]
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    run(launcher, plain, *argv, ranks=1)
    run(launcher, sharded, *argv, "--optim.offload", "true", ranks=1, RPG_FSDP="1")
    assert_same(*(bits(folder, card=False) for folder in (plain, sharded)))  # a card says how it was made


def test_many_architectures_and_every_preset(launcher: Launcher) -> None:
    """Tied and scaled heads, windows, biases, recomputed layers, an adapter; a clip that is fitted: see the file."""
    check = Path(__file__).with_name("sharding_check.py")
    job = launcher.start(check).wait()
    if -signal.SIGSEGV in job.codes:  # seen once, in torch's gloo, and not in 80 runs made to find it; what is ours
        sys.stderr.write(job.text)  # is wrong twice
        job = launcher.start(check).wait()
    assert job.codes == [0, 0], job.text
    assert all("the same" in text for text in job.out)


# ---- the end ---------------------------------------------------------------------------------------------------------


def assert_told_once(job: Launch, code: int, text: str) -> None:
    assert job.codes == [code, code], job.text
    found = [line for line in job.text.splitlines() if line.startswith("rpg ")]
    assert len(found) == 1, job.text
    assert text in found[0]
    assert "Traceback" not in job.text


def test_a_rank_that_cannot_start_ends_all(launcher: Launcher, tmp_path: Path) -> None:
    """Its reward function does not import there. The first rank is waiting for it in a collective operation."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\nassert os.environ['RANK'] == '0', 'not here'\ndef reward(response, answer, prompt): return 0\n"
    )
    job = launcher.start("train", "--output", tmp_path / "run", *TERSE, "--task.reward", f"{reward}:reward").wait()
    assert_told_once(job, 2, "rank 1: ")
    assert "not here" in job.err[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_rank_that_fails_on_the_way_ends_all(launcher: Launcher, tmp_path: Path) -> None:
    """Its workers die in the second step, and cannot be started again."""
    reward, mark = tmp_path / "reward.py", tmp_path / "mark"
    reward.write_text(
        f"import os\nmark, calls = {str(mark)!r} + os.environ['RANK'], []\n"
        "if os.path.exists(mark): os._exit(1)\n"
        "def reward(response, answer, prompt):\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) > 40:\n"
        "        open(mark, 'w').close()\n"
        "        os._exit(1)\n"
        "    return len(response) % 2\n"
    )
    argv = [*TERSE, "--steps", "50", "--task.reward", f"{reward}:reward", "--task.workers", "1"]
    job = launcher.start("train", "--output", tmp_path / "run", *argv).wait()
    assert_told_once(job, 1, "rank 1: ")
    about = summary(tmp_path / "run")
    assert about["status"] == "failed"
    assert about["message"].startswith("rank 1: ")


def test_a_killed_rank_leaves_nobody_waiting(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = launcher.start("train", "--output", folder, *TERSE, "--steps", "500")
    job.until(lambda: lines(folder) > 1)
    job.kill(1, signal.SIGKILL)
    job.wait()
    assert job.codes == [1, -signal.SIGKILL], job.text
    assert "rpg train: another process of the run is gone" in job.err[0]
    assert "Traceback" not in job.text


def test_a_rank_that_is_killed_early_is_told_by_who_is_left(launcher: Launcher, tmp_path: Path) -> None:
    """The first, before the run begins."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"  # between the rank and its worker stands a guard
        "rank = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])\n"
        "if os.environ['RANK'] == '0': os.kill(rank, 9)\n"
        "def reward(response, answer, prompt): return 0\n"
    )
    job = launcher.start("train", "--output", tmp_path / "run", *TERSE, "--task.reward", f"{reward}:reward").wait()
    assert job.codes == [-signal.SIGKILL, 1], job.text
    assert job.err[1] == f"rpg train: {LOST}\n"


def test_a_signal_to_one_rank_stops_all(launcher: Launcher, tmp_path: Path) -> None:
    folder, twice = tmp_path / "run", tmp_path / "twice"
    job = launcher.start("train", "--output", folder, *TERSE, "--steps", "500")
    job.until(lambda: lines(folder) > 1)
    job.kill(1, signal.SIGINT)
    assert job.wait().codes == [130, 130], job.text
    about = summary(folder)
    assert (about["status"], about["stopped_by"]) == ("stopped", "SIGINT")
    assert (folder / "checkpoints" / f"step-{about['step']:06d}").exists()
    hint = "go on with: torchrun --nproc-per-node 2 -m rpg train --resume --output"
    assert hint in job.out[0]

    patient = tmp_path / "patient.py"  # whose second signal is not taken for an echo
    argv = ["train", "--output", str(twice), *TERSE, "--steps", "500"]
    patient.write_text(
        f"import sys, rpg.cli, rpg.run.signals\nrpg.run.signals.ECHO = 0.0\nsys.exit(rpg.cli.main({argv!r}))\n"
    )
    job = launcher.start(patient)
    job.until(lambda: lines(twice) > 1)
    for number in (signal.SIGINT, signal.SIGTERM):  # two of the same kind may come as one
        job.kill(1, number)
    job.wait()
    assert_told_once(job, 130, f"stopped at once; {hint}")
    assert summary(twice)["status"] == "stopped"


def test_what_does_not_run_on_several_ranks(launcher: Launcher, tmp_path: Path) -> None:
    job = launcher.start("train", "--output", tmp_path / "run", *TERSE, "--rollout.engine", "vllm").wait()
    assert_told_once(job, 2, "rollout.engine=vllm does not run under torchrun")
    job = launcher.start("train", "--output", tmp_path / "run", *TERSE, "--loss.control_variate", "true").wait()
    assert_told_once(job, 2, "loss.control_variate needs the whole optimiser step at once")
    job = launcher.start("train", "--output", tmp_path / "run", "--dry-run").wait()
    assert_told_once(job, 2, "--dry-run plans for one process")


def test_torchrun_is_stopped_at_one_step(tmp_path: Path) -> None:
    """The command of the docs, stopped as schedulers do it: each process gets the signal, and torchrun passes it on."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rpg", "train"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--output", str(folder), *TERSE, "--steps", "500"], stdout=log, stderr=log, env=ENV
        )
    try:
        limit = time.monotonic() + LONG
        while lines(folder) < 3:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < limit, (tmp_path / "log").read_text()
            time.sleep(0.01)
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, signal.SIGTERM)
        process.wait(LONG)
    finally:
        if process.poll() is None:
            process.kill()
    about = summary(folder)
    assert (about["status"], about["stopped_by"]) == ("stopped", "SIGTERM"), (tmp_path / "log").read_text()
    assert (folder / "checkpoints" / f"step-{about['step']:06d}").exists()
    assert metrics(folder)[-1]["step"] == about["step"] < 500


def children(pid: int) -> list[int]:
    stats = [path.read_text().rpartition(")")[::2] for path in Path("/proc").glob("[0-9]*/stat")]
    found = [int(name.split()[0]) for name, rest in stats if int(rest.split()[1]) == pid]
    assert found
    return found
