"""examples/one_page.py is what ``rpg train`` does: the same prompts, tokens, rewards, gradients and weights."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rpg
from rpg.rollout import NativeEngine

PAGE = Path(__file__).parents[1] / "examples" / "one_page.py"
SIZES = {"PROMPTS": 6, "SAMPLES": 4, "MAX_NEW_TOKENS": 24, "OVERLONG_TOKENS": 8, "MINIBATCHES": 2, "MAX_ROUNDS": 3}
EVALUATION = {"EVAL_PROBLEMS": 8, "EVAL_SAMPLES": 2}
SETTINGS = {
    "rollout": {"prompts": 6, "samples": 4, "max_new_tokens": 24, "overlong_tokens": 8, "max_rounds": 3},
    "optim": {"minibatches": 2},
    "eval": {"problems": 8, "k": 2},
    "log": {"view": "none", "tensorboard": False, "report": False},
}


@pytest.fixture
def page(monkeypatch):
    spec = importlib.util.spec_from_file_location("one_page", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in (SIZES | EVALUATION).items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


@pytest.fixture
def seen(monkeypatch):
    """What passes through the engine and the advantages, whoever calls them."""
    sampled, advantages = [], []
    generate, compute = NativeEngine.generate, rpg.Advantage.__call__

    def spy_on_engine(self, prompts, n, *args, **options):
        rollouts = generate(self, prompts, n, *args, **options)
        sampled.append(([list(prompt) for prompt in prompts], [[r.tokens for r in group] for group in rollouts]))
        return rollouts

    def spy_on_advantages(self, reward_B, group_B, **options):
        advantage_B = compute(self, reward_B, group_B, **options)
        advantages.append((reward_B.clone(), group_B.clone(), advantage_B.clone()))
        return advantage_B

    monkeypatch.setattr(NativeEngine, "generate", spy_on_engine)
    monkeypatch.setattr(rpg.Advantage, "__call__", spy_on_advantages)

    def taken():
        both = list(sampled), list(advantages)
        sampled.clear()
        advantages.clear()
        return both

    return taken


@pytest.mark.parametrize("seed", [1, 2])
def test_its_first_two_steps_are_those_of_rpg_train(page, seen, tmp_path, capsys, seed):
    policy, history = page.train(steps=2, seed=seed)
    sampled, advantages = seen()
    run = rpg.train(output=tmp_path / "run", steps=2, seed=seed, device="cpu", **SETTINGS)
    trained_sampled, trained_advantages = seen()
    trained_advantages = [each for each in trained_advantages if len(each[0]) == 24]  # others: trials

    assert len(sampled) > 4  # two evaluations, two steps, and in one of them at least a second round of prompts
    assert sampled == trained_sampled
    assert len(advantages) == 2
    for ours, theirs in zip(advantages, trained_advantages, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)

    rows = run.metrics[1:]
    assert [row["step"] for row in rows] == [row["step"] for row in history] == [1, 2]
    for ours, theirs in zip(history, rows, strict=True):
        assert ours["right"] == pytest.approx(theirs["reward/solved"], rel=1e-6)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-8)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    shown = re.findall(r"held-out accuracy (.*)%", capsys.readouterr().out)
    assert shown == [f"{100 * row['eval/arithmetic/mean@2']:.1f}" for row in (run.metrics[0], run.metrics[-1])]

    start = load_file(Path(rpg.models.__path__[0]) / "builtin" / "model.safetensors")
    trained = load_file(run.checkpoint("last") / "model" / "model.safetensors")
    ours = policy.model.state_dict()
    assert trained.keys() <= ours.keys()
    moved = torch.cat([(trained[name] - start[name]).flatten() for name in trained])
    apart = torch.cat([(trained[name] - ours[name]).flatten() for name in trained])
    assert moved.norm() > 0
    assert apart.norm() <= 1e-5 * torch.cat([x.flatten() for x in trained.values()]).norm()
    assert apart.norm() <= 1e-4 * moved.norm()


def test_it_fits_on_a_page():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "class " not in "\n".join(lines)
