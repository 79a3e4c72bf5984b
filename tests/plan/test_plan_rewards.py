"""What a run would refuse of rewards and prompts, its plan refuses in the same words."""

from __future__ import annotations

import time

import pytest

from rpg.plan.plan import plan
from rpg.run.config import (
    Config,
    TaskConfig,
)
from rpg.tasks import Problem, Task
from rpg.tasks.templates import WRAPPED
from rpg.training.loop import Failed, train
from rpg.training.setup import check_rewards, make_scorer

MISTAKES = {
    "unknown template 'boxd'. Did you mean 'boxed'?": {"template": "boxd"},
    "cannot read none.txt": {"template": "@none.txt"},
    "empty.txt must have {prompt} in it": {"template": "@empty.txt"},
    "unknown reward in task.rewards: 'corect'. Did you mean 'correct'?": {"rewards": {"corect": 1.0}},
    "the weight of correct must be a finite number; got nan": {"rewards": {"correct": float("nan")}},
    "the weight of format must be a finite number; got 'nan'": {"rewards": {"correct": 1.0, "format": "nan"}},
    "all weights are 0": {"rewards": {"correct": 0.0}},
    "task.reward is the only reward": {"reward": "mine.py:score", "rewards": {"correct": 1.0}},
    "no such file: none.py": {"reward": "none.py:score"},
    "'mine.py' names no function": {"reward": "mine.py"},
    "mine.py has no function 'scor'; did you mean 'score'?": {"rewards": {"correct": 1.0, "mine.py:scor": 0.5}},
    "is no function but int": {"reward": "mine.py:NUMBER"},
    "broken.py: KeyError: 'x' (line 2)": {"reward": "broken.py:score"},
    "bye (line 2)": {"rewards": {"leaves.py:score": 1.0}},
    "No module named 'no_such_module'": {"reward": "no_such_module:score"},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, answer, prompt):\n    return 1.0\nNUMBER = 3\n")
    (tmp_path / "broken.py").write_text("x = {}\nx['x']\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "empty.txt").write_text("Solve it.")
    (tmp_path / "prompt.txt").write_text("Solve {prompt}")


@pytest.mark.parametrize("text", MISTAKES)
def test_what_a_run_would_refuse_of_rewards_and_templates(text, rewards, tmp_path):
    config = Config(task=TaskConfig(**MISTAKES[text]), output=str(tmp_path / "run"))
    lines = []
    for refused in (lambda: plan(config, "cpu"), lambda: train(config)):
        with pytest.raises((ValueError, Failed)) as error:
            refused()
        lines.append(str(error.value))
    assert text in lines[0]
    assert lines[0] == lines[1]
    assert "\n" not in lines[0]


def test_rewards_and_templates_that_a_run_takes(rewards):
    for task in (
        TaskConfig(template="@prompt.txt", rewards={"correct": 1.0, "format": 0.0, "mine.py:score": -0.5}),
        TaskConfig(template="Solve {prompt}", reward="mine.py:score"),
        TaskConfig(template="think", rewards={"mine:score": 1}),
    ):
        assert plan(Config(task=task), "cpu").fits
    start = time.perf_counter()
    check_rewards(Config(task=TaskConfig(rewards={"correct": 1.0, "mine.py:score": 0.5})))
    assert time.perf_counter() - start < 5  # one small process


def test_a_template_that_no_problem_takes_is_refused_all_the_same():
    problems = [Problem("1+1", "2", template=WRAPPED)]
    config = Config(task=TaskConfig(template="boxd"))
    with pytest.raises(ValueError, match="unknown template 'boxd'"):
        make_scorer(config, Task("t", problems, problems, lambda *_: 1.0, trusted=True))
