"""The change of two lines in docs/trl.md, run."""

import json
import re
from pathlib import Path

import pytest

import tiny

pytest.importorskip("trl")

GUIDE = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")


def test_two_lines(tmp_path, monkeypatch):
    (diff,) = re.findall(r"```diff\n(.*?)```", GUIDE, re.S)
    lines = diff.splitlines()
    assert [sum(line[0] == sign for line in lines) for sign in "-+"] == [2, 2]
    before = "\n".join(line[1:] for line in lines if line[0] != "+")
    after = "\n".join(line[1:] for line in lines if line[0] != "-")
    assert before.replace("trl import", "rpg.integrations.trl import").replace("GRPO", "RPG") == after

    tiny.make("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": f"w{i}", "answer": "w5"}) for i in range(2, 10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    small = 'max_steps=2, max_completion_length=20, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True'
    code = after.replace("Qwen/Qwen2.5-0.5B", str(tmp_path / "model")).replace("max_steps=100", small)
    assert code.count(small) == 1
    names: dict[str, object] = {}
    exec(code, names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    assert trainer.ref_model is None


def test_every_refused_setting_is_in_the_guide():
    from rpg.integrations.trl.config import DECIDED

    for name in DECIDED:
        stem = re.sub(r"^(ref_model|sapo|vespo|vllm_importance_sampling)_.*", r"\1_", name)
        assert f"`{name}`" in GUIDE or f"`{stem}" in GUIDE, name
