"""rpg export verl: the settings are what verl takes, and what the recipe says."""

import functools
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_cases import ADAPTER, FOLDER, RECIPES, REFUSED, VARIANTS, configs, recipe, tree, verl_python, where

from rpg.export import verl
from rpg.export.optim import ScheduledAdamW
from rpg.export.overrides import text
from rpg.export.start import Start
from rpg.training.optim import learning_rate
from rpg.training.setup import method_of

PAPER = "paper/qwen3-4b-2k/"
COMPOSED = [
    *(name for name in RECIPES if name.startswith(PAPER)),
    "builtin/dr-grpo.yaml",
    "builtin/reinforce++.yaml",
    "builtin/topr.yaml",
    *VARIANTS,
]
ODD = ["lr=1e-3", "run (2)", "ünï", "a,b", "it's", 'a "b"', "~x", "[a]{b}", "x\\'y", "a$c", "a\\b", "#1"]


def composed(commands):
    """Commands through verl's own configuration and checks, in one process of its environment."""
    worker = Path(__file__).with_name("compose_in_verl.py")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [verl_python(), str(worker)]
    done = subprocess.run(line, input=json.dumps(commands), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def value_of(config, name):
    return functools.reduce(lambda part, key: part[key], name.removeprefix("+").split("."), config)


def means_the_same(found, config):
    """The numbers of the recipe in a config of verl's."""
    rollout, optim = config.rollout, config.optim
    actor, method = found["actor_rollout_ref"]["actor"], method_of(config)
    data, sampler = found["data"], found["actor_rollout_ref"]["rollout"]
    # batches: prompts × samples responses in a step, cut into as many minibatches, each used as often
    assert data["train_batch_size"] == rollout.prompts
    assert sampler["n"] == rollout.samples
    assert actor["ppo_mini_batch_size"] * optim.minibatches == rollout.prompts
    assert actor["ppo_epochs"] == optim.epochs
    assert found["trainer"]["n_gpus_per_node"] * found["trainer"]["nnodes"] == 8
    assert actor["ppo_max_token_len_per_gpu"] >= rollout.max_prompt_tokens + rollout.max_new_tokens
    # the optimiser
    own = actor["optim"]
    assert (own["lr"], own["weight_decay"], own["clip_grad"]) == (optim.lr, optim.weight_decay, optim.max_grad_norm)
    assert tuple(own["betas"]) == optim.betas
    assert own["lr_scheduler_type"] == "constant"
    rate = own["override_optimizer_config"]
    total = config.steps * optim.minibatches * optim.epochs
    schedule = "linear" if optim.schedule == "auto" else optim.schedule
    assert rate == {"schedule": schedule, "warmup": optim.warmup, "total": total, "begin": 0}
    # sampling
    assert (data["max_prompt_length"], data["max_response_length"]) == (
        rollout.max_prompt_tokens,
        rollout.max_new_tokens,
    )
    assert (sampler["temperature"], sampler["top_p"]) == (rollout.temperature, rollout.top_p)
    assert sampler["top_k"] == (rollout.top_k or -1)
    evaluation = sampler["val_kwargs"]
    assert (evaluation["n"], evaluation["temperature"]) == (config.eval.k, config.eval.temperature)
    assert evaluation["do_sample"] == (config.eval.temperature > 0)
    # the method
    loss = actor["policy_loss"]
    assert loss["loss_mode"] == f"rpg:{config.algorithm}"
    given = loss.get("rpg", {})
    assert {key: given[key] for key in config.loss} == config.loss
    assert actor["entropy_coeff"] == actor["kl_loss_coef"] == 0
    assert found["algorithm"].get("filter_groups", {}).get("enable", False) == method.dynamic
    penalty = found["reward"].get("reward_kwargs")
    assert (penalty is not None) == method.overlong
    if penalty is not None:
        assert found["reward"]["reward_manager"]["name"] == "dapo"
        zone = penalty["overlong_buffer_cfg"]
        assert (penalty["max_resp_len"], zone["len"]) == (rollout.max_new_tokens, rollout.overlong_tokens)
        assert zone["penalty_factor"] == 1
    assert data["train_files"] == f"{FOLDER}/train.parquet"
    assert (found["trainer"]["total_training_steps"], data["seed"]) == (config.steps, config.seed)


@pytest.mark.parametrize("name", configs())
def test_every_recipe(name):
    means_the_same(tree(verl.export(configs()[name], where())), configs()[name])


def test_every_name_is_in_a_command_that_verl_has_taken():
    made = {name: set(verl.export(config, where())) for name, config in configs().items()}
    taken = set().union(*(made[name] for name in COMPOSED))
    assert {name: keys - taken for name, keys in made.items() if keys - taken} == {}


def test_verl_takes_them(tmp_path):
    """Through hydra and verl's own checks, the plugin's among them, every value is the one that was meant."""
    exports = {name: verl.export(configs()[name], where()) for name in COMPOSED}
    commands = {name: [f"{key}={text(value)}" for key, value in made.items()] for name, made in exports.items()}
    for odd in ODD:
        given = printed(odd_folder(tmp_path, odd), "data.seed=7")
        commands[odd] = [*(one for one in given if str(tmp_path) in one), given[-1]]
        assert len(commands[odd]) == 6
    results = composed(commands)
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    found = {name: result["config"] for name, result in results.items()}
    for name, settings in exports.items():
        for key, value in settings.items():
            value = list(value) if isinstance(value, tuple) else value
            assert value_of(found[name], key) == value, (name, key)
        means_the_same(found[name], configs()[name])
    handed_on = found["builtin/topr.yaml"]["algorithm"]["rpg_advantage"]  # to the process that calls the estimator
    assert (handed_on["kind"], handed_on["reward_range"], handed_on["mapped_to"]) == ("constant", [0, 1], [-1, 1])
    assert "rpg_advantage" not in found["builtin/dr-grpo.yaml"]["algorithm"]
    for odd in ODD:
        at = str(tmp_path / odd)
        assert found[odd]["data"]["train_files"] == f"{at}/train.parquet"
        assert found[odd]["data"]["val_files"] == [f"{at}/test.parquet", f"{at}/test-ö (2).parquet"]
        assert found[odd]["actor_rollout_ref"]["model"]["path"] == f"{at}/model"
        assert found[odd]["reward"]["custom_reward_function"]["path"] == f"{at}/reward.py"
        assert found[odd]["trainer"]["default_local_dir"] == f"{at}/checkpoints"
        assert found[odd]["data"]["seed"] == 7, "what follows run.sh comes last"
    assert found["everything"]["trainer"]["project_name"] == "it's a project: {1}, [2]"
    assert found["everything"]["trainer"]["save_freq"] == -1
    assert not found[f"{PAPER}reinforce++.yaml"]["algorithm"]["use_kl_in_reward"]


def odd_folder(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    start = Start(f"{verl.FOLDER}/model")
    there = verl.VerlLaunch(start, chat=False, tests=("test.parquet", "test-ö (2).parquet"))
    (folder / "run.sh").write_text(verl.run_sh(recipe(), there, "title"), encoding="utf-8")
    return folder


def printed(folder, *more):
    """The arguments that run.sh gives to verl."""
    script = (folder / "run.sh").read_text(encoding="utf-8")
    program = "exec python -m verl.trainer.main_ppo"
    assert program in script
    (folder / "print.sh").write_text(script.replace(program, "printf '%s\\0'"), encoding="utf-8")
    line = ["bash", str(folder / "print.sh"), *more]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def adapter(folder, **settings):
    """The folder of an adapter, as far as an export looks at it."""
    made = {"peft_type": "LORA", "base_model_name_or_path": "/base", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(made | settings), encoding="utf-8")
    return str(folder)


def model_settings(config, start):
    settings = verl.export(config, replace(where(), start=start))
    return {name.rpartition(".")[2]: value for name, value in settings.items() if ".model." in name}


def test_an_adapter(tmp_path):
    fresh = model_settings(recipe(**ADAPTER), Start("/base"))
    assert (fresh["lora_rank"], fresh["lora_alpha"], fresh["target_modules"]) == (4, 32, "all-linear")
    assert "lora_adapter_path" not in fresh
    start = Start("/base", adapter(tmp_path / "a"), 10, 320, "last checkpoint of run, step 10")
    for config in (recipe(**ADAPTER), recipe()):  # peft.method can be left out: the folder says what it is
        model = model_settings(config, start)
        assert (model["path"], model["lora_adapter_path"]) == (start.model, start.adapter)
        assert (model["lora_rank"], model["lora_alpha"], model["target_modules"]) == (4, 8, ["q"])
    with pytest.raises(ValueError, match=r"peft\.options\.r is 8, but .* was made with 4"):
        model_settings(recipe(**{"peft.method": "lora", "peft.options.r": "8"}), start)
    for name, value in {"peft_type": "IA3", "use_dora": True, "lora_dropout": 0.1}.items():
        other = adapter(tmp_path / name, **{name: value})
        with pytest.raises(ValueError, match="has no counterpart in verl"):
            model_settings(recipe(), replace(start, adapter=other))


def test_a_reference_that_is_an_adapter_is_refused(tmp_path):
    """verl's would be the model without it."""
    frozen = {"reference.update": "frozen"}
    assert model_settings(recipe(**ADAPTER, **frozen), Start("/base"))  # begins as nothing
    folder = adapter(tmp_path / "a")
    assert model_settings(recipe(**frozen), Start("/base", folder, 10))  # began as nothing
    for step in (0, 10):
        with pytest.raises(ValueError, match=r"reference\.update=frozen: verl's reference would be /base without"):
            model_settings(recipe(model=folder, **frozen), Start("/base", folder, step))
    assert model_settings(recipe(model=folder), Start("/base", folder))  # anchored at the sampling policy


def test_the_reference():
    rules = {
        "reference": {"update": "every", "every": 7, "count": "iterations"},
        "reference by kl": {"update": "kl", "kl": 0.1, "smoothing": 0.9, "count": "iterations"},
    }
    for name, rule in rules.items():
        actor = tree(verl.export(configs()[name], where()))["actor_rollout_ref"]["actor"]
        assert actor["policy_loss"]["rpg"]["reference"] == rule
        assert actor["use_kl_loss"]
    in_reward = tree(verl.export(configs()["builtin/reinforce++.yaml"], where()))["algorithm"]
    assert in_reward["use_kl_in_reward"]
    assert (in_reward["kl_ctrl"]["kl_coef"], in_reward["kl_penalty"]) == (0.01, "kl")


def test_several_gpus_for_each_vllm():
    def size(gpus, nodes, parallel):
        config = recipe(**{"rollout.vllm.tensor_parallel_size": parallel, "rollout.prompts": 48})
        found = verl.export(config, where(gpus=gpus, nodes=nodes))
        return found["actor_rollout_ref.rollout.tensor_model_parallel_size"]

    assert (size(4, 2, "4"), size(8, 1, "2"), size(4, 2, "8")) == (4, 2, 8)
    for gpus, nodes, parallel in ((8, 1, "3"), (4, 1, "8"), (4, 3, "3"), (4, 3, "8")):
        with pytest.raises(ValueError, match=rf"rollout\.vllm\.tensor_parallel_size={parallel} does not divide {gpus}"):
            size(gpus, nodes, parallel)


def test_the_context_is_written_once():
    found = verl.export(recipe(**{"rollout.vllm.max_model_len": "4096"}), where())
    assert {name: value for name, value in found.items() if "max_model_len" in name} == {
        "actor_rollout_ref.rollout.max_model_len": 4096
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_preset_that_verl_cannot_have(name):
    with pytest.raises(ValueError, match=f"algorithm={Path(name).stem} .*{REFUSED[name]}"):
        verl.export(recipe(name))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optim.name": "schedule-free"}, "optim.name=schedule-free"),
        ({"reference.model": "runs/teacher"}, "reference.model"),
        ({"rollout.end_tokens": "!"}, "rollout.end_tokens"),
        ({"peft.method": "ia3"}, "peft.method"),
        ({"peft.method": "lora", "peft.options.use_dora": "true"}, "peft.options.use_dora"),
        ({"model_options.revision": "main"}, "model_options.revision"),
        ({"reference.update": "ema"}, "reference.update=ema"),
        ({"loss.control_variate": "true"}, "control_variate"),
        ({"peft.method": "lora", "peft.options.lora_dropout": "0.1"}, "peft.options.lora_dropout=0.1"),
        ({"peft.method": "lora", "reference.update": "every"}, "reference.update=every with LoRA"),
        ({"peft.method": "lora", "reference.update": "kl"}, "reference.update=kl with LoRA"),
        ({"rollout.old_logp": "engine", "loss.mismatch": "tis"}, "rollout.old_logp=engine leaves loss.mismatch"),
        ({"rollout.vllm.tensor_parallel_size": "two"}, "tensor_parallel_size must be a whole number"),
        ({"optim.minibatches": 5}, "optim.minibatches=5"),
        ({"rollout.samples": 3, "rollout.prompts": 12}, "do not divide among 8 GPUs"),
        ({"model": "some.gguf"}, ".gguf"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        verl.export(recipe(**flags))
    assert "\n" not in str(error.value)


def test_going_on_from_a_checkpoint():
    config = recipe(**{"reference.update": "every", "steps": 50})
    start = Start("/run/checkpoints/step-000040/model", step=40, where="last checkpoint of run, step 40")
    settings = verl.export(config, replace(where(), start=start))
    assert settings["trainer.total_training_steps"] == 10
    assert settings["actor_rollout_ref.actor.optim.override_optimizer_config"]["begin"] == 160
    for update in ("frozen", "kl"):
        other = recipe(**{"reference.update": update})
        with pytest.raises(ValueError, match=f"reference.update={update}: verl would take the checkpoint"):
            verl.export(other, replace(where(), start=start))
    with pytest.raises(ValueError, match="has done its 50 steps"):
        verl.export(config, replace(where(), start=replace(start, step=50)))


def test_the_learning_rate_is_that_of_rpg_train():
    """At each optimiser step, also where it goes on from its own checkpoint."""
    config = recipe("builtin/rpg-urkl.yaml", **{"optim.schedule": "cosine"}).optim
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0, "schedule": "cosine", "warmup": 3, "total": 12}
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduledAdamW([weight], **settings)
    rates = []
    for step in range(12):
        if step == 5:
            state = optimizer.state_dict()
            optimizer = ScheduledAdamW([weight], **settings)
            optimizer.load_state_dict(state)
        weight.grad = torch.ones(2)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    config = replace(config, lr=0.1, warmup=3)
    assert rates == [learning_rate(config, step, 12) for step in range(12)]
    later = ScheduledAdamW([weight], **settings, begin=7)
    weight.grad = torch.ones(2)
    later.step()
    assert later.param_groups[0]["lr"] == rates[7]
