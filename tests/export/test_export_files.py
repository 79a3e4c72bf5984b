"""rpg export verl: the files it writes, from a recipe and from a run of rpg train."""

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from export_cases import ADAPTER, RECIPES, ROOT, VARIANTS, configs, recipe, where

from rpg.cli import main
from rpg.console import own_command
from rpg.export import verl
from rpg.export.data import messages
from rpg.export.reward import Rewards, Written
from rpg.export.start import from_run
from rpg.models.policy import Policy
from rpg.run.config import Config
from rpg.run.settings import leaves
from rpg.tasks import load_task
from rpg.training.progress import best_of
from rpg.training.setup import make_scorer

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
    exported(tmp_path / "out", *line, "--insist")  # on the rate of the built-in model
    said = capsys.readouterr().out
    assert "40 problems" in said
    assert f"bash {tmp_path / 'out' / 'run.sh'}" in said
    config = recipe(**flags)
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
    assert "data.train_files='$FOLDER/train.parquet'" in script
    assert "data.val_files=['$FOLDER/test-arithmetic.parquet']" in script
    assert "actor_rollout_ref.model.path='$FOLDER/model'" in script
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_settings_alone_are_not_a_run(tmp_path, capsys):
    exported(tmp_path / "out", "--settings-only")
    said = capsys.readouterr().out
    assert "export without --settings-only" in said
    assert "run it with" not in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.sh"]
    script = tmp_path / "out" / "run.sh"
    assert "# --settings-only: to read, not to run." in script.read_text(encoding="utf-8")
    assert "actor_rollout_ref.rollout.n=8" in script.read_text(encoding="utf-8")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "export without --settings-only to train" in done.stderr


# ---- rewards from many threads ---------------------------------------------------------------------------------------

SLOW = """
import asyncio, time

def slow(response, answer, prompt):
    time.sleep(0.1)
    return float(response)

async def judge(response, answer, prompt):
    await asyncio.sleep(0.2)
    return float(response)

def broken(response, answer, prompt):
    return {}["x"]
"""


@pytest.mark.parametrize(("name", "calls", "alone"), [("slow", 16, 1.6), ("judge", 32, 6.4)])
def test_calls_that_wait_are_scored_together(tmp_path, name, calls, alone):
    """As verl asks: one response a call, from threads. Four at a time, and of async functions all at a time."""
    (tmp_path / "own.py").write_text(SLOW, encoding="utf-8")
    rewards = Rewards([Written("", f"own.py:{name}")], here=tmp_path, workers=4)
    extra = {"tag": "", "problem": "p"}
    rewards("0", "1", extra)
    rewards.scorer().score([("0", "", "")] * 8)  # all workers are there
    took = []
    for _ in range(3):  # a machine may stall; one that scores them one by one is slow every time
        begun = time.perf_counter()
        with ThreadPoolExecutor(calls) as pool:
            found = list(pool.map(lambda i: rewards(str(i / 100), "1", extra), range(calls)))
        took.append(time.perf_counter() - begun)
        assert [one["score"] for one in found] == [i / 100 for i in range(calls)], "each call has its own"
        if took[-1] < 0.6 * alone:
            break
    rewards.scorer().close()
    assert min(took) < 0.6 * alone


def test_a_reward_that_cannot_be_had_is_known_to_each_call(tmp_path):
    (tmp_path / "own.py").write_text(SLOW, encoding="utf-8")
    extra = {"tag": "", "problem": "p"}
    rewards = Rewards([Written("", "own.py:broken")], here=tmp_path, on_error=-1.0)
    assert rewards("x", "1", extra)["score"] == -1.0
    rewards.scorer().close()
    with pytest.raises(ValueError, match="closed"):
        rewards("x", "1", extra)


# ---- from a run ------------------------------------------------------------------------------------------------------

SMALL = {
    "steps": 2,
    "rollout.prompts": 4,
    "rollout.samples": 4,
    "rollout.max_new_tokens": 24,
    "optim.minibatches": 1,
    "checkpoint.every": 1,
    "eval.every": 1,
    "eval.problems": 4,
    "eval.k": 1,
    "log.tensorboard": "false",
    "log.report": "false",
    "log.view": "none",
}


def test_from_a_run_of_rpg_train(tmp_path, capsys):
    run, lines = tmp_path / "run", [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["train", "--config", str(RECIPES["builtin/rpg-urkl.yaml"]), f"--output={run}", *lines]) == 0
    recipe_of, out = str(run / "config.yaml"), tmp_path / "out"
    capsys.readouterr()
    assert main(["export", "verl", recipe_of, "--from", str(run), "--steps=5", "-o", str(out), "--gpus=1"]) == 0
    last = run / "checkpoints" / "step-000002" / "model"
    assert f"from the last checkpoint of {run}, step 2: {last}" in capsys.readouterr().out
    script = (out / "run.sh").read_text(encoding="utf-8")
    assert f"# From the last checkpoint of {run}, step 2.\n" in script
    assert f"actor_rollout_ref.model.path={last}" in script
    assert "trainer.total_training_steps=3" in script
    assert "total:5,begin:2}" in script
    assert "the optimiser's moments" in script
    assert not (out / "model").exists()
    state = json.loads((last.parent / "trainer" / "state.json").read_text(encoding="utf-8"))
    begun = state["cursor"]["problem"]
    table = pq.read_table(out / "train.parquet").to_pylist()
    problems = load_task("arithmetic", 0).train[begun : begun + len(table)]
    assert begun > 0
    assert [row["extra_info"]["problem"] for row in table] == [problem.prompt for problem in problems]
    first = from_run(run, "1")
    assert (first.step, Path(first.model).parent.name) == (1, "step-000001")
    assert from_run(run / "checkpoints" / "step-000001", "last") == first
    assert from_run(run, "best").step == best_of([one for one in state["evals"] if one["step"] in (1, 2)])["step"]
    assert Policy.load(first.model).parameters()
    for line, said in [
        (["--steps=5", "--checkpoint=7"], "there are best, last, "),
        ([], "has done its 2 steps: give --steps, more than 2"),
    ]:
        assert main(["export", "verl", recipe_of, "--from", str(run), "-o", str(tmp_path / "b"), *line]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "b").exists()


@pytest.fixture
def connections(monkeypatch):
    """Whom this process tried to reach: there is no network here."""
    asked = []

    def refuse(self, address):
        asked.append(address)
        raise OSError(101, "Network is unreachable")

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    return asked


def test_without_a_network_what_is_missing_is_said_at_once(tmp_path, capsys, connections, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s to ask again"))
    path = str(RECIPES["builtin/rpg-urkl.yaml"])
    line = ["export", "verl", path, "-o", str(tmp_path / "out"), "--optim.lr", "auto", "--model", "Qwen/no-such-model"]
    assert main(line) == 2
    said = capsys.readouterr().err
    assert said == "rpg export: Qwen/no-such-model: no network, and it is not in the cache: give a local folder\n"
    asked = len(connections)
    assert 0 < asked <= 2, "one request"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(line) == 2
    assert "the hub is not asked (HF_HUB_OFFLINE)" in capsys.readouterr().err
    assert main([*line[:-1], str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert len(connections) == asked
    assert not (tmp_path / "out").exists()


def test_a_recipe_without_downloads_asks_nobody_and_finds_a_free_folder(tmp_path, capsys, connections, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rpg-urkl-verl", "rpg-urkl-verl-2", "rpg-urkl-verl-3"):
        assert main(["export", "verl", str(RECIPES["builtin/rpg-urkl.yaml"]), "--steps=1", "--eval.problems=2"]) == 0
        assert f"run.sh to export/{name}\nrun it with: bash export/{name}/run.sh\n" in capsys.readouterr().out
        assert (tmp_path / "export" / name / "run.sh").exists()
    assert connections == []


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
    for flag, value in {"--gpus": "abc", "--nodes": "0"}.items():
        with pytest.raises(SystemExit):
            main(["export", "verl", path, flag, value])
        assert f"{flag}: must be a whole number, at least 1; got {value} (" in capsys.readouterr().err


def test_the_asynchronous_trainer_of_trl_is_not_exported_and_said_where(tmp_path, capsys):
    path = str(RECIPES["builtin/dr-grpo.yaml"])
    assert main(["export", "trl", path, "-o", str(tmp_path / "out"), "--async"]) == 2
    assert capsys.readouterr().err.startswith("rpg export: --async is for verl; TRL's asynchronous trainer takes a")


def test_a_runs_folder_is_no_recipe_but_has_one(tmp_path, capsys):
    """The command that is meant is said, and does it."""
    run = tmp_path / "my run"
    run.mkdir()
    (run / "run.id").touch()
    (run / "config.yaml").write_text(RECIPES["builtin/rpg-urkl.yaml"].read_text())
    assert main(["export", "trl", str(run)]) == 2
    said = capsys.readouterr().err
    meant = f"{own_command()} export trl {shlex.quote(str(run / 'config.yaml'))}"
    assert said == f"rpg export: {run} is a run's folder, not a recipe: give the settings in it, {meant}\n"
    line = shlex.split(said.partition("in it, ")[2])
    assert main([*line[line.index("export") :], "-o", str(tmp_path / "out")]) == 0
    assert main(["export", "verl", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("is a folder: give a recipe, a YAML file of settings\n")


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_in_the_docs_has_every_setting_and_names_real_ones():
    """A row: the setting of a recipe, verl's, TRL's. In backticks are settings of theirs."""
    from rpg.integrations.trl import RPGConfig

    docs = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = {name: (verl, trl) for name, verl, trl in re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \|$", docs, re.M)}
    assert set(rows) == set(leaves(Config))
    some = [configs()[name] for name in (*VARIANTS, "builtin/rpg-urkl.yaml", "builtin/dapo.yaml")] + [recipe(**ADAPTER)]
    exports = [verl.export(config, where()) for config in some]
    given = {key.lstrip("+").removeprefix("actor_rollout_ref.") for export in exports for key in export}
    fields = set(RPGConfig.__dataclass_fields__)
    for name, (theirs, trl) in rows.items():
        for key in re.findall(r"`([^`…]+)`", theirs):
            assert any(one == key or one.startswith(f"{key}.") for one in given), (name, key)
        for key in re.findall(r"`([^`…]+)`", trl):
            assert key in fields, (name, key)


def test_exporting_needs_neither_engine(tmp_path, server):
    """All that an export imports, where neither can be imported."""
    recipe = str(RECIPES["builtin/rpg-urkl.yaml"])
    lines = [
        ["export", engine, recipe, "-o", str(tmp_path / engine), "--eval.problems=2", "--steps=1"]
        for engine in ("verl", "trl")
    ]
    code = f"""
import sys
sys.modules |= {{"trl": None, "verl": None}}
from rpg.cli import main
sys.exit(max(main(line) for line in {lines!r}))
"""
    job = server.start(code=code).wait()
    assert job.code == 0, job.text
    assert (tmp_path / "verl" / "run.sh").exists()
    assert (tmp_path / "trl" / "train.py").exists()
