"""`rpg recipes`, and recipes by name wherever a file of settings is taken."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from rpg import console
from rpg.api import configure
from rpg.cli import main
from rpg.find_recipe import recipes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Not in the clone."""
    monkeypatch.chdir(tmp_path)


def rows(capsys) -> dict[str, list[str]]:
    assert main(["recipes"]) == 0
    lines = (line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines() if line)
    return {name: rest for name, *rest in lines}


def test_all_are_listed(capsys):
    listed = rows(capsys)
    files = {
        path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.*") if path.is_file()
    }
    assert {*listed} == {"name", *(name.removesuffix(".yaml") for name in files)}
    assert listed["name"] == ["method", "model", "task", "needs"]
    assert listed["builtin/countdown"] == ["rpg-reinforce-urkl", "builtin", "countdown", "a CPU"]
    assert listed["builtin/distill"][-1] == "a CPU, the run runs/rpg-reinforce-urkl"
    hub = ["dapo", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "gsm8k", "a GPU, the hub"]
    assert listed["gsm8k/qwen2.5-coder-0.5b/dapo"] == hub


def test_one_is_printed_and_copied(capsys):
    text = (ROOT / "recipes" / "builtin" / "dapo.yaml").read_text(encoding="utf-8")
    assert main(["recipes", "builtin/dapo"]) == 0
    assert capsys.readouterr().out == text
    assert main(["recipes", "builtin/dapo", "-o", "my.yaml"]) == 0
    assert Path("my.yaml").read_text(encoding="utf-8") == text
    assert configure("my.yaml") == configure("builtin/dapo")
    capsys.readouterr()
    for line, message in {
        ("recipes", "builtin/dapo", "-o", "my.yaml"): "my.yaml exists already",
        ("recipes", "-o", "my.yaml"): "-o goes with a NAME",
        ("recipes", "builtin/dpao"): "builtin/dpao: no such file or recipe; did you mean builtin/dapo?",
        ("recipes", "dapo"): "did you mean builtin/dapo?",
        ("train", "--config", "gsm8k/qwen2.5-coder/dapo"): "did you mean gsm8k/qwen2.5-coder-0.5b/dapo?",
        ("train", "--config", "nowhere"): "nowhere: no such file or recipe; rpg recipes lists them",
        ("export", "trl", "none.yaml"): "none.yaml: no such file",
    }.items():
        assert main([*line]) == 2, line
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["builtin/dapo", "builtin/dapo.yaml", "recipes/builtin/dapo.yaml"])
def test_by_name_from_anywhere(name):
    assert configure(name) == configure(recipes()["builtin/dapo"])
    assert configure(name).algorithm == "dapo"


def test_a_file_of_ones_own_goes_first():
    Path("builtin").mkdir()
    Path("builtin", "dapo").write_text("algorithm: grpo\n", encoding="utf-8")
    assert configure("builtin/dapo").algorithm == "grpo"


def test_a_wheels_recipes_lie_beside_the_code(monkeypatch, tmp_path):
    (tmp_path / "recipes" / "builtin").mkdir(parents=True)
    (tmp_path / "recipes" / "builtin" / "mine.yaml").write_text("algorithm: gspo\n", encoding="utf-8")
    monkeypatch.setattr("rpg.find_recipe.FOLDERS", (tmp_path / "recipes", ROOT / "recipes"))
    assert [*recipes()] == ["builtin/mine"]
    assert configure("builtin/mine").algorithm == "gspo"


def test_the_other_rpg_is_noticed(monkeypatch, tmp_path, capsys):
    assert main(["recipes", "builtin/dapo"]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "rpg-2.0.5.dist-info").mkdir()
    (tmp_path / "rpg-2.0.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: rpg\nVersion: 2.0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("rpg") == "2.0.5"
    assert main(["recipes", "builtin/dapo"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rpg: another package, rpg 2.0.5, has the same files and command: pip uninstall rpg, then ")
    assert line.endswith("--force-reinstall --no-deps")
    assert console.namesake() in line
