"""rpg export verl: what it writes is what verl takes, and what the recipe says."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from rpg.cli import main
from rpg.export import verl
from rpg.export.data import messages
from rpg.export.optim import ScheduledAdamW
from rpg.export.start import Start
from rpg.export.table import ROWS, markdown
from rpg.tasks import load_task
from rpg.train.config import Config
from rpg.train.optim import learning_rate
from rpg.train.parts import make_scorer, resolve
from rpg.train.settings import build, leaves

ROOT = Path(__file__).parents[2]
RECIPES = {str(p.relative_to(ROOT / "recipes")): p for p in sorted((ROOT / "recipes").rglob("*.yaml"))}
REFUSED = {"builtin/capo.yaml": "gate", "builtin/remax.yaml": "greedy"}
FOLDER = "/data/a folder"
VARIANTS = {
    "everything": {
        "rollout.engine": "vllm",
        "rollout.vllm.gpu_memory_utilization": "0.4",
        "rollout.vllm.swap_space": "2",
        "rollout.slots": 64,
        "rollout.top_k": 20,
        "rollout.top_p": 0.9,
        "rollout.old_logp": "engine",
        "task.chat": "true",
        "task.chat_options.enable_thinking": "false",
        "model_options.trust_remote_code": "true",
        "optim.schedule": "cosine",
        "optim.epochs": 2,
        "optim.max_grad_norm": float("inf"),
        "log.wandb": "it's a project: {1}, [2]",
        "dtype": "float32",
        "eval.temperature": 0.0,
        "checkpoint.keep": 0,
    },
    "reference": {"reference.update": "every", "reference.every": 7, "loss.beta": "1e-3", "loss.mismatch": "tis"},
    "reference by kl": {"reference.update": "kl", "reference.kl": 0.1},
}


ADAPTER = {"peft.method": "lora", "peft.options.r": "4"}  # verl looks at vLLM for it, which need not be there


def recipe(name="builtin/rpg-urkl.yaml", **flags):
    return build(Config, file=RECIPES[name], flags=flags)


def where(config, **settings):
    settings = {"chat": False, "gpus": 4, "nodes": 2} | settings
    return verl.Where(Start("/models/a model"), FOLDER, **settings)


@functools.cache
def configs():
    found = {name: recipe(name) for name in RECIPES if name not in REFUSED}
    return found | {name: build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags=f) for name, f in VARIANTS.items()}


@functools.cache
def composed():
    """Every command through verl's own configuration and checks, in one process of its environment."""
    python = os.environ.get("RPG_VERL_PYTHON")
    if not python:
        pytest.skip("RPG_VERL_PYTHON does not name an interpreter that has verl")
    commands = {name: verl.command(config, where(config))[3:] for name, config in configs().items()}
    worker = Path(__file__).with_name("compose_in_verl.py")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, str(worker)], input=json.dumps(commands), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def value_of(tree, path):
    return functools.reduce(lambda part, name: part[name], path.split("."), tree)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(name for name in RECIPES if name not in REFUSED), *VARIANTS])
def test_verl_takes_every_recipe_and_means_the_same(name):
    """verl's real config, its dataclasses' checks and the plugin's, and the numbers of the recipe in it."""
    result = composed()[name]
    assert "error" not in result, result["error"]
    found, config = result["config"], configs()[name]
    rollout, optim = config.rollout, config.optim
    actor, chosen = found["actor_rollout_ref"]["actor"], resolve(config)
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
    assert found["algorithm"]["filter_groups"]["enable"] == verl.dynamic(config, chosen)
    penalty = found["reward"].get("reward_kwargs")
    assert (penalty is not None) == verl.overlong(config, chosen)
    if penalty is not None:
        assert found["reward"]["reward_manager"]["name"] == "dapo"
        zone = penalty["overlong_buffer_cfg"]
        assert (penalty["max_resp_len"], zone["len"]) == (rollout.max_new_tokens, rollout.overlong_tokens)
        assert zone["penalty_factor"] == 1
    assert data["train_files"] == f"{FOLDER}/train.parquet"
    assert (found["trainer"]["total_training_steps"], data["seed"]) == (config.steps, config.seed)


def test_values_with_signs_that_hydra_has_a_meaning_for():
    found = composed()["everything"]["config"]
    assert found["trainer"]["project_name"] == "it's a project: {1}, [2]"
    assert found["data"]["apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert found["actor_rollout_ref"]["model"]["path"] == "/models/a model"
    assert "{{ message.content }}" in found["actor_rollout_ref"]["model"]["custom_chat_template"]
    assert found["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] == {"swap_space": 2}
    assert found["actor_rollout_ref"]["actor"]["optim"]["clip_grad"] == float("inf")
    assert found["actor_rollout_ref"]["actor"]["fsdp_config"]["mixed_precision"]["param_dtype"] == "fp32"
    assert found["trainer"]["save_freq"] == -1


def test_an_adapter():
    config = recipe(**ADAPTER)
    start = Start("/base", "/run/checkpoints/step-000010/model", 10, 320, "last checkpoint of run, step 10")
    settings = verl.export(config, replace(where(config), start=start)).settings
    model = {name.rpartition(".")[2]: value for name, value in settings.items() if ".model." in name}
    assert (model["path"], model["lora_adapter_path"]) == (start.model, start.adapter)
    assert (model["lora_rank"], model["lora_alpha"], model["target_modules"]) == (4, 32, "all-linear")


def test_the_reference():
    rules = {
        "reference": {"update": "every", "every": 7},
        "reference by kl": {"update": "kl", "kl": 0.1, "smoothing": 0.9},
    }
    for name, rule in rules.items():
        actor = composed()[name]["config"]["actor_rollout_ref"]["actor"]
        assert actor["policy_loss"]["rpg"]["reference"] == rule
        assert actor["use_kl_loss"]
    kl_in_reward = composed()["builtin/reinforce++.yaml"]["config"]["algorithm"]
    assert kl_in_reward["use_kl_in_reward"]
    assert (kl_in_reward["kl_ctrl"]["kl_coef"], kl_in_reward["kl_penalty"]) == (0.01, "kl")
    assert not composed()["paper/qwen3-4b-2k/reinforce++.yaml"]["config"]["algorithm"]["use_kl_in_reward"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_preset_that_verl_cannot_have(name):
    with pytest.raises(ValueError, match=f"algorithm={Path(name).stem} .*{REFUSED[name]}"):
        verl.command(recipe(name))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optim.name": "schedule-free"}, "optim.name=schedule-free"),
        ({"rollout.end_tokens": "!"}, "rollout.end_tokens"),
        ({"peft.method": "ia3"}, "peft.method"),
        ({"peft.method": "lora", "peft.options.use_dora": "true"}, "peft.options.use_dora"),
        ({"model_options.revision": "main"}, "model_options.revision"),
        ({"reference.update": "ema"}, "reference.update=ema"),
        ({"loss.control_variate": "true"}, "control_variate"),
        ({"optim.minibatches": 5}, "optim.minibatches=5"),
        ({"rollout.samples": 3, "rollout.prompts": 12}, "do not divide among 8 GPUs"),
        ({"model": "some.gguf"}, ".gguf"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        verl.command(build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags=flags))
    assert "\n" not in str(error.value)


def test_going_on_from_a_checkpoint():
    config = recipe(**{"reference.update": "every", "steps": 50})
    start = Start("/run/checkpoints/step-000040/model", step=40, where="last checkpoint of run, step 40")
    settings = verl.export(config, replace(where(config), start=start)).settings
    assert settings["trainer.total_training_steps"] == 10
    assert settings["actor_rollout_ref.actor.optim.override_optimizer_config"]["begin"] == 160
    for update in ("frozen", "kl"):
        other = recipe(**{"reference.update": update})
        with pytest.raises(ValueError, match=f"reference.update={update}: verl would take the checkpoint"):
            verl.export(other, replace(where(other), start=start))
    with pytest.raises(ValueError, match="has done its 50 steps"):
        verl.export(config, replace(where(config), start=replace(start, step=50)))


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


# ---- files -----------------------------------------------------------------------------------------------------------

LENGTH = """
def score(response, answer, prompt):
    return len(response) - len(answer) + len(prompt) / 2
"""


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"reward_{abs(hash(path))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(folder, *flags, name="builtin/rpg-urkl.yaml"):
    assert main(["export", "verl", str(RECIPES[name]), "-o", str(folder), *flags]) == 0


def score(rewards, row, response):
    """As verl's reward manager calls it, with what it reads from the parquet file."""
    return rewards.compute_score(
        data_source=row["data_source"],
        solution_str=response,
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row["extra_info"],
    )


def test_problems_and_rewards_of_a_file(tmp_path, capsys):
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "mine.py").write_text(LENGTH, encoding="utf-8")
    flags = {
        "task.name": str(tmp_path / "sums.jsonl"),
        "task.test": f"arithmetic, {tmp_path / 'sums.jsonl'}",
        "task.template": "boxed",
        "task.rewards.correct": "2",
        "task.rewards.format": "0.5",
        f"task.rewards.{tmp_path / 'mine.py'}:score": "0.25",
        "eval.problems": "8",
    }
    tokenizer = _characters(tmp_path / "model", chat=True)
    line = [f"--{name}={value}" for name, value in (flags | {"model": str(tokenizer)}).items()]
    exported(tmp_path / "out", *line)
    said = capsys.readouterr().out
    assert "40 problems" in said
    assert f"bash {tmp_path / 'out' / 'run.sh'}" in said
    config = build(Config, file=RECIPES["builtin/rpg-urkl.yaml"], flags=flags)
    task = load_task(config.task.name, config.seed, config.task.test, look=False)
    sets = {"train": task.train, "test-arithmetic": task.tests["arithmetic"][:8], "test-sums": task.tests["sums"][:8]}
    rewards = loaded(tmp_path / "out" / "reward.py")
    assert Path(tmp_path / "out" / "mine.py").exists()
    with make_scorer(config, task) as scorer:
        for name, problems in sets.items():
            table = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
            assert [row["prompt"] for row in table] == [messages(problem, config) for problem in problems]
            assert [row["reward_model"]["ground_truth"] for row in table] == [str(p.answer) for p in problems]
            assert [row["extra_info"]["level"] for row in table] == [p.level for p in problems]
            for problem, row in list(zip(problems, table, strict=True))[:3]:
                for response in (f"so \\boxed{{{problem.answer}}}", f"answer {problem.answer}", "no idea"):
                    want = scorer.score([(response, problem.answer, problem.prompt)])
                    found = score(rewards, row, response)
                    assert found["score"] == want.values[0]
                    assert found["acc"] == want.solved[0]
                    assert found["signal"] == round(want.values[0] * 1e9)
                    assert found["part/format"] == want.parts["format"][0]
    assert len({score(rewards, table[0], text)["score"] for text in ("so \\boxed{1}", "no idea", "x")}) == 3
    rewards.REWARDS.scorer().close()


def _characters(folder, chat):
    """A model folder with a tokenizer that knows every byte; no weights are asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<eos>"])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    if chat:
        made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    made.save_pretrained(folder)
    LlamaConfig(max_position_embeddings=400).save_pretrained(folder)
    return folder


def test_the_builtin_recipe_as_files(tmp_path):
    """Endless problems in the task's order; plain prompts through a template that adds nothing."""
    exported(tmp_path / "out", "--steps=3", "--rollout.dynamic=false", "--eval.problems=5")
    table = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    problems = load_task("arithmetic", 0).train[:96]
    assert [row["extra_info"]["problem"] for row in table] == [problem.prompt for problem in problems]
    script = (tmp_path / "out" / "run.sh").read_text(encoding="utf-8")
    assert "data.shuffle=false" in script
    assert "data.max_prompt_length=176" in script  # of a model of 256 tokens, 80 of them for the response
    assert "# Not carried over:\n" in script
    assert "optim.max_bad_steps=3" in script
    bash = script.replace("exec python -m verl.trainer.main_ppo", "printf '%s\\n'")
    (tmp_path / "out" / "run.sh").write_text(bash, encoding="utf-8")
    line = ["bash", str(tmp_path / "out" / "run.sh"), "trainer.n_gpus_per_node=2"]
    printed = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    at = str(tmp_path / "out")
    assert f"data.train_files={at}/train.parquet" in printed
    assert f"actor_rollout_ref.model.path={at}/model" in printed
    assert printed[-1] == "trainer.n_gpus_per_node=2"
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    path = str(RECIPES["builtin/rpg-urkl.yaml"])
    for line, said in [
        ([path, "-o", str(tmp_path / "full")], "exists already"),
        ([path, "-o", str(tmp_path / "a"), "--from", str(tmp_path)], "there is no checkpoint in it"),
        ([path, "-o", str(tmp_path / "a"), "--optim.name", "schedule-free"], "optim.name=schedule-free"),
        ([path, "-o", str(tmp_path / "a"), "--model", str(tmp_path / "none")], "none"),
        ([str(tmp_path / "no.yaml")], "no such file"),
    ]:
        assert main(["export", "verl", *line]) == 2
        errors = capsys.readouterr().err
        assert said in errors
        assert errors.count("\n") == 1, errors
        assert not (tmp_path / "a").exists()


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_has_every_setting_and_names_real_ones():
    from rpg.integrations.trl import RPGConfig

    assert set(ROWS) == set(leaves(Config))
    some = [configs()[name] for name in (*VARIANTS, "builtin/rpg-urkl.yaml", "builtin/dapo.yaml")] + [recipe(**ADAPTER)]
    given = {key.lstrip("+") for c in some for key in verl.export(c, where(c)).settings}
    fields = set(RPGConfig.__dataclass_fields__)
    for name, (theirs, trl) in ROWS.items():
        for key in re.findall(r"`([^`…]+)`", theirs):
            assert any(one == key or one.startswith(f"{key}.") for one in given), (name, key)
        for key in re.findall(r"`([^`…]+)`", trl):
            assert key in fields, (name, key)


def test_the_docs_have_the_table():
    assert markdown() in (ROOT / "docs" / "export.md").read_text(encoding="utf-8")


def test_exporting_needs_neither_engine():
    """What the command imports: neither verl nor TRL."""
    code = (
        "import sys; from rpg.cli import build_parser; from rpg.export import verl, trl, data, files\n"
        "assert not {'verl', 'trl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
