"""Folders of strangers: code that they name does not run, unless it is trusted. One's own runs go on without a word."""

import contextlib
import io
import os
import shutil

import pytest

import rpg
from rpg import cli
from rpg.api import configure
from rpg.run.config import Config
from rpg.run.settings import build, change, to_yaml
from rpg.tasks.loading import made_by_functions
from rpg.training.loop import Trainer
from rpg.trust import code_in

TINY = {
    "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 24},
    "optim": {"minibatches": 1},
    "eval": {"problems": 2, "k": 1},
    "log": {"view": "none", "tensorboard": False, "report": False},
    "device": "cpu",
}
EVIL = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
from rpg.tasks import load_task
def make():
    return load_task("arithmetic")
def score(response, answer, prompt):
    return 1.0
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return rpg.train(output=tmp_path_factory.mktemp("trust") / "run", steps=1, **TINY).folder


@pytest.fixture
def evil(tmp_path):
    path = tmp_path / "evil.py"
    path.write_text(EVIL)
    return path


@pytest.fixture
def stranger(trained, tmp_path, evil):
    """A run whose settings somebody else has written."""

    def make(**settings):
        folder = tmp_path / "stranger"
        shutil.copytree(trained, folder)
        own = build(Config, file=folder / "config.yaml")
        changed = {
            path: value.replace("EVIL", str(evil)) if isinstance(value, str) else value
            for path, value in settings.items()
        }
        (folder / "config.yaml").write_text(to_yaml(change(own, {"output": str(folder), **changed})))
        return folder

    return make


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(a) for a in argv])
    return code, out.getvalue(), err.getvalue()


COMMANDS = {
    "eval": ["eval", "RUN", "--problems", "2", "--k", "1"],
    "sample": ["sample", "RUN", "1+2", "--n", "1"],
    "chat": ["chat", "RUN"],
    "resume": ["train", "--resume", "--output", "RUN", "--steps", "2"],
    "dry run": ["train", "--resume", "--output", "RUN", "--dry-run", "cpu"],
    "config": ["train", "--config", "RUN/config.yaml", "--output", "RUN-again"],
    "export": ["export", "trl", "RUN/config.yaml", "-o", "RUN-trl"],
}
CODE = {
    "task": {"task.name": "EVIL:make"},
    "mixture": {"task.name": "0.5*arithmetic + 0.5*EVIL:make"},
    "test": {"task.test": "countdown, EVIL:make"},
    "reward": {"task.reward": "EVIL:score"},
    "part": {"task.rewards": {"os:system": 1.0}},
    "template": {"task.template": "@/etc/hostname"},
    "model": {"model_options": {"trust_remote_code": True}},
    "attention": {"model_options": {"attn_implementation": "org/kernel"}},
    "vllm": {"rollout.vllm": {"worker_cls": "evil.Worker"}},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_no_code_of_a_stranger(command, stranger, evil):
    folder = stranger(**CODE["task"])
    argv = [part.replace("RUN", str(folder)) for part in COMMANDS[command]]
    code, _out, err = run(*argv)
    assert code == 2, err
    assert not evil.with_suffix(".ran").exists()
    (line,) = err.splitlines()
    assert f"{folder} is no run of yours" in line
    assert "--trust" in line
    assert f"task.name {evil}:make" in line


def test_settings_alone_in_a_folder_are_no_way_around(stranger, evil, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(stranger(**CODE["task"]) / "config.yaml", bare)
    assert run("train", "--resume", "--output", bare)[0] == 2
    assert not evil.with_suffix(".ran").exists()


@pytest.mark.parametrize("kind", CODE)
def test_what_counts_as_code(kind, stranger):
    folder = stranger(**CODE[kind])
    with pytest.raises(ValueError, match="is no run of yours"):
        configure(settings={"output": str(folder)}, resume=True)
    with pytest.raises(ValueError, match="is no run of yours"):
        rpg.evaluate(folder, k=1, problems=1)


@pytest.mark.parametrize(
    "options", [{"revision": "main"}, {"attn_implementation": "eager"}, {"trust_remote_code": False}, {"token": "abc"}]
)
def test_what_does_not(options):
    vllm = {"gpu_memory_utilization": 0.4, "enforce_eager": True}
    assert code_in(Config(model_options=options)) == {}
    assert code_in(change(Config(), {"task.rewards": {"correct": 1.0, "format": 0.1}, "rollout.vllm": vllm})) == {}


def test_code_is_not_hidden_by_what_looks_like_a_secret():
    looks = "hf_" + "a" * 24
    assert code_in(Config(model_options={"trust_remote_code": looks})) == {"model_options.trust_remote_code": looks}
    assert code_in(change(Config(), {"rollout.vllm": {"hf_overrides": looks}})) == {"rollout.vllm.hf_overrides": looks}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ("gsm8k, aime24", False),
        ("0.5*a.jsonl + org/name@sub#train", False),
        ("gym:leg_counting", False),
        ("x:make", True),
        ("a.jsonl, evil.py:make", True),
        ("1*evil.py:make + gsm8k", True),
        ("evil.gym:make", True),
    ],
)
def test_a_task_by_a_function_is_seen_wherever_it_stands(names, code):
    assert made_by_functions(names) is code


def test_a_flag_that_repeats_it_or_replaces_it_is_enough(stranger, evil):
    folder = stranger(**CODE["task"])
    replaced = rpg.evaluate(folder, "arithmetic", k=1, problems=2)
    assert replaced[0].task == "arithmetic"
    assert not evil.with_suffix(".ran").exists()
    assert rpg.evaluate(folder, f"{evil}:make", k=1, problems=2)
    assert evil.with_suffix(".ran").exists()


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_trust_runs_it(command, stranger, evil):
    folder = stranger(**CODE["task"])
    argv = [part.replace("RUN", str(folder)) for part in COMMANDS[command]]
    code, _, err = run(*argv, "--trust")
    if command == "resume":  # this run was trained on another task
        assert "task.name was" in err
    else:
        assert code == 0, err
    assert evil.with_suffix(".ran").exists() == (command == "eval")


def test_a_model_with_code_is_not_opened_or_merged(stranger, tmp_path):
    folder = stranger(**CODE["model"])
    with pytest.raises(ValueError, match=r"model_options\.trust_remote_code True"):
        _ = rpg.Run(folder).model
    assert rpg.Run(folder, trust=True).model is not None
    code, _, err = run("merge", folder, "-o", tmp_path / "merged")
    assert code == 2
    assert "--trust" in err
    assert run("report", folder)[0] == 0  # which runs nothing


def test_ones_own_run_goes_on_without_a_word_and_its_copy_does_not(tmp_path, evil, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    mine = tmp_path / "mine"
    rpg.train(output=mine, steps=1, **TINY | {"task": {"reward": f"{evil}:score"}})
    assert rpg.evaluate(mine, k=1, problems=1)
    assert rpg.train(output=mine, resume=True, steps=2).summary["step"] == 2
    moved = mine.rename(tmp_path / "moved")
    assert rpg.evaluate(moved, k=1, problems=1)
    (moved / "config.yaml").write_text((moved / "config.yaml").read_text().replace(":score", ":make"))
    with pytest.raises(ValueError, match="is no run of yours"):
        rpg.evaluate(moved, k=1, problems=1)
    (moved / "config.yaml").write_text((moved / "config.yaml").read_text().replace(":make", ":score"))
    shutil.copytree(moved, tmp_path / "copy")
    with pytest.raises(ValueError, match="is no run of yours"):
        rpg.evaluate(tmp_path / "copy", k=1, problems=1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    with pytest.raises(ValueError, match="is no run of yours"):
        rpg.evaluate(moved, k=1, problems=1)


def test_what_was_saved_of_ones_own_run_is_ones_own(tmp_path, evil, monkeypatch):
    """Where its folder was deleted on the way, in another."""
    mine, step = tmp_path / "mine", Trainer.step

    def disturbed(self, *rest):
        shutil.rmtree(mine, ignore_errors=True)
        step(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", disturbed)
        with pytest.raises(ValueError, match=r"was deleted while the run was going on\. Step 1 is saved"):
            rpg.train(output=mine, steps=2, **TINY | {"task": {"reward": f"{evil}:score"}})
    assert rpg.train(output=tmp_path / "mine-saved", resume=True).summary["step"] == 2


def test_a_home_that_cannot_be_written_stops_no_run(tmp_path, evil, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = rpg.train(output=tmp_path / "mine", steps=0, **TINY | {"task": {"reward": f"{evil}:score"}})
    assert run.summary["status"] == "finished"
    assert os.path.exists(run.folder / "config.yaml")


def test_files_that_a_run_names_are_looked_for_where_it_was_started(tmp_path, evil, monkeypatch):
    """And from nowhere else, unless it is told so outside of the run's folder."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "rows.jsonl").write_text("".join(f'{{"prompt": "1+{i}", "answer": "{i + 1}"}}\n' for i in range(8)))
    evil.rename(project / "rew.py")
    monkeypatch.chdir(project)
    task = {"name": "0.5*arithmetic + 0.5*rows.jsonl", "test": "rows.jsonl", "reward": "rew.py:score"}
    rpg.train(output="mine", steps=1, **TINY | {"task": task})
    assert "rew.py:score\n" in (project / "mine" / "config.yaml").read_text()
    monkeypatch.chdir(elsewhere)
    assert rpg.evaluate("../project/mine", k=1, problems=1)[0].task == "rows"
    assert rpg.sample("../project/mine", n=1)
    with pytest.raises(ValueError, match=f"mine names files that are not here: go on from {project}, where it was"):
        rpg.train(output="../project/mine", resume=True, steps=2)
    with pytest.raises(ValueError, match=r"no such file: other\.py"):
        rpg.evaluate("../project/mine", k=1, problems=1, reward="other.py:score")
    monkeypatch.chdir(project)
    assert rpg.train(output="mine", resume=True, steps=2).summary["step"] == 2
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    with pytest.raises(ValueError, match=r"no such file: (rew\.py|rows\.jsonl)"):
        rpg.evaluate("../project/mine", k=1, problems=1, trust=True)
