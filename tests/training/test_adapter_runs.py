"""Runs that train an adapter: killed and resumed to the same bits, evaluated, read by PEFT."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from rpg.models.policy import Policy
from running import TINY, Server, assert_same, bits, summary

LORA = [
    "--peft.method",
    "lora",
    "--peft.options.r",
    "8",
    "--steps",
    "4",
    "--checkpoint.every",
    "1",
    "--optim.lr",
    "3e-3",
]
RUNS = {
    "anchored at the model": ["--algorithm", "grpo", "--loss.beta", "0.05"],
    "beside a model in 4 bits": ["--algorithm", "grpo", "--loss.beta", "0.05", "--peft.base_bits", "4"],
    "renewed": [*("--reference.update", "every", "--reference.every", "2", "--loss.beta", "0.05")],
    "moving average, bfloat16": [
        *("--reference.update", "ema", "--loss.beta", "0.05", "--dtype", "bfloat16", "--optim.recompute", "true"),
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits(server: Server, tmp_path: Path, name: str) -> None:
    arguments = [*TINY, *LORA, *RUNS[name]]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = server.start("train", "--output", whole, *arguments).wait()
    assert job.code == 0, job.text
    job = server.start("train", "--output", killed, *arguments)
    job.until(lambda: (killed / "checkpoints" / "step-000002").exists())
    job.kill()
    assert job.wait().code == -signal.SIGKILL, job.text
    job = server.start("train", "--resume", "--output", killed).wait()
    assert job.code == 0, job.text
    assert "resumed from step" in job.out
    found = bits(whole), bits(killed)
    for one in found:
        one["state"].pop("spent", None)  # seconds
    assert_same(*found)
    newest = max((whole / "checkpoints").iterdir())
    assert (newest / "model" / "adapter_model.safetensors").stat().st_size < 2**20
    assert not (newest / "model" / "model.safetensors").exists()
    assert (newest / "trainer" / "reference.safetensors").exists() == ("--reference.update" in RUNS[name])


def test_a_model_in_a_subfolder(server: Server, tmp_path: Path) -> None:
    """Resumed and evaluated on that one, not on the one above it."""
    policy, outer = Policy.load("builtin"), tmp_path / "outer"
    policy.save(outer / "inner")
    for _, p in policy.parameters():
        p.data.mul_(0.5)
    policy.save(outer)
    arguments = [*TINY, *LORA, "--optim.schedule", "constant", "--model", outer, "--model_options.subfolder", "inner"]
    for folder, steps, *more in (("whole", 2), ("parts", 1), ("parts", 2, "--resume")):
        job = server.start("train", "--output", tmp_path / folder, *arguments, "--steps", steps, *more).wait()
        assert job.code == 0, job.text
    whole, parts = bits(tmp_path / "whole"), bits(tmp_path / "parts")
    assert whole["model/adapter_model.safetensors"] == parts["model/adapter_model.safetensors"]


def test_a_run_is_evaluated_and_loaded(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = server.start("train", "--output", folder, *TINY, *LORA).wait()
    assert job.code == 0, job.text
    job = server.start("eval", folder, "--k", "2", "--problems", "4", "--json").wait()
    assert job.code == 0, job.text
    assert "step-" in json.loads(job.out)["model"]
    assert summary(folder)["step"] == 4
    newest = max((folder / "checkpoints").iterdir())
    policy, base = Policy.load(str(newest / "model")), Policy.load("builtin")
    assert policy.adapted
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert not torch.equal(policy.model(ids).logits, base.model(ids).logits)
    job = server.start(
        "train", "--output", tmp_path / "next", "--model", newest / "model", *TINY, "--steps", "1"
    ).wait()
    assert job.code == 0, job.text
    assert (tmp_path / "next" / "checkpoints" / "step-000001" / "model" / "adapter_config.json").exists()
