"""rpg export trl: a script with every setting, which trains."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from trl import GRPOTrainer

import rpg
from rpg.cli import main
from rpg.export import trl
from rpg.export.start import Launch, Start
from rpg.models.policy import Policy
from rpg.run.config import Config
from rpg.run.settings import build
from rpg.training.optim import learning_rate
from rpg.training.samples.collect import encode_prompt

ROOT = Path(__file__).parents[2]
RECIPES = {str(p.relative_to(ROOT / "recipes")): p for p in sorted((ROOT / "recipes").rglob("*.yaml"))}
REFUSED = {"builtin/remax.yaml"} | {
    f"builtin/{name}.yaml" for name in rpg.algorithms() if rpg.algorithm(name).only_here
}
SMALL = {
    "steps": 2,
    "rollout.prompts": 4,
    "rollout.samples": 4,
    "rollout.max_new_tokens": 24,
    "optim.minibatches": 2,
    "optim.micro_tokens": 1100,
    "eval.temperature": 0.5,  # so that nothing is evaluated
    "log.tensorboard": False,
}


def recipe(name="builtin/rpg-urkl.yaml", **flags):
    return build(Config, file=RECIPES[name], flags=flags)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in REFUSED])
def test_every_recipe(name):
    """The numbers of the recipe, and a script that Python reads."""
    config = recipe(name)
    where = Launch(Start("/model"), gpus=4, nodes=2)
    found = trl.fields(config, where)
    rollout, optim = config.rollout, config.optim
    responses = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] * 8
    assert responses * optim.minibatches == rollout.prompts * rollout.samples
    generated = found["per_device_train_batch_size"] * found["steps_per_generation"] * 8
    assert generated == rollout.prompts * rollout.samples
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    assert found["per_device_train_batch_size"] * longest <= max(optim.micro_tokens or 32768, longest)
    assert found["max_steps"] == config.steps * optim.minibatches * optim.epochs
    assert (found["num_generations"], found["num_iterations"]) == (rollout.samples, optim.epochs)
    mapped = {"advantage": {"reward_range": [0.0, 1.0]}} if config.algorithm == "topr" else {}  # TRL does not know it
    assert (found["algorithm"], found["loss"]) == (config.algorithm, config.loss | mapped)
    assert (found["reference_every"], found["reference_count"]) == (config.reference.every, "iterations")
    assert (found["learning_rate"], found["weight_decay"]) == (optim.lr, optim.weight_decay)
    compile(trl.script(config, where, "title"), name, "exec")


def test_it_trains(tmp_path, capsys, monkeypatch):
    """Two steps of the built-in recipe on a CPU, with the prompts and the learning rate of rpg train."""
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["export", "trl", str(RECIPES["builtin/rpg-urkl.yaml"]), "-o", str(tmp_path / "out"), *flags]) == 0
    script = tmp_path / "out" / "train.py"
    assert f"python {script}" in capsys.readouterr().out
    inner, seen = GRPOTrainer._generate_and_score_completions, []

    def spied(self, inputs):
        out = inner(self, inputs)
        pairs = zip(out["prompt_ids"], out["prompt_mask"], strict=True)
        seen.append([ids_L[mask_L.bool()].tolist() for ids_L, mask_L in pairs])
        return out

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", spied)
    names = runpy.run_path(str(script))
    names["main"]()
    rates = [float(rate) for rate in re.findall(r"'learning_rate': '?([\d.e-]+)", capsys.readouterr().out)]
    config = build(Config, file=tmp_path / "out" / "recipe.yaml")
    policy = Policy.load("builtin")
    want = [encode_prompt(policy, problem, config) for problem in names["TRAIN"]]
    assert len(want) == 8
    assert len(seen) == 2
    assert [ids for batch in seen for ids in batch[::4]] == want  # in the task's order, four responses each
    assert rates == pytest.approx([learning_rate(config.optim, step, 4) for step in (1, 3)], rel=1e-3)
    assert (tmp_path / "out" / "model-trained" / "model.safetensors").exists()
    before = Policy.load(str(tmp_path / "out" / "model"))
    after = Policy.load(str(tmp_path / "out" / "model-trained"))
    moved = [not p.equal(q) for (_, p), (_, q) in zip(before.parameters(), after.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optim.name": "schedule-free"}, "optim.name=schedule-free"),
        ({"reference.model": "runs/teacher"}, "reference.model"),
        ({"rollout.end_tokens": "!"}, "rollout.end_tokens"),
        ({"rollout.old_logp": "engine"}, "rollout.old_logp=engine"),
        ({"rollout.engine": "vllm", "rollout.vllm.swap_space": "2"}, "rollout.vllm.swap_space"),
        ({"reference.update": "ema"}, "reference.update=ema"),
        ({"algorithm": "otb"}, "algorithm=otb"),
        ({"algorithm": "capo"}, "algorithm=capo"),
        ({"algorithm": "remax"}, "algorithm=remax"),
        ({"optim.minibatches": 5}, "optim.minibatches=5"),
        ({"peft.method": "lora", "peft.options.lora_dropout": "0.1"}, "peft.options.lora_dropout"),
        (
            {"rollout.engine": "vllm", "rollout.vllm.tensor_parallel_size": "2"},
            "tensor_parallel_size=2 does not divide",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(flags, said):
    config = build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags=flags)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        trl.script(config)
    assert "\n" not in str(error.value)


def test_evaluation_is_that_of_rpg_train_or_none():
    """rpg train evaluates without top_k, and TRL with that of training."""
    same = {"eval.temperature": 1.0, "rollout.temperature": 1.0}
    with_it, without = recipe(**same, **{"rollout.top_k": 20}), recipe(**same)
    assert trl.fields(without)["eval_on_start"]
    assert "eval_on_start" not in trl.fields(with_it)
    assert "eval_dataset=None" in trl.script(with_it)
    assert "no top_k (rollout.top_k=20): TRL evaluates as it samples" in trl.script(with_it)
    assert trl.fields(without)["min_p"] is None
    least = recipe(**same, **{"rollout.min_p": 0.05})
    assert trl.fields(least)["min_p"] == 0.05
    assert "no min_p (rollout.min_p=0.05): TRL evaluates as it samples" in trl.script(least)


def test_one_step_on_a_batch_has_every_reference():
    for update in ("kl", "ema"):
        flags = {"reference.update": update, "optim.minibatches": 1}
        assert (
            trl.fields(build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags=flags))["reference_update"] == update
        )


def test_adapters_and_checkpoints():
    config = build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags={"peft.method": "lora", "peft.options.r": "4"})
    assert "make_config('lora', {'r': 4})" in trl.script(config)
    start = Start("/base", "/run/model", 40, 1280, "last checkpoint of run, step 40")
    text = trl.script(replace(config, steps=50), Launch(start))
    assert "AutoPeftModelForCausalLM.from_pretrained(MODEL, is_trainable=True)" in text
    assert "TASK.train[1280 : 1280 + 320]" in text
    assert "STEPS_BEFORE, STEPS_A_BATCH = 40, 4" in text
    assert "From the last checkpoint of run, step 40." in text
