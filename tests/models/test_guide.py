"""The examples of the guide to models, run as they stand there."""

import re
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


def test_the_guide(server, tmp_path):
    def run(*argv, **options):
        done = server.start(*argv, cwd=tmp_path, **options).wait()
        assert done.code == 0, done.text
        return done.out

    first, whole = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    (command,) = re.findall(r"```bash\nrpg (.*?)\n```", GUIDE, re.S)
    assert "12+7=" in run(code=first)
    assert (tmp_path / "copy" / "model.safetensors").exists()
    run(*command.split(), *SMALL)
    run(code=whole)
    assert (tmp_path / "whole" / "model.safetensors").exists()
