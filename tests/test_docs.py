"""The examples of the training guide, run as they stand there."""

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
FILES = {re.match(r"# (\w+\.py): (rpg train .*)", code): code for code in PYTHON if code.startswith("# ")}
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


def test_there_are_examples():
    assert [found.group(1) for found in FILES if found] == ["shout.py", "double.py"]
    assert len(PYTHON) == 4


@pytest.mark.parametrize(("found", "code"), FILES.items(), ids=lambda x: x.group(1) if hasattr(x, "group") else "")
def test_a_task_and_a_reward_of_ones_own(server, found, code, tmp_path):
    name, command = found.groups()
    (tmp_path / name).write_text(code, encoding="utf-8")
    done = server.start(*command.split()[1:], *SMALL, cwd=tmp_path).wait()
    assert done.code == 0, done.text
    assert "2 steps" in done.out
    assert "reward function" not in done.text  # none failed


def test_from_python(server, tmp_path):
    training, sampling = (code for code in PYTHON if not code.startswith("# "))
    small = training.replace("steps=30", "steps=0")
    assert small != training
    for code in (small, sampling):
        done = server.start(code=code, cwd=tmp_path).wait()
        assert done.code == 0, done.text
    assert done.out.count("answer") >= 3
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
