"""A plan of a run whose sampling and training each have the device for themselves."""

from dataclasses import replace
from pathlib import Path

import pytest

from rpg.plan.plan import plan
from rpg.plan.table import show
from rpg.run.config import Config, OffPolicyConfig, RolloutConfig
from rpg.run.settings import build

ROOT = Path(__file__).parents[2]


def test_the_papers_8k_recipe():
    """On one H200, before phases were told apart: 27 responses at a time, and 120 days."""
    config = build(Config, file=ROOT / "recipes" / "paper" / "qwen3-4b-8k" / "rpg-reinforce-urkl.yaml")
    found = plan(config, "h200")
    assert found.fits
    assert found.layout.slots >= 100
    assert found.middle.seconds.offload == pytest.approx(2 * 12 * found.parameters / 50e9 + 5 * 36 * 4e-3)
    assert found.middle.seconds.step > found.middle.seconds.rollout + found.middle.seconds.train
    stays = plan(replace(config, optim=replace(config.optim, offload=False)), "h200")
    assert stays.layout == found.otherwise
    assert stays.middle.seconds.offload == 0
    assert found.middle.run < stays.middle.run < 120 * 86400
    rounded = plan(replace(config, rollout=replace(config.rollout, cache_dtype="fp8")), "h200")
    assert rounded.layout.slots > 2 * found.layout.slots
    assert rounded.middle.run < 120 * 86400 / 2
    assert rounded.middle.seconds.logp > found.middle.seconds.logp == 0  # computed again


def test_a_cache_in_8_bits_on_a_device_that_has_none():
    config = Config(rollout=RolloutConfig(cache_dtype="fp8"))
    for device, has in (("h200", True), ("l40s", True), ("a100", False), ("cpu", False)):
        text = "rollout.cache_dtype fp8 needs a GPU that has such numbers (an L40S, RTX 4090, H100, H200 or later)"
        assert (text in plan(config, device).objections) != has


def test_sampling_that_runs_ahead_is_refused_where_the_run_would_refuse_it():
    ahead = {"rollout": RolloutConfig(ahead=1.0)}
    for name, text in (("remax", "needs a greedy response"), ("gpg", "--rollout.min_signal 0")):
        with pytest.raises(ValueError, match=text):
            plan(Config(algorithm=name, **ahead), "h200")


def test_groups_that_serve_again_are_not_sampled_and_what_is_not_counted_is_said(capsys):
    once = plan(Config(rollout=RolloutConfig(prompts=512)), "h200")
    again = plan(Config(rollout=RolloutConfig(prompts=512), offpolicy=OffPolicyConfig(reuse=4)), "h200")
    assert again.middle.seconds.rollout < 0.6 * once.middle.seconds.rollout
    assert again.middle.seconds.train == once.middle.seconds.train
    show(plan(Config(rollout=RolloutConfig(ahead=1.0)), "h200"))
    assert "rollout.ahead 1 is not counted" in " ".join(capsys.readouterr().out.split())
