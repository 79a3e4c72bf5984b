"""`rpg train --dry-run`: the plan against numbers counted by hand and measured ones, and how it is shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny
from rpg.console import PIPE_WIDTH, estimated_duration, gb
from rpg.costs.devices import DEVICES, at_hand, named
from rpg.models.known_shapes import KNOWN
from rpg.models.meta import config_of, shell
from rpg.models.policy import Policy
from rpg.plan.data import data_of, rows_of
from rpg.plan.plan import plan
from rpg.plan.table import refused, show, verdicts
from rpg.run.auto import settled
from rpg.run.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    OptimConfig,
    PeftConfig,
    ReferenceConfig,
    RolloutConfig,
    TaskConfig,
)

QWEN = Config(
    model="Qwen/Qwen3-4B",
    algorithm="dapo",
    rollout=RolloutConfig(prompts=64, samples=8, max_prompt_tokens=512, max_new_tokens=1024, overlong_tokens=64),
)
BUILTIN = 21 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 448 + 2 * 128) + 128  # words, layers, the last norm
PARAMETERS = {
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_known_model_has_its_published_parameters(name):
    found = shell(name, torch.bfloat16, {})
    assert found.parameters == found.trained == PARAMETERS[name]
    assert {p.device.type for p in found.model.parameters()} == {"meta"}


def test_every_known_model_is_a_config():
    for name in KNOWN:
        config, where = config_of(name, {})
        assert config.vocab_size in (151936, 152064)
        assert config.rope_parameters["rope_theta"] == 1e6
        assert where == "shapes that rpg knows"


def test_models_from_folders(tmp_path):
    assert shell("builtin", torch.float32, {}).parameters == BUILTIN
    config_of("builtin", {})[0].save_pretrained(tmp_path / "mine")
    assert shell(str(tmp_path / "mine"), torch.float32, {}).parameters == BUILTIN
    for name, text in {"./none": "no config.json", "mine.gguf": "is not here", "some/model": "some/model"}.items():
        with pytest.raises(ValueError, match=text) as error:
            shell(name, torch.float32, {})
        assert "\n" not in str(error.value)


def test_a_folder_with_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "builtin", "peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]})
    )
    found = shell(str(tmp_path), torch.float32, {})
    assert (found.parameters, found.trained) == (BUILTIN, 4 * 4 * (128 + 128))  # layers × rank × (in + out)


def test_a_gguf_file_is_planned_from_its_header(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config, where = config_of(str(tmp_path / "m.gguf"), {})
    assert where == "the file's header"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (64, 2, 96)
    assert shell(str(tmp_path / "m.gguf"), torch.float32, {}).parameters > 2 * (2 * 64 * 64 + 3 * 64 * 96)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_counted_by_hand():
    found, n = plan(QWEN, "h200"), PARAMETERS["Qwen/Qwen3-4B"]
    assert found.dtype == "bfloat16"
    assert found.memory.weights == 2 * n
    assert found.memory.masters + found.memory.moments + found.memory.gradients == (4 + 8 + 4) * n
    assert found.memory.reference == 0
    assert found.memory.cache == found.layout.held(settled(QWEN), True) * 36 * 2 * 8 * 128 * 2
    assert found.fits
    assert found.memory.peak <= found.available == int(0.9 * 141e9)
    assert (found.layout.slots % 64, found.layout.offload, found.recompute) == (0, True, False)
    stays = plan(replace(QWEN, optim=OptimConfig(offload=False)), "h200")
    assert (stays.layout, stays.recompute) == (found.otherwise, False)


def test_a_reference_is_held_where_the_algorithm_wants_one():
    held = plan(replace(QWEN, algorithm="grpo"), "h200")
    assert held.method.anchor == "frozen"
    assert held.memory.reference == held.memory.weights
    assert held.middle.seconds.logp > 0
    assert plan(QWEN, "h200").middle.seconds.logp == 0


def test_a_teacher_and_a_moving_average_are_counted(capsys):
    """A teacher by its own size, in memory and in time but not on disk; an average in float32 too."""
    small, large = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    config = Config(algorithm="distill", model=small, reference=ReferenceConfig(model=large))
    taught, own = (plan(replace(config, reference=ReferenceConfig(model=name)), "h200") for name in (large, small))
    assert own.memory.reference == own.memory.weights
    assert taught.memory.reference == 2 * shell(large, torch.bfloat16, {}).parameters > 10 * own.memory.reference
    assert taught.disk.checkpoint == own.disk.checkpoint == plan(Config(model=small), "h200").disk.checkpoint
    assert taught.middle.seconds.logp > 2 * own.middle.seconds.logp
    show(taught)
    assert f"anchored to {large}, a teacher" in " ".join(capsys.readouterr().out.split())
    adapter = plan(replace(config, peft=PeftConfig("lora")), "h200")
    assert adapter.memory.reference == taught.memory.reference
    warp = plan(Config(algorithm="warp", model=small), "h200")
    assert warp.memory.reference == 3 * warp.memory.weights
    warp = plan(Config(algorithm="warp", model=small, peft=PeftConfig("lora")), "h200")
    assert warp.memory.reference == 6 * warp.trained


def test_a_teacher_of_other_tokens_is_no_plan(tmp_path, monkeypatch):
    """Where both tokenizers are here; else the plan says that it did not look."""
    monkeypatch.setattr("rpg.models.vocabulary._cached", lambda name, options: None)
    for name, more in (("student", []), ("teacher", []), ("strange", ["<new>"])):
        Policy(tiny.make("llama"), tiny.tokenizer()).save(tmp_path / name)
        other = tiny.tokenizer()
        other.add_tokens(more)
        other.save_pretrained(tmp_path / name)

    def planned(model, teacher):
        return plan(Config(algorithm="distill", model=model, reference=ReferenceConfig(model=teacher)), "h200")

    student, teacher, strange = (str(tmp_path / name) for name in ("student", "teacher", "strange"))
    assert not any("vocabulary" in text for text in planned(student, teacher).warnings)
    with pytest.raises(
        ValueError, match=r"reference\.model .*teacher has another vocabulary than .*: '<new>' is token"
    ):
        planned(strange, teacher)
    small, large = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    unchecked = "whether reference.model has the model's vocabulary was not checked: the tokenizer of {} is not here"
    assert unchecked.format(small) in planned(small, large).warnings
    assert unchecked.format(large) in planned(student, large).warnings
    with pytest.raises(
        ValueError, match=r"0\.5B-Instruct has 151936 embeddings and .*7B-Instruct has 152064: it cannot"
    ):
        planned(large, small)


def test_an_adapter_holds_next_to_nothing():
    """Rank 16 on all seven matrices of 28 layers, in bfloat16 with float32 masters; the reference is the base."""
    config = replace(QWEN, algorithm="grpo", model="Qwen/Qwen2.5-7B-Instruct", peft=PeftConfig("lora"))
    found = plan(config, "h200")
    widths = 3584 + 3584 + 2 * (3584 + 512) + 3584 + 3584 + 2 * (3584 + 18944) + 18944 + 3584
    trained = 28 * 16 * widths
    assert (found.parameters, found.trained) == (7_615_616_512, trained)
    assert found.memory.weights == 2 * (7_615_616_512 + trained)
    assert found.memory.masters + found.memory.moments + found.memory.gradients == 16 * trained
    assert found.memory.reference == 0
    assert found.fits
    assert not plan(replace(config, peft=PeftConfig()), "h200").fits
    assert found.disk.checkpoint == (2 + 12) * trained  # the adapter, its masters and moments
    renewed = plan(replace(config, reference=replace(config.reference, update="every")), "h200")
    assert renewed.memory.reference == 2 * trained


def test_what_does_not_fit_says_what_to_change(monkeypatch):
    seven = replace(QWEN, model="Qwen/Qwen2.5-7B-Instruct")
    texts = {
        ("dapo", "h200"): "--peft.method lora trains an adapter; or several GPUs",
        ("grpo", "h100"): "--peft.method lora trains an adapter",
    }
    for (algorithm, device), text in texts.items():
        ok, line = next(verdicts(plan(replace(seven, algorithm=algorithm), device)))
        assert not ok
        assert "does not fit" in line
        assert text in line
    four = replace(QWEN, algorithm="grpo")
    ok, line = next(verdicts(plan(four, "h100")))
    assert (ok, "lora" in line) == (False, True)
    half = replace(QWEN, algorithm="grpo", model="Qwen/Qwen2.5-1.5B", rollout=replace(QWEN.rollout, slots=8))
    big = replace(DEVICES["h100"], memory=int(32.5e9 / 0.9))
    monkeypatch.setitem(DEVICES, "test", big)
    found = plan(half, "test")
    assert not found.fits
    assert "--reference.update old" in next(verdicts(found))[1]


# ---- time ------------------------------------------------------------------------------------------------------------


def test_the_step_that_was_measured():
    """docs/speed-table.md, the whole RL step: 2.396 s, of which 0.802 s sampling; all responses of the same length."""
    config = Config(
        model="Qwen/Qwen2.5-0.5B",
        algorithm="dapo",
        rollout=RolloutConfig(
            prompts=64, samples=8, max_prompt_tokens=178, max_new_tokens=320, slots=512, dynamic=False, overlong=False
        ),
        optim=OptimConfig(minibatches=1),
    )
    found = plan(config, "h200", shares=(1.0, 1.0, 1.0), prompt_tokens=178)
    assert 2.396 / 1.5 < found.middle.seconds.step < 2.396 * 1.5
    assert 0.802 / 1.5 < found.middle.seconds.rollout < 0.802 * 1.5
    assert 1.487 / 1.5 < found.middle.seconds.train < 1.487 * 1.5
    assert (found.micro_tokens, found.recompute) == (32768, False)


def test_assumptions_move_the_time():
    found = plan(QWEN, "h200")
    assert [case.length for case in (found.low, found.middle, found.high)] == [256, 512, 1024]
    assert [case.sampled for case in (found.low, found.middle, found.high)] == [1.25, 2.5, 4.0]
    assert found.low.run < found.middle.run < found.high.run
    plain = plan(replace(QWEN, rollout=replace(QWEN.rollout, dynamic=False)), "h200")
    assert plain.middle.sampled == 1
    assert plain.middle.seconds.rollout < found.middle.seconds.rollout / 1.5
    assert plain.middle.seconds.train == found.middle.seconds.train
    assert found.evaluations == 6  # at 0, 10, …, 50
    assert found.middle.run == pytest.approx(50 * found.middle.seconds.step + 6 * found.middle.seconds.evaluation)
    short = plan(replace(QWEN, minutes=1.0, eval=EvalConfig(every=0)), "h200")
    spent = short.middle.run - 2 * short.middle.seconds.evaluation
    assert 60 <= spent < 60 + short.middle.seconds.step  # the step that is under way is finished


def test_a_slower_device_takes_longer():
    h200, h100, a100 = (plan(QWEN, name).middle.seconds.train for name in ("h200", "h100", "a100"))
    assert h200 <= h100 < a100


# ---- problems, disk, device ------------------------------------------------------------------------------------------


def test_problems(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n' * 30 + "\n")
    found = data_of(Config(task=TaskConfig(name="a.jsonl")))
    assert (found.rows, found.tests, found.evaluated) == (27, {"a.jsonl": 3}, 3)
    found = data_of(Config(task=TaskConfig(name="gsm8k", test="aime24, amc23,a.jsonl"), eval=EvalConfig(problems=35)))
    assert (found.rows, found.tests) == (7473, {"aime24": 30, "amc23": 40, "a.jsonl": 30})
    assert found.evaluated == 30 + 35 + 30
    assert data_of(Config()).rows is None
    assert 5 < data_of(Config()).prompt < 40
    assert data_of(Config(task=TaskConfig(name="gsm8k"))).tests == {"gsm8k": 1319}
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "a.parquet")
    assert rows_of("a.parquet") == 2
    for name, text in {"none.jsonl": "no such file: none.jsonl", "gsmk8": "Did you mean 'gsm8k'"}.items():
        with pytest.raises(ValueError, match=text):
            rows_of(name)


def test_disk(tmp_path):
    config = replace(Config(output="runs/new"), checkpoint=CheckpointConfig(keep=3, best=False))
    found = plan(config, "cpu").disk
    assert found.checkpoint == (4 + 8) * BUILTIN
    assert (found.kept, found.holds_run) == (4, False)
    assert found.free > 0
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / "metrics.jsonl").write_text("{}\n")
    made = plan(config, "cpu")
    assert made.disk.holds_run
    assert (False, "runs/new holds a run already: give --resume to go on with it, or another --output") in verdicts(
        made
    )
    full = replace(made, disk=replace(made.disk, free=10**6))
    assert any(ok is False and "lower checkpoint.keep" in line for ok, line in verdicts(full))
    assert refused(full)


def test_the_disk_of_another_machine_is_not_judged(tmp_path, monkeypatch):
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    config = replace(Config(output="runs/new"), checkpoint=CheckpointConfig(keep=300, best=False))
    assert refused(plan(config, "cpu"))
    there = plan(config, "h200")
    *_, (ok, line) = verdicts(there)
    assert (ok, there.disk.holds_run, refused(there)) == (None, False, False)
    assert line.endswith(f"301 at most at a time: {gb(301 * there.disk.checkpoint)} GB of disk")


def test_devices():
    found = at_hand(torch.device("cpu"))
    assert found.cpu
    assert found.memory > 2**30
    assert found.flops > 1e8
    assert found.bandwidth > 1e8
    assert all(device.memory and device.source for device in DEVICES.values())
    assert DEVICES["h100"].flops == pytest.approx(DEVICES["h200"].flops)  # the same chip
    with pytest.raises(ValueError, match="Did you mean 'h200'"):
        named("h20")


# ---- as text ---------------------------------------------------------------------------------------------------------


def test_the_text(capsys):
    show(plan(replace(QWEN, algorithm="rpg-reinforce-urkl"), "h200"))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= PIPE_WIDTH
    assert "\x1b" not in out
    for text in (
        *("a plan, nothing is loaded or written", "anchored to the sampling policy, so no second model is held"),
        *("dynamic sampling: groups all solved or none solved are replaced", "overlong penalty in the last 64 tokens"),
        *("4.02 B parameters, all trained; bfloat16", "64 prompts × 8 responses of up to 1,024 tokens"),
        *("weights", "masters", "moments", "gradients", "reference", "cache", "activations", "together", "8.0"),
        *(
            "masters host 16.1 float32 copies",
            "An estimate",
            "offload: 48.3 GB lie in host memory while sampling",
            "rollout",
            "log-probabilities",
            "the run",
            "✓ fits",
        ),
        *("prompts sampled for one kept", "NVIDIA's H200 data sheet", "config.yaml, metrics.jsonl"),
    ):
        assert text in " ".join(out.split()), text


def test_the_text_of_others(capsys):
    config = replace(QWEN, algorithm="grpo", model="Qwen/Qwen2.5-7B-Instruct", peft=PeftConfig("lora"))
    show(plan(config, "h200"))
    show(plan(replace(config, peft=PeftConfig()), "h200"))
    show(plan(replace(QWEN, algorithm="reinforce"), "h200"))
    four = replace(QWEN, optim=OptimConfig(offload=False), rollout=replace(QWEN.rollout, cache_dtype="fp8"))
    show(plan(four, "h200"))
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        *("masters 16.1 16.1 float32", "no offload: ", "with it (optim.offload)", "keys and values in 8 bits: "),
        *("gradients 16.1 summed", "recomputed in the backward pass"),
        *(
            "40.4 M trained (lora)",
            "the model with its adapter off, no copy",
            "of which a copy is held",
            "✗ does not fit",
        ),
        *("no KL term, so no reference", "no dynamic sampling; no overlong penalty", "! reinforce has no importance"),
        "as if it fitted, with 64 responses at a time",
    ):
        assert text in out, text


def test_what_is_auto_is_said_and_what_would_spoil_a_model_is_crossed(capsys):
    asked = Config(model="Qwen/Qwen3-4B", task=replace(QWEN.task, name="gsm8k"))
    show(plan(asked, "h200"))
    out = " ".join(capsys.readouterr().out.split())
    assert "lr 1e-06 (auto: all weights of a pretrained model)" in out
    assert "4,096 tokens (auto: Qwen3-4B thinks before it answers)" in out
    assert "✗ optim" not in out
    assert "✗ rollout" not in out
    show(plan(replace(asked, optim=OptimConfig(lr=5e-4), rollout=RolloutConfig(max_new_tokens=80)), "h200"))
    out = " ".join(capsys.readouterr().out.split())
    assert "✗ optim.lr 0.0005 on all weights of a pretrained model ruins it" in out
    assert "✗ rollout.max_new_tokens 80 cuts nearly every response" in out
    ruinous = replace(asked, optim=OptimConfig(lr=5e-4))
    assert refused(plan(ruinous, "h200"))
    show(insisted := plan(replace(ruinous, insist=True), "h200"))
    assert not refused(insisted)
    assert "! optim.lr 0.0005 on all weights of a pretrained model ruins it" in capsys.readouterr().out
    show(plan(replace(asked, rollout=RolloutConfig(max_new_tokens=40960)), "h200"))
    out = " ".join(capsys.readouterr().out.split())
    assert "✗ rollout.max_new_tokens 40,960 and prompts of some 256 tokens do not fit into the 40,960" in out
    assert plan(Config(), "cpu").objections == ()
    guessed = plan(Config(task=replace(QWEN.task, name="gsm8k")), "cpu")  # prompts of 256 tokens, into 256
    assert not refused(guessed)
    assert any("prompts of some 256 tokens do not fit" in text for text in guessed.warnings)


def test_durations():
    texts = {0: "0 s", 0.012: "12 ms", 3.21: "3.2 s", 90: "90 s", 840: "14 min", 14_800: "4.1 h", 1e6: "12 days"}
    for seconds, text in texts.items():
        assert estimated_duration(seconds) == text


def test_minutes_end_a_planned_run() -> None:
    config = replace(Config(), model="Qwen/Qwen2.5-0.5B", steps=100_000, minutes=5.0)
    found = plan(config, "h200")
    assert found.middle.steps < 100_000
    assert found.middle.steps * found.middle.seconds.step == pytest.approx(300, rel=0.05)
    assert found.middle.run - found.evaluations * found.middle.seconds.evaluation == pytest.approx(300, rel=0.05)
    assert found.evaluations == 2 + (found.middle.steps - 1) // 10


def test_a_run_that_its_minutes_end_has_columns_by_length_and_says_how_many_evaluations(capsys) -> None:
    config = replace(QWEN, steps=1000, minutes=3.0, rollout=replace(QWEN.rollout, overlong=False))
    show(found := plan(config, "h200"))
    out = " ".join(capsys.readouterr().out.split())
    assert "short middle long" in out
    assert "low" not in out.split("time, estimated")[1].split("mean response")[0]
    steps = [case.steps for case in (found.low, found.middle, found.high)]
    assert steps == sorted(steps, reverse=True)
    assert f"steps {steps[0]} {steps[1]} {steps[2]} evaluations, not counted in minutes" in out
    assert "as published: PPO-clip" in out
    assert "no overlong penalty (rollout.overlong false)" in out
    show(plan(replace(config, minutes=0.001), "h200"))
    assert "0.001 minutes, over within the first step: 1 step, " in " ".join(capsys.readouterr().out.split())
    show(plan(replace(QWEN, steps=1000), "h200"))
    out = " ".join(capsys.readouterr().out.split())
    assert "low middle high" in out
    assert not [text for text in ("as published:", "(rollout.", "not counted in minutes") if text in out]


def test_what_is_planned_is_what_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"prompt": "p", "answer": "1"}\n' * 40)
    task = replace(QWEN.task, name="a/train.jsonl + 2*b/train.jsonl")
    found = plan(replace(QWEN, task=task), "h200").data
    assert (found.rows, found.tests) == (72, {"a/train.jsonl": 4, "b/train.jsonl": 4})
    math = plan(replace(QWEN, task=replace(QWEN.task, name="math")), "h200").data
    assert list(math.tests) == ["math-500"]
    two = plan(replace(QWEN, task=replace(QWEN.task, name="gsm8k", test="aime24, aime25,")), "h200").data
    assert two.tests == {"aime24": 30, "aime25": 30}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("0.5*gsm9k + math", "Did you mean 'gsm8k'"),
        ("-1*gsm8k", "must be positive"),
        ("gym:nonsense", "gym:nonsense: unknown generator"),
        ("nofile.py:make", "no such file: nofile.py"),
        ("aime24", "task 'aime24' has no problems to train on"),
    ],
)
def test_a_task_that_cannot_be_had_is_refused(name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(replace(QWEN, task=replace(QWEN.task, name=name)), "h200")


def test_vllm_takes_its_share_and_log_probabilities_are_computed_anew():
    native = plan(QWEN, "h200")
    config = replace(QWEN, rollout=replace(QWEN.rollout, engine="vllm"))
    found = plan(config, "h200")
    assert found.memory.cache == pytest.approx(0.4 * found.device.memory, rel=0.01)
    assert found.middle.seconds.logp > native.middle.seconds.logp
    half = plan(replace(config, rollout=replace(config.rollout, vllm={"gpu_memory_utilization": 0.5})), "h200")
    assert half.memory.cache == pytest.approx(0.5 * half.device.memory, rel=0.01)
    wrong = replace(config, rollout=replace(config.rollout, vllm={"gpu_memory_utilization": "abc"}))
    with pytest.raises(ValueError, match=r"rollout\.vllm\.gpu_memory_utilization must be between 0 and 1"):
        plan(wrong, "h200")


def test_a_model_without_attention_is_one_line(tmp_path):
    import transformers

    transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no attention heads"):
        plan(replace(QWEN, model=str(tmp_path)), "h200")


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output: cannot write into"):
        plan(replace(QWEN, output=str(tmp_path / "file")), "h200")
