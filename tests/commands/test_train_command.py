"""`rpg train` and `rpg eval` as people call them, with data, tasks and rewards of their own; mistakes in one line."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rpg.commands.train import _closing
from rpg.models.loading import BUILTIN
from rpg.run.config import Config
from running import ENV, Job, assert_one_line, checkpoints, metrics, summary

Command = Callable[..., Job]

# What the documentation shows, in ten lines each
DATA = """\
{"prompt": "2+3\\n", "answer": "5"}
{"prompt": "4+4\\n", "answer": 8}
{"question": "9-2\\n", "answer": "7 steps #### 7"}
{"prompt": [{"role": "user", "content": "6+1\\n"}], "answer": "7", "level": 2}
{"prompt": "3*3\\n", "answer": "9"}
{"prompt": "8-5\\n", "answer": "3"}
"""
TASK = """\
from rpg.tasks import Problem, Task

def problems(a):
    return [Problem(f"{a}+{b}\\n", str(a + b), level=1 + (b > 5)) for b in range(1, 10)]

def score(response, answer, prompt):
    return 1.0 if response.endswith(f"answer {answer}") else 0.0

def make():
    return Task("sums", train=problems(7) + problems(3), test=problems(5), reward=score)
"""
REWARD = """\
def score(response: str, answer: str, prompt: str) -> float:
    right = response.strip().endswith(f"answer {answer}")
    return 1.0 if right else -0.1 * (len(response) > 20)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text(DATA)
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


# ---- what works ------------------------------------------------------------------------------------------------------


def test_the_script_itself(home: Path) -> None:
    """No fork, no shortcut: `python -m rpg.cli`, settings from a file, then from flags; and a mistake."""
    (home / "run.yaml").write_text(
        "algorithm: dapo\nsteps: 9\nloss:\n  high: 0.3\n"
        "rollout: {prompts: 2, samples: 4, max_new_tokens: 24}\neval: {problems: 4, k: 2}\n"
    )
    argv = [sys.executable, "-m", "rpg.cli", "train", "--config", "run.yaml", "--output", "run"]
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "env": ENV, "cwd": home, "timeout": 300}
    done = subprocess.run([*argv, "--steps", "2", "--loss.high", "0.25"], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "eval 0/2  arithmetic mean@2" in done.stdout
    assert "arithmetic mean@2: " in done.stdout
    *_, heading, page, evaluate, sample = done.stdout.splitlines()
    assert heading == "next:"
    assert page.endswith("run/report.html")
    assert [shlex.split(evaluate)[1:], shlex.split(sample)[1:3]] == [["eval", "run"], ["sample", "run"]]
    prompts = {row["prompt"].strip() for row in map(json.loads, (home / "run" / "samples.jsonl").open())}
    assert shlex.split(sample)[3] in prompts
    assert shutil.which(shlex.split(evaluate)[0], path=ENV.get("PATH"))
    names = {path.name for path in (home / "run").iterdir()}
    wanted = {"config.yaml", "metrics.jsonl", "summary.json", "report.html", "samples.jsonl", "tensorboard"}
    assert names == wanted | {"checkpoints", "run.id"}
    assert "high: 0.25" in (home / "run" / "config.yaml").read_text()
    assert summary(home / "run")["algorithm"] == "dapo"
    done = subprocess.run([*argv, "--stepz", "2"], **options)  # type: ignore[call-overload]
    assert done.returncode == 2
    assert done.stderr == "rpg train: unknown option --stepz; did you mean --steps? (rpg train --help)\n"
    done = subprocess.run([*argv, "--resume", "--steps", "-1"], **options)  # type: ignore[call-overload]
    assert done.returncode == 2
    assert done.stderr == "rpg train: steps must be at least 0; got -1\n"


def test_a_file_of_problems(train: Command, home: Path) -> None:
    """Rewarded by `verify`, in a template, evaluated on a file of their own."""
    (home / "test.jsonl").write_text('{"prompt": "1+1\\n", "answer": "2"}\n{"prompt": "5+5\\n", "answer": "10"}\n')
    job = train(
        home / "run",
        *("--steps", "3", "--task.name", "data.jsonl", "--task.test", "test.jsonl", "--task.template", "{prompt}"),
        *("--rollout.dynamic", "false", "--rollout.max_new_tokens", "40", "--log.samples", "9", "--eval.k", "8"),
        cwd=home,
    )
    assert job.code == 0, job.text
    rows = [json.loads(line) for line in (home / "run" / "samples.jsonl").read_text().splitlines()]
    answers = {"2+3\n": "5", "4+4\n": "8", "9-2\n": "7", "6+1\n": "7", "3*3\n": "9", "8-5\n": "3"}
    assert all(answers[row["prompt"]] == row["answer"] for row in rows if row["split"] == "train")
    assert {row["prompt"] for row in rows if row["split"] == "eval"} == {"1+1\n", "5+5\n"}
    assert "eval/test/mean@8" in metrics(home / "run")[0]  # named after what it is evaluated on
    for row in rows:  # the built-in model ends in "answer 5", which is what verify looks for
        said = row["response"].rpartition("answer ")[2].strip()
        assert (row["reward"] > 0.5) == (row["finished"] and said == row["answer"]), row
    assert any(row["reward"] > 0.5 for row in rows)
    assert "<html" in (home / "run" / "report.html").read_text(encoding="utf-8")


def test_a_template_is_what_the_model_reads(train: Command, home: Path) -> None:
    """The same problems, asked as "1+" + prompt: the answers are those of another sum."""
    (home / "one.py").write_text(
        "def score(response, answer, prompt):\n    return float(response.endswith(f'answer {int(answer) + 1}'))\n"
    )
    job = train(
        home / "run",
        *("--steps", "1", "--task.name", "my_task.py:make", "--task.template", "1+{prompt}", "--task.reward"),
        *("one.py:score", "--rollout.dynamic", "false", "--rollout.max_new_tokens", "60", "--eval.k", "8"),
        cwd=home,
    )
    assert job.code == 0, job.text
    assert metrics(home / "run")[0]["eval/sums/mean@8"] > 0.2
    assert job.out.startswith("rpg-reinforce-urkl · builtin · my_task.py:make · seed 0")


def test_a_task_of_ones_own(train: Command, home: Path) -> None:
    job = train(home / "run", "--steps", "2", "--task.name", "my_task.py:make", "--rollout.dynamic", "false", cwd=home)
    assert job.code == 0, job.text
    rows = metrics(home / "run")
    assert {"eval/sums/mean@2", "eval/sums/level1", "eval/sums/level2"} <= rows[-1].keys()
    assert summary(home / "run")["task"] == "sums"


def test_a_reward_of_ones_own(train: Command, home: Path) -> None:
    job = train(
        home / "run",
        *("--steps", "2", "--task.reward", "my_reward.py:score", "--rollout.dynamic", "false"),
        *("--rollout.overlong", "false", "--log.samples", "9"),
        cwd=home,
    )
    assert job.code == 0, job.text
    rows = [json.loads(line) for line in (home / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} <= {1.0, 0.0, -0.1}
    for row in rows:
        right = row["response"].strip().endswith(f"answer {row['answer']}")
        assert row["reward"] == (1.0 if right else -0.1 * (len(row["response"]) > 20))


# ---- a plan ----------------------------------------------------------------------------------------------------------


def test_a_plan(command: Command, home: Path) -> None:
    """Printed, and nothing else: no folder, no weights (there are none of this model here), no GPU."""
    (home / "run.yaml").write_text("algorithm: grpo\nsteps: 7\nmodel: Qwen/Qwen2.5-0.5B\noutput: run\n")
    before = sorted(path.name for path in home.iterdir())
    job = command("train", "--config", "run.yaml", "--dry-run", "h200", "--loss.beta", "0.02", cwd=home)
    assert (job.code, job.err) == (0, "")
    assert "grpo · Qwen/Qwen2.5-0.5B · arithmetic · NVIDIA H200: a plan" in job.out
    for text in ("β 0.02", "of which a copy is held", "494 M parameters", "7 steps", "✓ fits", "writes run:"):
        assert text in job.out
    small = ("--model", "builtin", "--task.name", "data.jsonl")
    job = command("train", "--dry-run", "--config", "run.yaml", *small, cwd=home)
    assert (job.code, job.err) == (0, "")
    assert "data.jsonl, 6 rows" in job.out
    assert "CPU" in job.out
    assert "float32" in job.out
    job = command("train", "--dry-run=rtx4090", "--model", "Qwen/Qwen3-4B", cwd=home)
    assert (job.code, job.err) == (1, "")
    assert "✗ does not fit" in job.out
    assert sorted(path.name for path in home.iterdir()) == before


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["--dry-run", "h20"], ["unknown device of --dry-run 'h20'", "Did you mean 'h200'?"]),
        (["--dry-run", "h200", "--model", "./none"], ["./none is no model folder"]),
        (["--dry-run", "h200", "--model", "someone/unknown"], ["someone/unknown is not in the cache"]),
        (["--dry-run", "h200", "--task.name", "none.jsonl"], ["no such file: none.jsonl"]),
        (["--dry-run", "h200", "--task.name", "gsmk8"], ["unknown task 'gsmk8'", "gsm8k"]),
        (["--dry-run", "h200", "--algorithm", "gppo"], ["unknown algorithm 'gppo'"]),
        (["--dry-run", "h200", "--peft.method", "lorra"], ["peft.method: there is no 'lorra'; did you mean lora?"]),
        (["--dry-run", "h200", "--loss.betta", "1"], ["betta"]),
        (["--dry-run", "--device", "cuda:7x"], ["device 'cuda:7x'"]),
    ],
)
def test_mistakes_of_a_plan(command: Command, home: Path, argv: list[str], texts: list[str]) -> None:
    assert_one_line(command("train", *argv, cwd=home), 2, *texts)


def test_a_plan_of_a_run_that_is_there(train: Command, command: Command, home: Path) -> None:
    assert train(home / "run", "--steps", "1").code == 0
    text = "run holds a run already"
    job = command("train", "--dry-run", "--output", "run", cwd=home)
    assert (job.code, text in job.out) == (1, True)
    job = command("train", "--dry-run", "--resume", "--output", "run", cwd=home)
    assert job.code == 0
    assert text not in job.out
    assert "4 prompts × 4 responses of up to 24 tokens" in job.out  # the run's own settings


# ---- rpg eval --------------------------------------------------------------------------------------------------------


def test_eval(train: Command, command: Command, home: Path) -> None:
    few = ["--problems", "8", "--k", "4"]
    job = command("eval", "builtin", *few)
    assert job.code == 0, job.text
    assert job.err == ""
    assert "8 problems × 4" in job.out
    for text in ("mean@4", "pass@2", "pass@4", "95 % interval", "by level"):
        assert text in job.out
    job = command("eval", "builtin", *few, "--json")
    found = json.loads(job.out)
    assert 0 <= found["eval/arithmetic/mean@4_low"] <= found["eval/arithmetic/mean@4"]
    assert found["eval/arithmetic/mean@4"] <= found["eval/arithmetic/pass@4"]

    run = home / "run"
    job = train(run, "--steps", "3", "--checkpoint.every", "1", "--eval.every", "1", "--checkpoint.keep", "9", cwd=home)
    assert job.code == 0, job.text
    logged = {row["step"]: row["eval/arithmetic/mean@2"] for row in metrics(run)}
    best = max((mean, step) for step, mean in logged.items() if step)[1]
    same = ["--problems", "8", "--k", "2", "--json"]
    for which, step in {"best": best, "last": 3, "1": 1, "2": 2}.items():
        found = json.loads(command("eval", run, *same, "--checkpoint", which).out)
        assert found["model"] == str(run / "checkpoints" / f"step-{step:06d}" / "model")
        assert found["eval/arithmetic/mean@2"] == logged[step]  # the run's own settings: the very same responses
    folder = run / "checkpoints" / "step-000002"
    assert (
        json.loads(command("eval", folder, *same, "--max-new-tokens", "24").out)["eval/arithmetic/mean@2"] == logged[2]
    )
    found = json.loads(command("eval", "builtin", *same, "--task", "data.jsonl", cwd=home).out)
    assert "eval/data/mean@2" in found
    found = json.loads(command("eval", "builtin", *same, "--task", "my_task.py:make", cwd=home).out)
    assert "eval/sums/mean@2" in found
    greedy = [command("eval", "builtin", *same, "--temperature", "0").out for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert json.loads(greedy[0])["eval/arithmetic/pass@2"] == json.loads(greedy[0])["eval/arithmetic/mean@2"]

    assert_one_line(command("eval", run, "--checkpoint", "7"), 2, "no checkpoint '7'", "best, last, 1, 2, 3")
    (run / "checkpoints" / "step-000003" / "model" / "config.json").unlink()
    assert_one_line(command("eval", run, "--checkpoint", "3"), 2, "model/config.json is missing")


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["nowhere/at/all"], ["nowhere/at/all is no model folder"]),
        (["builtin", "--k", "0"], ["eval.k must be at least 1"]),
        (["builtin", "--task", "arithmetik"], ["unknown task 'arithmetik'", "'arithmetic'"]),
        (["builtin", "--task", "none.jsonl"], ["no such file: none.jsonl"]),
        (["builtin", "--device", "gpu"], ["device 'gpu'"]),
        (["builtin", "--reward", "my_reward.py:scor"], ["has no function 'scor'", "did you mean 'score'?"]),
        (["empty"], ["empty has no checkpoint yet"]),
        (["failed"], ["failed has no checkpoint: it failed before its first"]),
    ],
)
def test_mistakes_of_eval(command: Command, home: Path, argv: list[str], texts: list[str]) -> None:
    others = [home / "runs" / f"r{n}" for n in range(7)]
    for run in (home / "empty", home / "failed", *others):
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("steps: 3\n")
        (run / "run.id").touch()
    (home / "failed" / "summary.json").write_text('{"status": "failed"}')
    assert_one_line(command("eval", *argv, cwd=home), 2, *texts)
    named = "there is no run runs/none; runs has r0, r1, r2, r3, r4 and 2 more"  # and the hub is not asked
    assert_one_line(command("eval", "runs/none", cwd=home), 2, named)


def test_what_was_not_evaluated_since_the_start_has_no_arrow(tmp_path: Path) -> None:
    scores = {"metric": "mean@8", "first": 0.375, "last": 0.375, "last_step": 0, "last_low": 0.3, "last_high": 0.4}
    scores |= {"best": 0.375, "best_step": 0}
    found = {"eval": {"sums": scores}, "step": 5, "seconds": 9.0, "peak_memory_gb": 1.0, "peak_gpu_memory_gb": None}
    config = Config(output=str(tmp_path))
    assert _closing(found, config).splitlines()[0] == "sums mean@8: 37.5% at the start, not evaluated since"
    assert _closing(found | {"step": 0}, config).splitlines()[0] == "sums mean@8: 37.5% at the start"
    later = found | {"eval": {"sums": scores | {"last_step": 5}}}
    assert _closing(later, config).startswith("sums mean@8: 37.5% → 37.5% [30.0%, 40.0%], best 37.5% at step 0")


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown section": (["--config", "section.yaml"], ["section.yaml: unknown key 'rolout'", "'rollout'?"]),
    "unknown key": (["--config", "key.yaml"], ["key.yaml: unknown key 'rollout.temprature'", "'rollout.temperature'?"]),
    "wrong type": (["--config", "type.yaml"], ["type.yaml", "steps must be a whole number", "'many'"]),
    "one response a group": (["--algorithm", "rloo", "--rollout.samples", "1"], ["rollout.samples must be at least 2"]),
    "no reduction": (["--loss.reduction", "none"], ["loss.reduction=none leaves no number"]),
    "tokens at sequence level": (["--algorithm", "rloo", "--loss.advantage", "reward-to-go"], ["level='sequence'"]),
    "a gate of sequences": (["--algorithm", "gspo", "--loss.curvature_gate", "true"], ["loss.level must be token"]),
    "a gate that is not there": (["--loss.needs", "[keep]"], ["curvature gate of capo"]),
    "a loss that is none": (["--loss.loss", "3"], ["cannot have loss.loss=3"]),
    "unknown reference": (["--loss.reference", "nonsense"], ["unknown loss.reference 'nonsense'"]),
    "unknown mismatch rule": (["--loss.mismatch", "tos"], ["Did you mean 'tis'?"]),
    "capo without AdamW": (["--algorithm", "capo", "--optim.name", "schedule-free"], ["capo needs optim.name=adamw"]),
    "unknown characters": (["--task.name", "english.jsonl"], ["does not know all characters", "What is "]),
    "wrong type of a flag": (["--optim.lr", "fast"], ["--optim.lr", "must be a number", "'fast'"]),
    "unknown flag": (["--rollout.temperatur", "1"], ["did you mean --rollout.temperature?"]),
    "no such choice": (["--optim.name", "adam"], ["must be one of adamw, schedule-free"]),
    "not YAML": (["--config", "broken.yaml"], ["broken.yaml: line 3: expected"]),
    "missing config": (["--config", "none.yaml"], ["none.yaml: no such file"]),
    "missing data": (["--task.name", "none.jsonl"], ["no such file: none.jsonl"]),
    "missing test data": (["--task.test", "none.jsonl"], ["no such file: none.jsonl"]),
    "malformed row": (["--task.name", "malformed.jsonl"], ["malformed.jsonl:2: malformed JSON"]),
    "row without answer": (["--task.name", "lacks.jsonl"], ["lacks.jsonl:3: no answer", "'prompt'"]),
    "empty file": (["--task.name", "empty.jsonl"], ["empty.jsonl is empty"]),
    "one problem": (["--task.name", "one.jsonl"], ["one.jsonl", "no held-out problems", "--task.test"]),
    "prompt too long": (
        ["--task.name", "long.jsonl", "--task.test", "long.jsonl"],
        ["a prompt has", "rollout.max_prompt_tokens=512", "1+1+1"],
    ),
    "no room": (
        ["--rollout.max_new_tokens", "250"],
        ["rollout.max_new_tokens=250", "256", "give --rollout.max_new_tokens 2"],
    ),
    "unknown task": (["--task.name", "arithmetc"], ["unknown task 'arithmetc'. Did you mean 'arithmetic'?"]),
    "unknown algorithm": (["--algorithm", "gppo"], ["unknown algorithm 'gppo'", "grpo"]),
    "unknown loss option": (["--loss.betta", "1"], ["betta", "beta"]),
    "loss option of a wrong type": (["--loss.beta", "much"], [": loss.beta must be a number; got 'much'"]),
    "loss option out of range": (["--loss.beta", "-1"], [": loss.beta must be at least 0; got -1"]),
    "missing model": (["--model", "./none"], ["./none is no model folder"]),
    "no model": (["--model", "someone/unknown"], ["someone/unknown is not in the cache", "give a local folder"]),
    "broken model": (["--model", "./broken"], ["./broken has no tokenizer files"]),
    "bad device": (["--device", "cuda:7x"], ["device 'cuda:7x'"]),
    "absent device": (["--device", "xpu"], ["device 'xpu'"]),
    "a device without memory": (["--device", "meta"], ["device 'meta' is not to be had"]),
    "half a surrogate": (["--task.name", "surrogate.jsonl"], ["surrogate.jsonl:2: ", "half a surrogate pair"]),
    "no UTF-8": (["--output", "runs/\udcff"], ["output must be UTF-8 text", r"'runs/\udcff'"]),
    "a config without UTF-8": (["--config", "\udcff.yaml"], [".yaml: no such file"]),
    "end tokens in words": (["--model", "./words"], ["eos_token_id must be a number, or several; got 'x'"]),
    "task that raises": (["--task.name", "tasks.py:raises"], ["tasks.py:raises raised KeyError", "lost"]),
    "task that is none": (["--task.name", "tasks.py:nothing"], ["must return a rpg.tasks.Task", "NoneType"]),
    "task without problems": (["--task.name", "tasks.py:empty"], ["no problems to train on"]),
    "task file missing": (["--task.name", "task.py:make"], ["no such file: task.py"]),
    "task file broken": (["--task.name", "syntax.py:make"], ["cannot import", "SyntaxError", "(line 2)"]),
    "reward file missing": (["--task.reward", "rewards.py:score"], ["no such file: rewards.py"]),
    "reward missing": (["--task.reward", "my_reward.py:scores"], ["no function 'scores'; did you mean 'score'?"]),
    "reward file broken": (["--task.reward", "syntax.py:score"], ["cannot import", "SyntaxError"]),
    "template": (["--task.template", "no place"], ["unknown template 'no place'", "a text with {prompt} in it"]),
    "minibatches": (["--optim.minibatches", "99"], ["optim.minibatches must be at most", "16"]),
    "overlong zone": (["--rollout.overlong", "true", "--rollout.overlong_tokens", "30"], ["overlong_tokens", "24"]),
    "nothing to resume": (["--resume"], ["nothing to resume", "config.yaml"]),
    "output is a file": (["--output", "data.jsonl"], ["data.jsonl"]),
    "output cannot be made": (["--output", "/proc/none/run"], ["/proc/none"]),
}
WITH_THE_MODEL = {
    *("unknown characters", "prompt too long", "no room", "task without problems", "missing model", "no model"),
    *("broken model", "end tokens in words", "output cannot be made"),
}  # told after "loading the model"; all others before


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(train: Command, home: Path, name: str) -> None:
    (home / "section.yaml").write_text("rolout:\n  temperature: 1\n")
    (home / "surrogate.jsonl").write_text(DATA.replace("4+4", "4+\\ud800"))
    shutil.copytree(BUILTIN, home / "words")
    settings = json.loads((home / "words" / "generation_config.json").read_text())
    (home / "words" / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": "x"}))
    (home / "key.yaml").write_text("rollout:\n  temprature: 1\n")
    (home / "type.yaml").write_text("steps: many\n")
    (home / "broken.yaml").write_text("steps: 3\nloss: [1\n")
    (home / "malformed.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2", \n')
    (home / "lacks.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "1+2"}\n')
    (home / "empty.jsonl").write_text("")
    english = [{"prompt": f"What is {n}+2?", "answer": str(n + 2)} for n in range(2, 4)]
    (home / "english.jsonl").write_text("".join(json.dumps(row) + "\n" for row in english))
    (home / "one.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    long = json.dumps({"prompt": "1" + "+1" * 300, "answer": "301"})
    (home / "long.jsonl").write_text(DATA + long + "\n")
    (home / "syntax.py").write_text("x = 1\ndef score(:\n")
    (home / "tasks.py").write_text(
        "from rpg.tasks import Task\n\ndef raises():\n    raise KeyError('lost')\n\ndef nothing():\n    pass\n\n"
        "def score(response, answer, prompt):\n    return 0.0\n\n"
        "def empty():\n    from rpg.tasks import Problem\n    return Task('e', [], [Problem('1+1', '2')], score)\n"
    )
    (home / "broken").mkdir()
    (home / "broken" / "config.json").write_text('{"model_type": "llama"}')
    argv, texts = MISTAKES[name]
    job = train(home / "run", *argv, cwd=home)
    assert_one_line(job, 2, *texts)
    assert ("loading the model" in job.out) == (name in WITH_THE_MODEL)
    assert not (home / "run" / "metrics.jsonl").exists()


def test_a_rate_that_ruins_the_model_is_told_before_anything_is_loaded(command: Command, home: Path) -> None:
    job = command("train", "--model", "Qwen/Qwen2.5-0.5B", "--optim.lr", "5e-3", cwd=home)
    assert_one_line(job, 2, "optim.lr 0.005 on all weights of a pretrained model ruins it", "--insist")
    assert job.out == ""


def test_mistakes_about_runs(train: Command, command: Command, home: Path) -> None:
    run = home / "run"
    assert train(run, "--steps", "2", "--checkpoint.every", "1", "--loss.beta", "0.01").code == 0
    before = (run / "metrics.jsonl").read_bytes()
    assert_one_line(train(run), 2, f"{run} holds a run already", "--resume", "--output")
    changed = "cannot resume", "start another --output"
    resume = ["train", "--resume", "--output", run]
    assert_one_line(command(*resume, "--optim.warmup", "9"), 2, *changed, "optim.warmup")
    assert_one_line(
        command(*resume, "--seed", "3", "--algorithm", "grpo"), 2, *changed, "is now grpo, seed was 0 and is now 3"
    )
    assert_one_line(command(*resume, "--loss.high", "0.4"), 2, *changed, "loss.high")  # an option it did not have
    assert_one_line(command(*resume, "--config", "none.yaml"), 2, "none.yaml: no such file")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert checkpoints(run) == ["step-000001", "step-000002"]
    # what may change: how long, where, how often, the learning rate, and how much is computed at a time
    sizes = ["--optim.micro_tokens", "200", "--rollout.slots", "8"]
    job = command(
        *resume, "--steps", "3", "--eval.problems", "4", "--checkpoint.every", "0", "--optim.lr", "1e-4", *sizes
    )
    assert job.code == 0, job.text
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    moved = run.rename(home / "moved run")
    job = command("train", "--resume", "--output", moved, "--steps", "4")
    assert job.code == 0, job.text
    assert summary(moved)["name"] == "moved run"


def test_help_is_complete(command: Command) -> None:
    job = command("train", "--help")
    assert job.code == 0
    for flag in ("--config", "--resume", "--steps", "--rollout.temperature", "--loss.KEY", "--reference.update"):
        assert flag in job.out
    assert "mean@k" in command("eval", "--help").out
