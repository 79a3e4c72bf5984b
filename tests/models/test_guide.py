"""The examples of the guide to models, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*line, cwd):
    done = subprocess.run([sys.executable, *line], cwd=cwd, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide(tmp_path):
    first, whole = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    (command,) = re.findall(r"```bash\nrpg (.*?)\n```", GUIDE, re.S)
    assert "12+7=" in run("-c", first, cwd=tmp_path)
    assert (tmp_path / "copy" / "model.safetensors").exists()
    run("-m", "rpg.cli", *command.split(), *SMALL, cwd=tmp_path)
    run("-c", whole, cwd=tmp_path)
    assert (tmp_path / "whole" / "model.safetensors").exists()
