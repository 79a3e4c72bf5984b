"""The examples of the training guide, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
FILES = {re.match(r"# (\w+\.py): (rpg train .*)", code): code for code in PYTHON if code.startswith("# ")}
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def test_there_are_examples():
    assert [found.group(1) for found in FILES if found] == ["shout.py", "double.py"]
    assert len(PYTHON) == 4


@pytest.mark.parametrize(("found", "code"), FILES.items(), ids=lambda x: x.group(1) if hasattr(x, "group") else "")
def test_a_task_and_a_reward_of_ones_own(found, code, tmp_path):
    name, command = found.groups()
    (tmp_path / name).write_text(code, encoding="utf-8")
    line = [sys.executable, "-m", "rpg.cli", *command.split()[1:], *SMALL]
    done = subprocess.run(line, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 steps" in done.stdout
    assert "reward function" not in done.stdout + done.stderr  # none failed


def test_from_python(tmp_path):
    training, sampling = (code for code in PYTHON if not code.startswith("# "))
    small = training.replace("steps=30", "steps=0")
    assert small != training
    for code in (small, sampling):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("answer") >= 3
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
