"""Every preset has a recipe, and every recipe is one that can be run."""

from pathlib import Path

import pytest

import rpg
from rpg.tasks import load_task
from rpg.train.config import Config
from rpg.train.parts import resolve
from rpg.train.settings import build

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def test_every_preset_has_one():
    names = {path.stem for path in (ROOT / "recipes" / "builtin").glob("*.yaml")}
    assert names == {*rpg.algorithms(), "countdown"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_is_what_its_name_says(path):
    config = build(Config, file=path)
    if path.stem != "countdown":
        assert config.algorithm == path.stem
    assert resolve(config).name == config.algorithm
    assert load_task(config.task.name).test[0].answer
    assert config.output == f"runs/{path.stem}"
    text = path.read_text(encoding="utf-8")
    assert f"rpg train --config recipes/builtin/{path.name}" in text
    if path.stem != "countdown":
        assert rpg.algorithm(path.stem).paper in text
        assert rpg.algorithm(path.stem).formula in text


def test_dr_grpo_divides_by_the_longest_response():
    config = build(Config, file=ROOT / "recipes" / "builtin" / "dr-grpo.yaml")
    assert resolve(config).loss.constant == config.rollout.max_new_tokens
