"""The first minutes: make train again and again, and settings that are auto as other engines get them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rpg.cli import main

ROOT = Path(__file__).parents[2]


def make(home: Path, *arguments: str, **more: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), **more}
    done = subprocess.run(["make", *arguments], cwd=home, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose Python and pip do nothing, and whose rpg says how it was called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    scripts = {
        "python": "mkdir -p .venv/bin && cp pip rpg .venv/bin/",
        "pip": "echo Collecting; echo '  Downloading torch-2.9-py3-none-any.whl (201.5 MB)'; echo 'Using x (1 kB)'",
        "rpg": 'echo "rpg $*"',
    }
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_make_train_again_and_with_another_seed(clone: Path) -> None:
    first = make(clone, "train", "PYTHON=./python").splitlines()
    assert first[0].startswith("setting up .venv, once: torch, transformers")
    assert "GB" in first[1]
    assert first[2] == "  Downloading torch-2.9-py3-none-any.whl (201.5 MB)"
    assert first[3:] == ["rpg train --seed 0", "rpg is in .venv/bin: source .venv/bin/activate"]
    assert make(clone, "train", "SEED=1").splitlines() == ["rpg train --seed 1", first[-1]]
    assert make(clone, "train", "OUTPUT=runs/x").splitlines()[0] == "rpg train --seed 0 --output runs/x"
    active = f"{clone}/.venv/bin:/usr/bin:/bin"
    assert make(clone, "train", PATH=active) == "rpg train --seed 0\n", "no word about what is there"


def test_a_set_up_that_fails_stops_make(clone: Path) -> None:
    (clone / "pip").write_text("#!/bin/sh\necho no network >&2; exit 1\n")
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["make", "train", "PYTHON=./python"], cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no network" in done.stderr
    assert "rpg train" not in done.stdout


def test_what_is_auto_is_settled_for_other_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: Qwen/Qwen2.5-0.5B-Instruct\ntask: {name: gsm8k}\nrollout: {overlong: false}\n")
    assert main(["export", "verl", str(recipe), "-o", str(tmp_path / "verl"), "--settings-only"]) == 0
    script = (tmp_path / "verl" / "run.sh").read_text()
    assert "actor_rollout_ref.actor.optim.lr=1e-06" in script
    assert "data.max_response_length=1024" in script
    assert main(["export", "trl", str(recipe), "-o", str(tmp_path / "trl"), "--peft.method", "lora"]) == 0
    assert "lr: 3.0e-05\n" in (tmp_path / "trl" / "recipe.yaml").read_text()
    assert "learning_rate=3e-05" in (tmp_path / "trl" / "train.py").read_text()
    capsys.readouterr()
    assert main(["export", "verl", str(recipe), "-o", str(tmp_path / "no"), "--optim.lr", "5e-4"]) == 2
    assert "ruins it" in capsys.readouterr().err
    assert os.listdir(tmp_path).count("no") == 0
