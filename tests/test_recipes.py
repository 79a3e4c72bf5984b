"""Every preset has a recipe, and every recipe is one that can be run; those of the paper are what the script makes."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import rpg
from rpg.console import estimated_duration
from rpg.plan.plan import plan
from rpg.plan.table import show, verdicts
from rpg.run.config import Config
from rpg.run.settings import build, flat
from rpg.tasks import load_task
from rpg.tasks.sources.datasets import DATASETS
from rpg.training.setup import method_of

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BUILTIN = [path for path in RECIPES if path.parent.name == "builtin"]
ABLATIONS = [path for path in RECIPES if path.parent.name == "ablations"]
PAPER = [path for path in RECIPES if "paper" in path.parts and path not in ABLATIONS]
OTHERS = [path for path in RECIPES if path not in BUILTIN]
METHODS = {
    *(f"rpg-{divergence}" for divergence in ("fkl", "rkl", "ufkl", "urkl")),
    *(f"rpg-reinforce-{divergence}" for divergence in ("fkl", "rkl", "ufkl", "urkl")),
    *("grpo", "dapo", "reinforce++", "reinforce++-baseline"),
}


def name_of(path):
    return str(path.relative_to(ROOT / "recipes"))


def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("make_recipes", ROOT / "scripts" / "make_recipes.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_recipes", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# ---- the built-in model ----------------------------------------------------------------------------------------------


def test_every_preset_has_one():
    assert {path.stem for path in BUILTIN} == {*rpg.algorithms(), "countdown"}


@pytest.mark.parametrize("path", BUILTIN, ids=lambda path: path.stem)
def test_it_is_what_its_name_says(path):
    config = build(Config, file=path)
    if path.stem != "countdown":
        assert config.algorithm == path.stem
    assert method_of(config).name == config.algorithm
    assert load_task(config.task.name).test[0].answer
    assert config.output == f"runs/{path.stem}"
    text = path.read_text(encoding="utf-8")
    assert f"rpg train --config recipes/builtin/{path.name}" in text
    if path.stem != "countdown":
        assert rpg.algorithm(path.stem).paper in text
        assert rpg.algorithm(path.stem).formula in text


def test_dr_grpo_divides_by_the_longest_response():
    config = build(Config, file=ROOT / "recipes" / "builtin" / "dr-grpo.yaml")
    assert method_of(config).loss.constant == config.rollout.max_new_tokens


# ---- the paper and GSM8K ---------------------------------------------------------------------------------------------


def test_the_files_are_what_the_script_makes(monkeypatch):
    made = script(monkeypatch).recipes()
    assert {path.relative_to(ROOT) for path in OTHERS} == set(made)
    for path, text in made.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run scripts/make_recipes.py"


def test_four_settings_of_twelve_methods():
    folders = {path.parent.name for path in PAPER}
    assert folders == {"qwen3-4b-2k", "qwen3-4b-4k", "qwen3-4b-8k", "qwen2.5-7b-instruct"}
    for folder in folders:
        assert {path.stem for path in PAPER if path.parent.name == folder} == METHODS


@pytest.mark.parametrize("path", OTHERS, ids=name_of)
def test_it_can_be_planned(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config, text = build(Config, file=path), path.read_text(encoding="utf-8")
    assert config.algorithm == path.stem or (path in ABLATIONS and path.stem.startswith(config.algorithm))
    assert config.output.endswith(path.stem)
    assert f"rpg train --config recipes/{name_of(path)}" in text
    assert rpg.algorithm(config.algorithm).formula in text
    assert max(map(len, text.splitlines())) <= 120
    found = plan(config, "h200")
    assert not found.warnings
    ok, line = next(verdicts(found))
    assert ok == found.fits == ("Does not fit one H200" not in text)
    assert ok or "--peft.method lora" in line


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_the_papers_settings(path):
    """Section 5 and appendix H."""
    config, made = build(Config, file=path), method_of(build(Config, file=path))
    rollout, optim = config.rollout, config.optim
    seven = "7b" in path.parent.name
    assert config.model == ("Qwen/Qwen2.5-7B-Instruct" if seven else "Qwen/Qwen3-4B")
    length = 2048 if seven else {"2k": 2048, "4k": 4096, "8k": 8192}[path.parent.name[-2:]]
    assert (rollout.max_new_tokens, rollout.prompts, rollout.samples, rollout.temperature) == (length, 512, 16, 1)
    assert (optim.name, optim.lr, optim.weight_decay, optim.max_grad_norm) == ("adamw", 1e-6, 0.1, 1)
    assert rollout.prompts // optim.minibatches == 32
    assert (config.steps, optim.warmup // optim.minibatches, optim.schedule) == (400, 10, "constant")
    tests = "aime24, aime25, amc23" + ", minerva-math, olympiadbench" * (path.parent.name == "qwen3-4b-4k")  # Table 7
    assert (config.task.name, config.task.test, config.eval.k) == ("dapo-math-17k-en", tests, 32)
    largest = max(int(DATASETS[name].test.problems) for name in tests.split(", "))
    assert config.eval.problems >= largest
    assert (made.loss.clip.low, made.loss.clip.high) == ((0.2, 0.2) if path.stem == "grpo" else (0.2, 0.28))
    assert made.loss.beta == (0 if path.stem == "dapo" else 1e-4)
    assert made.loss.reduction == "token-mean"
    assert rollout.dynamic == rollout.overlong == (path.stem != "grpo")
    if rollout.overlong:
        assert rollout.overlong_tokens == length // 4
    found = plan(config, "h200")
    assert found.method.anchor == ("frozen" if path.stem == "grpo" else "old")


def test_the_papers_ablations():
    """Appendix I.2: each is a recipe of the tables but for what its name says, its folder, and Table 7's test sets."""
    expected = {
        "rpg-reinforce-ufkl-clip-0.1": ("qwen3-4b-2k", {"loss.low": 0.1, "loss.high": 0.1}),
        "rpg-reinforce-urkl-clip-0.1": ("qwen3-4b-2k", {"loss.low": 0.1, "loss.high": 0.1}),
        "rpg-reinforce-ufkl-beta-1e-3": ("qwen3-4b-4k", {"loss.beta": 1e-3}),
        "rpg-reinforce-ufkl-beta-1e-3-frozen": ("qwen3-4b-4k", {"loss.beta": 1e-3, "reference.update": "frozen"}),
    }
    assert {path.stem for path in ABLATIONS} == set(expected)
    for path in ABLATIONS:
        folder, changes = expected[path.stem]
        config = build(Config, file=path)
        whole = flat(build(Config, file=path.parents[1] / folder / f"{config.algorithm}.yaml"))
        differ = {key: value for key, value in flat(config).items() if whole.get(key) != value}
        for key in ("output", "task.test", "eval.problems"):
            differ.pop(key, None)
        assert differ == changes
        assert method_of(config).anchor == changes.get("reference.update", "old")


def test_published_numbers():
    """Some read off the paper's pages once more, and that what has no row says so."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in PAPER}
    for name, text in {
        "qwen3-4b-8k/rpg-reinforce-urkl": "Table 3, row RPG-REINFORCE-URKL, Last / Best: AIME24 0.5708 / 0.5781, "
        "AIME25 0.5073 / 0.5208, AMC23 0.9398 / 0.9469",
        "qwen3-4b-4k/reinforce++-baseline": "Table 5, row REINFORCE++-Baseline, Last / Best: AIME24 0.3854 / 0.4302",
        "qwen3-4b-4k/rpg-ufkl": "Table 7, Last / Best: Minerva-Math 0.1397 / 0.2059, OlympiadBench 0.4688 / 0.5564",
        "qwen3-4b-2k/rpg-reinforce-ufkl": "Table 6, row RPG-REINFORCE-UFKL, Last / Best: AIME24 0.3396 / 0.3625, "
        "AIME25 0.2927 / 0.3083",
        "qwen2.5-7b-instruct/rpg-fkl": "Table 8, row RPG-FKL, Last / Best: AMC23 0.8695 / 0.8836",
        "qwen3-4b-2k/reinforce++": "Table 6 has no row REINFORCE++: there is no published number",
        "qwen3-4b-8k/rpg-rkl": "Table 3 has no row RPG-RKL",
    }.items():
        assert text in texts[f"paper/{name}.yaml"]
    for text in texts.values():
        numbers = [float(n) for n in re.findall(r"\b0\.\d{4}\b", text)]
        assert numbers or "there is no published number to compare with" in text
        assert not (numbers and "there is no published number" in text)


def test_the_tables_of_the_guide(monkeypatch):
    """docs/recipes.md: published scores as the script has them, costs as the plans say."""
    guide, made = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), script(monkeypatch)
    for method in METHODS:
        cells = []
        for setting in made.SETTINGS:
            row = dict(zip(setting.tests, setting.rows.get(method, ())[::2], strict=False))
            last = [f"{row[test]:.4f}".lstrip("0") for test in ("AIME24", "AIME25", "AMC23") if test in row]
            cells.append(" · ".join(last) or "no row")
        assert f"| `{method}` | {' | '.join(cells)} |" in guide
    for folder in ("qwen3-4b-2k", "qwen3-4b-4k", "qwen3-4b-8k"):
        for method in ("rpg-reinforce-urkl", "grpo"):
            found = plan(build(Config, file=ROOT / "recipes" / "paper" / folder / f"{method}.yaml"), "h200")
            seconds = found.middle.seconds
            cases = (found.low, found.middle, found.high)
            runs = [estimated_duration(case.run).removesuffix(" days") for case in cases]
            row = [f"✓ {found.memory.peak / 1e9:.0f} GB", f"{found.layout.slots}", estimated_duration(seconds.rollout)]
            row += [estimated_duration(seconds.train + seconds.logp), f"{' – '.join(runs)} days"]
            assert f"| `{folder}/{method}` | {' | '.join(row)} |" in guide


def test_the_page_of_long_responses_has_the_plans_of_today(capsys):
    page = (ROOT / "docs" / "long-responses.md").read_text(encoding="utf-8")
    path = ROOT / "recipes" / "paper" / "qwen3-4b-8k" / "rpg-reinforce-urkl.yaml"
    for title, flags in {
        "now, as the recipe stands": {},
        "now, `--rollout.cache_dtype fp8`": {"rollout.cache_dtype": "fp8"},
        "now, `--optim.offload false`": {"optim.offload": False},
    }.items():
        found = plan(build(Config, file=path, flags=flags), "h200")
        seconds = found.middle.seconds
        cells = [f"{found.layout.slots}", *map(estimated_duration, (seconds.rollout, seconds.step, found.middle.run))]
        assert f"| {title} | {' | '.join(cells)} |" in page
    show(plan(build(Config, file=path, flags={"rollout.cache_dtype": "fp8"}), "h200"))
    out = capsys.readouterr().out
    begin, end = out.index(" memory, GB"), out.index("An estimate")
    assert out[begin:end].rstrip() in page
    row = next(
        line for line in (ROOT / "docs" / "recipes.md").read_text("utf-8").splitlines() if "dtype fp8` |" in line
    )
    assert "| 320 | 98 min | 44 min | 10 – 40 – 148 days |" in row
    assert "40 days" in out
