"""The loop from inside: every preset trains, and the reference is what its rule says."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import rpg
from rpg.distributed.context import QUIET
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine
from rpg.run import checkpoint
from rpg.run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, ReferenceConfig, RolloutConfig
from rpg.run.folder import RunFolder, locked
from rpg.run.settings import flat
from rpg.run.view import View
from rpg.training.batch import Batch
from rpg.training.loop import Failed, Trainer, train
from rpg.training.state import check_settings
from running import without_lights


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(folder: Path, **changes: Any) -> Config:
    config = Config(
        output=str(folder),
        steps=2,
        rollout=RolloutConfig(prompts=4, samples=4, max_new_tokens=24),
        eval=EvalConfig(every=0, problems=4, k=2),
        optim=OptimConfig(lr=1e-4, warmup=0),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )
    return replace(config, **changes)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", rpg.algorithms())
def test_every_preset_trains(tmp_path: Path, name: str) -> None:
    reference = ReferenceConfig()
    if name == "distill":  # from a model that is not the trained one
        teacher = Policy.load("builtin")
        with torch.no_grad():
            teacher.head().mul_(1.2)
        teacher.save(tmp_path / "teacher")
        reference = ReferenceConfig(model=str(tmp_path / "teacher"))
    summary = train(tiny(tmp_path, algorithm=name, reference=reference))
    assert (summary["status"], summary["step"]) == ("finished", 2)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found[1:]:
        assert "not_finite" not in row
        assert all(math.isfinite(value) for value in row.values() if not isinstance(value, list))
        assert row["skipped"] == 0
        assert row["grad_norm"] > 0
        assert row["mismatch/max_log_ratio"] < 1e-3  # the engine's log-probabilities are the trainer's
        names = {"loss", "entropy", "ess", "kl/old", "ratio/max", "lr", "tokens_total"}
        names |= {"clip/low", "clip/high"} if rpg.algorithm(name).loss.clip is not None else set()
        assert names <= row.keys()
    # the first optimiser step of a batch is on-policy, the second is not
    assert found[-1]["tokens_total"] == sum(row["tokens"] for row in found[1:])
    saved = load_file(tmp_path / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    before = parameters(Trainer(tiny(tmp_path), RunFolder(tmp_path), View()))
    moved = [name for name, value in before.items() if not torch.equal(value, saved[name])]
    assert len(moved) == len(before)
    assert all(value.isfinite().all() for value in saved.values())


@pytest.mark.parametrize("name", ["adamw", "schedule-free"])
def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path, name: Any) -> None:
    optim = OptimConfig(name=name, lr=1e-4)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny(tmp_path / folder, seed=seed, optim=optim))
    a, b, c = (load_file(tmp_path / f / "checkpoints/step-000002/model/model.safetensors") for f in "abc")
    assert same(a, b)
    assert not same(a, c)
    assert (tmp_path / "a" / "samples.jsonl").read_bytes() == (tmp_path / "b" / "samples.jsonl").read_bytes()
    # held-out problems do not depend on the seed
    assert rows(tmp_path / "a")[0] == rows(tmp_path / "c")[0]


def test_a_run_of_no_steps_is_an_evaluation(tmp_path: Path) -> None:
    summary = train(tiny(tmp_path, steps=0))
    assert summary["step"] == 0
    assert [row["step"] for row in rows(tmp_path)] == [0]


def test_micro_batches_do_not_change_the_run(tmp_path: Path) -> None:
    for folder, tokens in (("one", 16384), ("many", 100)):
        train(tiny(tmp_path / folder, optim=OptimConfig(lr=1e-4, warmup=0, micro_tokens=tokens)))
    one, many = rows(tmp_path / "one"), rows(tmp_path / "many")
    for name in ("loss", "grad_norm", "entropy", "kl/old"):
        assert one[1][name] == pytest.approx(many[1][name], rel=1e-3, abs=1e-6), name


# ---- the reference policy --------------------------------------------------------------------------------------------


def trainer(folder: Path, update: str = "auto", **changes: Any) -> Trainer:
    return Trainer(tiny(folder, reference=ReferenceConfig(update=update, **changes)), RunFolder(folder), View())  # type: ignore[arg-type]


def test_old_holds_no_second_model(tmp_path: Path) -> None:
    assert trainer(tmp_path).reference.policy is None  # as published
    assert trainer(tmp_path, "old").reference.policy is None
    # without a KL term there is nothing to anchor
    config = tiny(tmp_path, algorithm="dapo", reference=ReferenceConfig(update="frozen"))
    assert Trainer(config, RunFolder(tmp_path), View()).reference.policy is None
    for rule in ("frozen", "every", "kl", "ema"):
        made = trainer(tmp_path, rule)
        assert made.reference.policy is not None
        own = {id(p) for p in made.policy.model.parameters()}
        held = list(made.reference.policy.model.parameters())
        assert not own & {id(p) for p in held}
        assert not any(p.requires_grad for p in held)


def run(folder: Path, update: str, steps: int, resume: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    """What the checkpoint holds of the reference, by the names of the parameters."""
    config = tiny(
        folder,
        steps=steps,
        loss={"beta": 0.1},
        reference=ReferenceConfig(update=update, **changes),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every=1, keep=99),
    )
    train(config, resume=resume)
    return checkpoint.read(folder / "checkpoints" / f"step-{steps:06d}").tensors("reference")


def policy_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    if step == 0:
        return parameters(trainer(folder))
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def test_frozen_survives_a_resume(tmp_path: Path) -> None:
    first = run(tmp_path, "frozen", 1)
    second = run(tmp_path, "frozen", 2, resume=True)
    assert same(policy_at(tmp_path, 0), first)
    assert same(policy_at(tmp_path, 0), second)
    assert not same(policy_at(tmp_path, 1), second)
    assert rows(tmp_path)[2]["kl/ref"] > 0


def test_every_other_step(tmp_path: Path) -> None:
    one, two, three = (run(tmp_path, "every", steps, resume=steps > 1, every=2) for steps in (1, 2, 3))
    assert same(policy_at(tmp_path, 0), one)
    assert same(policy_at(tmp_path, 2), two)
    assert same(policy_at(tmp_path, 2), three)
    assert not same(policy_at(tmp_path, 3), three)
    assert [row["reference/updated"] for row in rows(tmp_path)[1:]] == [0, 1, 0]


def test_by_kl(tmp_path: Path) -> None:
    """Never below the target, at every step with a target of next to nothing."""
    far, near = run(tmp_path / "far", "kl", 2, kl=1e9), run(tmp_path / "near", "kl", 2, kl=1e-12)
    assert same(policy_at(tmp_path / "far", 0), far)
    assert same(policy_at(tmp_path / "near", 2), near)
    assert [row["reference/updated"] for row in rows(tmp_path / "near")[1:]] == [1, 1]


def test_moving_average(tmp_path: Path) -> None:
    found = run(tmp_path, "ema", 2, decay=0.75)
    start, one, two = (policy_at(tmp_path, step) for step in (0, 1, 2))
    for name, value in start.items():
        wanted = 0.75 * (0.75 * value + 0.25 * one[name]) + 0.25 * two[name]
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7)


# ---- schedule-free ---------------------------------------------------------------------------------------------------


def test_schedule_free_ships_the_average_and_goes_on_from_the_iterate(tmp_path: Path) -> None:
    train(tiny(tmp_path, optim=OptimConfig(name="schedule-free", lr=1e-3, warmup=0)))
    found = checkpoint.read(tmp_path / "checkpoints" / "step-000002")
    shipped, iterate = load_file(found.model_folder / "model.safetensors"), found.tensors("parameters")
    z = found.tensors("optimizer")
    for name, y in iterate.items():
        x = (y - 0.1 * z[f"{name}/z"]) / 0.9
        torch.testing.assert_close(shipped[name], x, rtol=1e-4, atol=1e-6)
        assert not torch.equal(shipped[name], y)


# ---- bfloat16 --------------------------------------------------------------------------------------------------------


def first_steps(folder: Path, **how: Any) -> list[dict[str, Any]]:
    """Two steps, each of one optimiser step: its metrics are those before any has been taken on the batch."""
    rollout = RolloutConfig(prompts=6, samples=4, max_new_tokens=24, **how)
    optim = OptimConfig(lr=1e-3, warmup=0, minibatches=1)
    train(tiny(folder, algorithm="grpo-corrected", rollout=rollout, optim=optim))
    return rows(folder)[1:]


@pytest.mark.parametrize("recompute", [False, True], ids=["engine", "recompute"])
def test_with_truncated_sampling_ratios_start_at_one(tmp_path: Path, recompute: bool) -> None:
    """Over the sets that the engine kept; the reference, which has moved away, is over them too."""
    old: dict[str, Any] = {"old_logp": "recompute"} if recompute else {}
    for row in first_steps(tmp_path, top_p=0.8, min_p=0.01, **old):
        assert 1 < row["kept/mean"] < row["kept/max"] <= 21
        assert abs(row["ratio/p01"] - 1) < 1e-4
        assert abs(row["ratio/p99"] - 1) < 1e-4
        assert abs(row["ratio/max"] - 1) < 1e-4
        assert row["clip/low"] == row["clip/high"] == 0
        assert row["mismatch/max_log_ratio"] < 1e-4
        assert 0 <= row["mismatch/kl"] < 1e-8
        assert row["entropy"] > 0


def test_over_all_tokens_they_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the test above can fail."""
    monkeypatch.setattr(Batch, "kept", None)
    row = first_steps(tmp_path, top_p=0.8)[0]
    assert row["ratio/p01"] < 0.98
    assert row["mismatch/kl"] > 1e-4


@pytest.mark.parametrize(("name", "top_p"), [("adamw", 1.0), ("schedule-free", 1.0), ("adamw", 0.9)])
def test_bfloat16_resumes_bit_for_bit(tmp_path: Path, name: Any, top_p: float) -> None:
    """Masters, moments, the measured mismatch and the size of micro-batches are in the checkpoint."""
    changes = {"dtype": "bfloat16", "optim": OptimConfig(name=name, lr=1e-4, warmup=0, schedule="constant")}
    changes["rollout"] = RolloutConfig(prompts=4, samples=4, max_new_tokens=24, top_p=top_p)
    train(tiny(tmp_path / "whole", steps=3, **changes))
    train(tiny(tmp_path / "cut", steps=1, **changes))
    train(tiny(tmp_path / "cut", steps=3, **changes), resume=True)
    one, two = (checkpoint.read(tmp_path / f / "checkpoints" / "step-000003") for f in ("whole", "cut"))
    weights, again = (load_file(found.model_folder / "model.safetensors") for found in (one, two))
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert same(weights, again)
    assert same(one.tensors("optimizer"), two.tensors("optimizer"))
    assert {key.rpartition("/")[2] for key in one.tensors("optimizer")} >= {"master"}
    changing = ("seconds", "spent", "started", "config", "evals", "rows")  # one was evaluated in between
    assert {k: v for k, v in one.state.items() if k not in changing} == {
        k: v for k, v in two.state.items() if k not in changing
    }
    assert one.state["mismatch"] == rows(tmp_path / "whole")[-1]["mismatch/kl"]
    steady = [
        [
            {k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))}
            for row in rows(tmp_path / f)
        ][2:]
        for f in ("whole", "cut")
    ]
    assert steady[0][0] == steady[1][0]


@pytest.mark.parametrize(
    ("setting", "recomputed"), [("auto", [1, 0, 0]), ("engine", [0, 0, 0]), ("recompute", [1, 1, 1])]
)
def test_the_mismatch_is_measured_in_every_step(
    tmp_path: Path, setting: Any, recomputed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpg.training.old_logp.HARMLESS", 1.0)
    sizes = RolloutConfig(prompts=4, samples=4, max_new_tokens=24, old_logp=setting)
    train(tiny(tmp_path, steps=3, dtype="bfloat16", rollout=sizes))
    found = rows(tmp_path)[1:]
    assert [row["old_logp/recomputed"] for row in found] == recomputed
    assert all(row["mismatch/kl"] <= 0.1 and row["mismatch/max_log_ratio"] >= 0 for row in found)
    assert found[0]["mismatch/kl"] > 0


def test_a_mismatch_that_is_not_harmless_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpg.training.old_logp.HARMLESS", 0.0)
    train(tiny(tmp_path, dtype="bfloat16"))
    assert [row["old_logp/recomputed"] for row in rows(tmp_path)[1:]] == [1, 1]


def test_a_mismatch_rule_trains_in_float32_too(tmp_path: Path) -> None:
    train(tiny(tmp_path, steps=1, loss={"mismatch": "tis"}))
    assert rows(tmp_path)[1]["old_logp/recomputed"] == 1
    assert rows(tmp_path)[1]["mismatch/kl"] < 1e-6


def test_a_checkpoint_without_a_newer_setting_had_its_default(tmp_path: Path) -> None:
    config = tiny(tmp_path, loss={"beta": 0.1})
    old = json.loads(json.dumps({name: x for name, x in flat(config).items() if name != "rollout.min_p"}))
    made = SimpleNamespace(state={"config": old, "threads": 1})
    check_settings(config, made, QUIET)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r": rollout.min_p was 0.0 and is now 0.1: leave it, or start another --"):
        check_settings(replace(config, rollout=replace(config.rollout, min_p=0.1)), made, QUIET)  # type: ignore[arg-type]


# ---- out of memory ---------------------------------------------------------------------------------------------------


class Notes(View):
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str, style: Any = "info") -> None:
        self.said.append(text)


def test_out_of_memory_is_survived_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log-probabilities and in training; the engine's caches go first."""
    score, limit, released = Policy.score, [16], []

    def small(self: Policy, ids_BL: torch.Tensor, *others: Any, **named: Any) -> Any:
        if len(ids_BL) > limit[0]:
            raise torch.OutOfMemoryError("no room")
        return score(self, ids_BL, *others, **named)

    monkeypatch.setattr(Policy, "score", small)
    monkeypatch.setattr(NativeEngine, "release", lambda self: released.append(1))
    notes = Notes()
    monkeypatch.setattr("rpg.training.loop.opening", lambda *args, **named: contextlib.nullcontext(notes))
    sizes = RolloutConfig(prompts=4, samples=4, max_new_tokens=24, old_logp="recompute")
    config = tiny(tmp_path, steps=1, rollout=sizes, optim=OptimConfig(lr=1e-4, warmup=0, micro_tokens=4096))
    limit[0] = 3
    train(config)
    assert len(released) > 1
    halvings = [text for text in notes.said if "micro-batches of" in text]
    assert len(halvings) == len(released) - 1
    found = checkpoint.read(tmp_path / "checkpoints" / "step-000001").state["room"]
    assert halvings[-1] == f"out of memory: micro-batches of {found['tokens']} tokens from here on"
    assert found["released"]
    notes.said.clear()
    train(replace(config, steps=2), resume=True)
    assert not [text for text in notes.said if "out of memory" in text]
    limit[0] = 0
    with pytest.raises(Failed, match=r"^the device is out of memory: [^\n]*$"):
        train(replace(config, steps=3), resume=True)


# ---- as a library ----------------------------------------------------------------------------------------------------


def test_failed_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Failed) as caught:
        train(tiny(tmp_path, algorithm="nope"))
    assert "unknown algorithm 'nope'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.setup


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    train(tiny(tmp_path, steps=1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with locked(tmp_path), pytest.raises(Failed, match=f"^another process is training in {tmp_path}$"):
        train(tiny(tmp_path), resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert train(tiny(tmp_path), resume=True)["step"] == 2  # and the lock is gone with its holder


def test_a_mistake_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="unknown task"):
        train(tiny(tmp_path / "new", task=replace(Config().task, name="nothing")))
    assert not (tmp_path / "new").exists()


def test_the_best_is_kept_also_between_checkpoints(tmp_path: Path) -> None:
    changes = {"eval": EvalConfig(every=1, problems=8, k=2), "checkpoint": CheckpointConfig(every=0, keep=1)}
    train(tiny(tmp_path, steps=4, **changes))
    saved = {int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*")}
    scores = {row["step"]: row["eval/arithmetic/mean@2"] for row in rows(tmp_path)}
    best = max(scores, key=lambda step: (scores[step], step))
    assert saved == {4, best} - {0}


def test_a_tracker_that_is_not_there_leaves_no_run_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(Failed, match=r"log\.wandb needs"):
        train(tiny(tmp_path / "run", log=LogConfig(wandb="p", tensorboard=False, report=False, view="none")))
    assert train(tiny(tmp_path / "run", steps=1))["status"] == "finished"


# ---- several held-out sets, a limit of time --------------------------------------------------------------------------


def test_several_sets_each_have_their_scores_and_the_best_is_of_their_mean(tmp_path: Path) -> None:
    task = replace(Config().task, test="arithmetic, countdown")
    every = {"eval": EvalConfig(every=1, problems=6, k=2)}
    summary = train(tiny(tmp_path, task=task, checkpoint=CheckpointConfig(every=1), **every))
    assert list(summary["eval"]) == ["arithmetic", "countdown"]
    for row in rows(tmp_path):
        means = [row[f"eval/{name}/mean@2"] for name in summary["eval"]]
        assert row["eval/mean"] == pytest.approx(sum(means) / 2)
    for name, found in summary["eval"].items():
        values = [row[f"eval/{name}/mean@2"] for row in rows(tmp_path)]
        assert (found["first"], found["last"], found["best"]) == (values[0], values[-1], max(values))
    longer = train(tiny(tmp_path, task=task, steps=3, checkpoint=CheckpointConfig(every=1), **every), resume=True)
    assert longer["eval"]["countdown"]["first"] == summary["eval"]["countdown"]["first"]


def test_minutes_end_a_run_with_an_evaluation_and_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(tiny(tmp_path, steps=10**6, minutes=1e-6))
    assert (summary["step"], summary["status"]) == (1, "finished")
    assert "minutes are over" in summary["message"]
    assert summary["stopped_by"] == "minutes"
    assert without_lights(capsys.readouterr().err) == "", "a planned end is no warning"
    assert "eval/arithmetic/mean@2" in rows(tmp_path)[-1]
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()
    assert capsys.readouterr().err == "", "an end that was planned is no warning"
    again = train(tiny(tmp_path, steps=10**6, minutes=1e-6), resume=True)  # the time of before counts
    assert again["step"] == 1
    assert train(tiny(tmp_path, steps=2), resume=True)["step"] == 2


def test_what_is_auto_is_recorded_as_it_was_run(tmp_path: Path) -> None:
    auto = tiny(tmp_path, steps=1, optim=OptimConfig(warmup=0), rollout=RolloutConfig(prompts=4, samples=4))
    train(auto)
    text = (tmp_path / "config.yaml").read_text()
    assert "\n  lr: 0.0005\n" in text
    assert "\n  max_new_tokens: 80\n" in text
    saved = checkpoint.read(tmp_path / "checkpoints" / "step-000001").state["config"]
    assert (saved["optim.lr"], saved["rollout.max_new_tokens"]) == (5e-4, 80)
    assert train(replace(auto, steps=2), resume=True)["step"] == 2, "auto is what it was"
    other = replace(auto, steps=3, rollout=replace(auto.rollout, max_new_tokens=81))
    with pytest.raises(Failed, match=r"rollout.max_new_tokens was 80 and is now 81"):
        train(other, resume=True)


def test_a_rate_that_ruins_a_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    config = tiny(tmp_path, model="Qwen/Qwen2.5-0.5B-Instruct", optim=OptimConfig(lr=5e-4))
    with pytest.raises(Failed, match=r"^optim.lr 0.0005 on all weights of a pretrained model ruins it") as refused:
        train(config)
    assert refused.value.setup
    assert not any(tmp_path.iterdir())


def test_evaluations_do_not_count_as_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    import rpg.training.loop as loop

    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: (time.sleep(1.5), real(*a, **k))[1])
    summary = train(tiny(tmp_path, steps=3, minutes=1.4 / 60, eval=EvalConfig(every=1, problems=2, k=1)))
    assert summary["step"] > 1


def test_what_a_killed_run_had_no_time_to_delete_goes_in_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    """Also where no step is left."""
    config = tiny(tmp_path, checkpoint=CheckpointConfig(every=1, keep=1, best=False))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "prune", lambda *_, **__: None)
        train(config)
    assert len(checkpoint.folders(tmp_path / "checkpoints")) == 2
    train(config, resume=True)
    assert list(checkpoint.folders(tmp_path / "checkpoints")) == [2]


def test_no_checkpoint_is_written_where_none_is_kept(tmp_path: Path) -> None:
    assert train(tiny(tmp_path, checkpoint=CheckpointConfig(keep=0)))["step"] == 2
    assert not (tmp_path / "checkpoints").exists()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(Failed, match=r"^nothing to resume in .* with checkpoint.keep 0"):
        train(tiny(tmp_path, steps=3, checkpoint=CheckpointConfig(keep=0)), resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_file_whose_prompts_ask_for_no_form_is_told(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+{i}\\n", "answer": "{2 * i}"}}\n' for i in range(1, 60)))

    class Listening(View):
        heard: ClassVar[list[str]] = []

        def message(self, text: str, style: str = "") -> None:
            self.heard.append(text)

    def started(template: str | None) -> list[str]:
        Listening.heard = []
        config = tiny(tmp_path / "run", task=replace(Config().task, name=str(path), template=template))
        with Trainer(config, RunFolder(tmp_path / "run"), Listening()):
            return [text for text in Listening.heard if "--task.template boxed" in text]

    assert len(started(None)) == 1
    assert started("{prompt}") == []
