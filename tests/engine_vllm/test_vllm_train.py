"""`rpg train` with vLLM: the real command, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from engine_vllm.small_models import needs_vllm

pytestmark = needs_vllm
TINY = [
    *("--rollout.engine", "vllm", "--rollout.vllm.kv_cache_memory_bytes", str(2**26)),
    *("--rollout.prompts", "8", "--rollout.samples", "4", "--rollout.max_new_tokens", "32"),
    *("--eval.problems", "16", "--eval.k", "2", "--eval.every", "2", "--checkpoint.every", "2"),
    *("--optim.schedule", "constant"),  # else a run of fewer steps is another one from the start
    *("--log.view", "plain", "--log.tensorboard", "false", "--log.report", "false"),
]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}


def rpg(*argv):
    command = [sys.executable, "-m", "rpg.cli", *map(str, argv)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300, check=False)


def train(folder, *argv):
    done = rpg("train", "--output", folder, *TINY, *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(row) for row in rows]


def steady(rows):
    """All but seconds and bytes; floats to the digits in which a batch's layout does not show."""
    changing = ("time/", "speed/", "memory/", "mismatch/")
    return [
        {key: pytest.approx(value, rel=1e-3, abs=1e-4) for key, value in row.items() if not key.startswith(changing)}
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "whole", "--steps", 4)


def test_engine_and_trainer_agree_at_every_step(whole):
    """Had the weights not been synchronised, the engine's log-probabilities would be those of an earlier step."""
    steps = [row for row in whole if row["step"]]
    assert len(steps) == 4
    for row in steps:
        assert row["old_logp/recomputed"] == 1
        assert row["mismatch/max_log_ratio"] < 1e-3
        assert 0 <= row["mismatch/kl"] < 1e-8
        assert row["ratio/max"] > 1.001  # the policy moves within a step
    assert [row["step"] for row in whole if "eval/arithmetic/mean@2" in row] == [0, 2, 4]
    assert 0.1 < whole[0]["eval/arithmetic/mean@2"] < 0.9


def test_without_sync_the_mismatch_shows(tmp_path, monkeypatch):
    """The proof that the test above can fail."""
    import rpg.rollout.vllm as module
    from rpg.cli import main

    ready = module.VllmEngine._ready

    def once(self):
        self.stale = self.stale and not getattr(self, "_seen", 0) > 1
        self._seen = getattr(self, "_seen", 0) + 1
        ready(self)

    monkeypatch.setattr(module.VllmEngine, "_ready", once)
    made = []
    start = module.VllmEngine.__init__
    monkeypatch.setattr(
        module.VllmEngine, "__init__", lambda self, *a, **k: (made.append(self), start(self, *a, **k))[1]
    )
    folder = tmp_path / "run"
    assert (
        main(["train", "--output", str(folder), *TINY, "--steps", "3", "--optim.lr", "1e-3", "--optim.warmup", "0"])
        == 0
    )
    for engine in made:
        engine.close()
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[1]["mismatch/max_log_ratio"] < 1e-3
    assert rows[3]["mismatch/max_log_ratio"] > 1e-2


def test_a_resumed_run_is_the_run_itself(tmp_path, whole):
    folder = tmp_path / "run"
    train(folder, "--steps", 2)
    rows = train(folder, "--steps", 4, "--resume")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row, want in zip(rows, steady(whole), strict=True):
        assert {key: row.get(key) for key in want} == want


@pytest.mark.parametrize("rule", ["tis", "icepop"])
def test_a_mismatch_rule_has_the_engines_log_probabilities(tmp_path, rule):
    """With truncated sampling too, both over the tokens kept: what differs is float error."""
    how = ("--loss.mismatch", rule, "--rollout.top_p", "0.7", "--rollout.top_k", "10")
    for row in train(tmp_path / "run", "--steps", 2, *how)[1:]:
        assert 0 < row["mismatch/max_log_ratio"] < 1e-3
        assert 0 <= row["mismatch/kl"] < 1e-8
        assert row["old_logp/recomputed"] == 1


def test_truncated_sampling_without_a_bound_is_one_line(tmp_path):
    done = rpg("train", "--output", tmp_path / "run", *TINY, "--rollout.top_p", "0.9")
    assert done.returncode == 2
    assert "--rollout.top_k 100" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_adapter(tmp_path):
    pytest.importorskip("peft")
    lora = ("--peft.method", "lora", "--peft.options.r", "4", "--optim.lr", "1e-3", "--optim.warmup", "0")
    for row in train(tmp_path / "run", "--steps", 3, *lora)[1:]:
        assert row["mismatch/max_log_ratio"] < 1e-3


def test_averaged_weights_are_evaluated(tmp_path):
    """In the run as after it, from the checkpoint, which holds them; sampling goes on with those that are stepped."""
    every = ("--eval.every", 1, "--checkpoint.every", 1, "--checkpoint.keep", 9)
    how = ("--optim.name", "schedule-free", "--optim.lr", "1e-3", "--optim.warmup", "0")
    rows = train(tmp_path / "run", "--steps", 3, *every, *how)
    assert all(row["mismatch/max_log_ratio"] < 1e-3 for row in rows[1:])
    done = rpg("eval", tmp_path / "run", "--checkpoint", 2, "--k", 2, "--problems", 16, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    after = {key: value for key, value in json.loads(done.stdout).items() if key != "model"}
    assert after["eval/arithmetic/length"] > 0
    assert {key: rows[2][key] for key in after} == pytest.approx(after, abs=1e-6)


def test_an_option_that_does_not_go_is_one_line(tmp_path):
    done = rpg("train", "--output", tmp_path / "run", *TINY, "--rollout.vllm.colour", "red")
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert "vLLM cannot run LlamaForCausalLM" in line
    assert "colour" in line
    assert "Traceback" not in done.stderr
