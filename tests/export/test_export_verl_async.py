"""rpg export verl --async: the settings are what verl's fully asynchronous trainer takes, and what the recipe says."""

import re

import pytest
from export_cases import RECIPES, VARIANTS, recipe, where
from test_export_verl import composed, value_of

from rpg.cli import main
from rpg.export import verl
from rpg.export.overrides import text
from rpg.export.verl_async import PROGRAM, Samplers

NO_DYNAMIC = {"rollout.dynamic": "false"}
CONFIGS = {
    "dr-grpo": recipe("builtin/dr-grpo.yaml"),
    "topr": recipe("builtin/topr.yaml"),
    "everything": recipe(**VARIANTS["everything"], **NO_DYNAMIC),
    "three policies": recipe(**NO_DYNAMIC, **{"loss.mismatch": "exact", "reference.update": "frozen"}),
    "no ratio": recipe("builtin/rloo.yaml", **{"loss.mismatch": "exact"}),
    "in the reward": recipe("builtin/reinforce++.yaml"),
}
BYPASS = "algorithm.rollout_correction.bypass_mode"


def exported(config, **sampling):
    return verl.export(config, where(sampling=Samplers(**({"gpus": 8, "nodes": 3} | sampling))))


def test_verl_takes_them():
    """Through hydra and the plugin's checks, every setting exists and has the value that was meant."""
    exports = {name: exported(config, staleness=0.25) for name, config in CONFIGS.items()}
    results = composed({name: [f"{key}={text(x)}" for key, x in made.items()] for name, made in exports.items()})
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    found = {name: result["config"] for name, result in results.items()}
    for name, settings in exports.items():
        for key, value in settings.items():
            assert value_of(found[name], key) == (list(value) if isinstance(value, tuple) else value), (name, key)
        means_the_same(found[name], CONFIGS[name])
        in_all = found[name]["actor_rollout_ref"]
        assert not in_all["hybrid_engine"]
        assert in_all["rollout"]["calculate_log_probs"]
        assert found[name]["async_training"]["staleness_threshold"] == 0.25
        assert found[name]["algorithm"]["adv_estimator"] == f"rpg:{CONFIGS[name].algorithm}"
    assert found["topr"]["algorithm"]["rpg_advantage"]["reward_range"] == [0, 1], "the plugin was there"


def means_the_same(found, config):
    """A step of the recipe is a version of the weights: as many prompts, optimiser steps and responses."""
    actor, ahead = found["actor_rollout_ref"]["actor"], found["async_training"]
    taken = actor["ppo_mini_batch_size"] * ahead["require_batches"]
    assert (taken, ahead["trigger_parameter_sync_step"]) == (config.rollout.prompts, 1)
    assert ahead["require_batches"] == config.optim.minibatches
    assert found["rollout"]["total_rollout_steps"] == config.steps * taken
    assert found["rollout"]["n"] == found["actor_rollout_ref"]["rollout"]["n"] == config.rollout.samples
    assert (found["rollout"]["n_gpus_per_node"], found["rollout"]["nnodes"]) == (8, 3)
    assert (found["trainer"]["n_gpus_per_node"], found["trainer"]["nnodes"]) == (4, 2)
    assert (found["data"]["train_batch_size"], found["data"]["gen_batch_size"]) == (0, 1)


def test_old_is_what_each_token_was_drawn_from_unless_a_rule_weighs_it():
    assert {name: exported(config)[BYPASS] for name, config in CONFIGS.items()} == {
        name: config.loss.get("mismatch") is None for name, config in CONFIGS.items()
    }


def test_nothing_else_differs_from_the_synchronous_command():
    config = CONFIGS["dr-grpo"]
    usual, apart = verl.export(config, where()), exported(config)
    differs = {name for name in usual if usual[name] != apart[name]}
    assert differs == {"data.train_batch_size", BYPASS}
    sections = {name.rpartition(".")[0] for name in apart.keys() - usual.keys()}
    assert sections == {"data", "actor_rollout_ref", "rollout", "async_training"}


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("rpg-urkl", {}, "rollout.dynamic has no counterpart in verl's asynchronous trainer"),
        ("grpo", {"reference.update": "every"}, "reference.update=every has no counterpart in verl's asynchronous"),
        ("rloo", {}, "algorithm=rloo has no ratio that accounts for responses of earlier weights: give --loss"),
        ("dr-grpo", {"rollout.old_logp": "recompute"}, "biases the gradient: give --loss.mismatch exact"),
        ("dr-grpo", {"loss.mismatch": "sequence-mask", "rollout.old_logp": "recompute"}, "biases the gradient"),
        ("dr-grpo", {"loss.mismatch": "exact", "rollout.old_logp": "engine"}, "give one of them"),
        ("dr-grpo", {"rollout.vllm.tensor_parallel_size": "3"}, "does not divide 8 GPUs that sample on each of 3"),
        ("dr-grpo", {"rollout.samples": 3, "rollout.prompts": 12}, "do not divide among 8 GPUs"),
    ],
)
def test_what_would_be_another_run_is_refused(name, flags, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        exported(recipe(f"builtin/{name}.yaml", **flags))
    assert "\n" not in str(error.value)


def test_tensor_parallel_cuts_the_gpus_that_sample():
    config = recipe("builtin/dr-grpo.yaml", **{"rollout.vllm.tensor_parallel_size": "8"})
    assert exported(config)["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 8


def command(tmp_path, *flags):
    return main(["export", "verl", str(RECIPES["builtin/dr-grpo.yaml"]), "-o", str(tmp_path / "out"), *flags])


def test_the_files(tmp_path, capsys):
    assert command(tmp_path, "--async", "--gpus", "2", "--rollout-gpus", "6", "--steps", "3") == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"train.parquet", "test-arithmetic.parquet", "reward.py", "run.sh", "model"} == names
    script = (tmp_path / "out" / "run.sh").read_text(encoding="utf-8")
    assert f"exec python -m {PROGRAM} \\\n" in script
    assert "# Written by rpg export verl --async." in script
    for line in ("trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=6", "rollout.nnodes=1"):
        assert f"  {line} \\\n" in script
    assert "rollout.old_logp=auto: what each token was drawn from" in script
    assert "recomputed by the trainer" not in script
    assert f"bash {tmp_path / 'out' / 'run.sh'}" in capsys.readouterr().out


def test_half_of_a_node_samples_unless_told_otherwise(tmp_path):
    assert command(tmp_path, "--async", "--settings-only") == 0
    script = (tmp_path / "out" / "run.sh").read_text(encoding="utf-8")
    assert "trainer.n_gpus_per_node=4" in script
    assert "rollout.n_gpus_per_node=4" in script
    assert "async_training.staleness_threshold=0.5" in script


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-gpus", "2"], "--rollout-gpus is for the asynchronous trainer: give --async too"),
        (["--rollout-nodes", "2"], "--rollout-nodes is for the asynchronous trainer: give --async too"),
        (["--staleness", "1"], "--staleness is for the asynchronous trainer: give --async too"),
        (["--async", "--staleness", "-1"], "--staleness must be at least 0, a share of a step's prompts; got -1.0"),
        (["--async", "--staleness", "nan"], "--staleness must be at least 0"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(tmp_path, capsys, flags, said):
    assert command(tmp_path, *flags) != 0
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
