"""The file: what is wrong with one is a line, the ten lines of the docs write one, and the command reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import guides
import rpg
import tiny
from guides import ROOT
from rpg.recorded.layout import checked, read, write
from rpg.recorded.losses import loss_as_data, loss_of_data
from rpg.replay import find
from rpg.run.config import Config, LogConfig


def tensors(**changes):
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
    given = {
        "ids": torch.randint(2, 9, (4, 5)),
        "prompt_length": torch.tensor([2, 2, 1, 1]),
        "mask": mask_BT,
        "old_logp": -torch.rand(4, 3),
        "reward": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "group": torch.tensor([7, 7, 3, 3]),
    }
    return {name: x for name, x in (given | changes).items() if x is not None}


ABOUT = {"temperature": 1.0}


def test_a_file_comes_back_as_it_was_written(tmp_path):
    given = tensors(old_logp=-torch.rand(4, 3).masked_fill(tensors()["mask"] == 0, torch.nan))
    write(tmp_path / "a" / "batch.safetensors", given, ABOUT | {"method": {"name": "dapo"}, "step": None})
    found = read(tmp_path / "a" / "batch.safetensors")
    assert found.about == {"temperature": 1.0, "method": {"name": "dapo"}}
    assert found.group_B.tolist() == [1, 1, 0, 0]
    assert found.response_length_B.tolist() == [2, 3, 1, 2]
    assert torch.equal(found.old_logp_BT, given["old_logp"].nan_to_num(0))  # whatever is under the mask
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["batch.safetensors"]


def test_lengths_stand_for_a_mask():
    lengths = torch.tensor([2, 3, 1, 2])
    found = checked(tensors(mask=None, response_length=lengths), ABOUT)
    assert torch.equal(found.mask_BT, tensors()["mask"].bool())
    holes = checked(tensors(response_length=torch.tensor([3, 3, 2, 2])), ABOUT)  # an end that is not trained on
    assert holes.response_length_B.tolist() == [3, 3, 2, 2]


WRONG = [
    ({"reward": None}, "reward is missing"),
    ({"mask": None}, "mask [B,T] or response_length [B] is missing"),
    ({"old_logprobs": torch.zeros(4, 3)}, "Did you mean 'old_logp'?"),
    ({"reward": torch.zeros(3)}, "reward must have shape [4]"),
    ({"ref_logp": torch.zeros(4, 2)}, "ref_logp must have shape [4, 3]"),
    ({"group": torch.zeros(4)}, "group must be whole numbers"),
    ({"prompt_length": torch.tensor([2, 3, 1, 1])}, "prompt_length must be at least 1"),
    ({"prompt_length": torch.tensor([2, 2, 0, 1])}, "prompt_length must be at least 1"),
    ({"mask": torch.zeros(4, 3)}, "mask selects no token"),
    ({"mask": torch.full((4, 3), 0.5)}, "mask must be 0 or 1"),
    ({"response_length": torch.tensor([1, 3, 1, 2])}, "mask has tokens beyond response_length"),
    ({"old_logp": torch.rand(4, 3) + 0.1}, "old_logp must be finite and at most 0"),
    ({"old_logp": torch.full((4, 3), torch.nan)}, "old_logp must be finite"),
    ({"old_logp": torch.zeros(4, 3, dtype=torch.long)}, "(token ids?)"),
    ({"reward": torch.full((4,), torch.inf)}, "reward must be finite"),
    ({"advantages": torch.zeros(3)}, "advantages must be [4] or [4, 3]"),
    ({"kept_ids": torch.zeros(4, dtype=torch.int32)}, "kept_count and kept_ids go together"),
]


@pytest.mark.parametrize(("changes", "line"), WRONG, ids=[line for _, line in WRONG])
def test_what_is_wrong_with_a_file_is_one_line(changes, line, tmp_path):
    said = {name: json.dumps(value) for name, value in ABOUT.items()}
    save_file(tensors(**changes), tmp_path / "x", said)
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        read(tmp_path / "x")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "x"))


def test_a_file_without_a_temperature_or_that_is_none_is_refused(tmp_path):
    save_file(tensors(), tmp_path / "x")
    with pytest.raises(ValueError, match="metadata temperature must be a positive number"):
        read(tmp_path / "x")
    (tmp_path / "y").write_text("no")
    with pytest.raises(ValueError, match="is no safetensors file"):
        read(tmp_path / "y")
    with pytest.raises(ValueError, match="there is no file"):
        read(tmp_path / "z")


@pytest.mark.parametrize("name", rpg.algorithms())
def test_every_loss_is_plain_data(name):
    loss = rpg.algorithm(name, mismatch=rpg.mismatch.SequenceMask()).loss
    assert loss_of_data(json.loads(json.dumps(loss_as_data(loss)))) == loss


# ---- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "x", "3,-1", "1.5"])
def test_steps_to_record_are_numbers(text):
    with pytest.raises(ValueError, match=r"log\.record must be steps"):
        Config(log=LogConfig(record=text))
    with pytest.raises(ValueError, match="beyond the last step: steps=50"):
        Config(log=LogConfig(record="3, 51"))


def test_a_run_that_records_has_the_same_bits(command, tmp_path):
    small = ["--steps=2", "--rollout.prompts=8", "--rollout.samples=4", "--rollout.max_new_tokens=24", "--eval.every=0"]
    small += ["--eval.problems=2", "--eval.k=1", "--log.view=none", "--log.tensorboard=false", "--log.report=false"]
    for name, more in (("with", ["--log.record=2", "--rollout.top_p=0.9"]), ("without", ["--rollout.top_p=0.9"])):
        done = command("train", f"--output={tmp_path / name}", *small, *more)
        assert done.code == 0, done.text
    a, b = (load_file(tmp_path / f / "checkpoints/step-000002/model/model.safetensors") for f in ("with", "without"))
    assert all(torch.equal(x, b[name]) for name, x in a.items())

    done = command("replay", str(tmp_path / "without"))
    assert done.code == 2
    assert done.text.strip() == (
        f"rpg replay: {tmp_path / 'without'} has recorded no batch: train with --log.record STEP, then replay"
    )
    numbers = tmp_path / "x.json"
    done = command("replay", str(tmp_path / "with"), "--methods", "dapo", "grp*", "remax", f"--json={numbers}")
    assert done.code == 0, done.text
    assert "rpg-reinforce-urkl *" in done.out
    assert "left out: remax" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    found = json.loads(numbers.read_text())
    assert [entry["name"] for entry in found["entries"]] == ["rpg-reinforce-urkl", "dapo", "grpo", "grpo-corrected"]
    assert found["entries"][0]["grad_norm"] == pytest.approx(found["measured"]["grad_norm"], rel=1e-5)
    assert found["entries"][0]["loss"] == pytest.approx(found["measured"]["loss"], rel=1e-5, abs=1e-7)  # over kept sets
    page = (tmp_path / "with" / "recorded" / "step-000002.html").read_text(encoding="utf-8")
    assert page.count("<section") == 6
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=", page)


# ---- the page of the docs --------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")


def test_the_ten_lines_of_the_docs_write_a_batch(tmp_path, monkeypatch):
    """As a trainer has it: lists of tokens, and tensors padded on the right."""
    from rpg.models.policy import Policy
    from rpg.replay import model_of, replay

    (code,) = guides.blocks(PAGE, "python")
    assert len(code.strip().splitlines()) <= 10
    policy = Policy(tiny.make("llama"), tiny.tokenizer())
    policy.save(tmp_path / "checkpoint-40")
    groups = tiny.groups(policy, sizes=(4, 3, 5))
    rows = [(g, group.prompt_ids, response) for g, group in enumerate(groups) for response in group.responses]
    longest = max(len(r.rollout.tokens) for _, _, r in rows)
    old_logp = torch.zeros(len(rows), longest)
    for row, (_, _, r) in zip(old_logp, rows, strict=True):
        row[: len(r.rollout.logp)] = torch.tensor(r.rollout.logp)
    known = {
        "prompts": [prompt for _, prompt, _ in rows],
        "responses": [r.rollout.tokens for _, _, r in rows],
        "old_logp": old_logp,
        "rewards": [r.reward for _, _, r in rows],
        "groups": [g for g, _, _ in rows],
        "loss": 0.1,
        "grad_norm": 0.2,
    }
    monkeypatch.chdir(tmp_path)
    exec(code, known)
    recorded = read("batch.safetensors")
    done = replay(recorded, Policy.load(model_of(recorded, Path("batch.safetensors"))), ["rloo"])
    assert [entry.name for entry in done.entries] == ["grpo", "rloo"]
    assert recorded.measured == {"loss": 0.1, "grad_norm": 0.2}
    assert recorded.groups == 3
    assert done.ran.metrics["kl/old"] < 0.5


def test_every_tensor_and_column_has_its_row_in_the_docs():
    from rpg.recorded.layout import METADATA, NEEDED, OPTIONAL
    from rpg.replay.page import COLUMNS
    from rpg.replay.table import TITLES

    rows = set(re.findall(r"^\| (`[^|]+?) \|", PAGE, re.M))
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert {*NEEDED, *OPTIONAL, *METADATA} <= named
    assert {*COLUMNS, *TITLES} - {"method", "|g|"} <= named


@pytest.mark.parametrize("name", ["mine", "recorded"])
def test_a_run_of_any_name_has_its_newest_batch(name, tmp_path):
    folder = tmp_path / name / "recorded"
    with pytest.raises(ValueError, match="has recorded no batch"):
        find(tmp_path)
    folder.mkdir(parents=True)
    for step in (10, 9):
        (folder / f"step-{step:06}.safetensors").touch()
    assert find(tmp_path / name) == find(folder) == folder / "step-000010.safetensors"
