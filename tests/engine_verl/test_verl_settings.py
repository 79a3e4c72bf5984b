"""A preset as verl's settings name it. Does without verl."""

import re

import pytest

import rpg
from rpg.integrations.verl import settings
from rpg.integrations.verl.settings import ACTOR, names, wanted


def test_options_are_those_of_a_recipe():
    chosen = settings(
        "rpg:rpg-reinforce-urkl", {"beta": 1e-3, "high": 0.3, "reference": {"update": "every", "every": 5}}
    )
    assert chosen.method.loss.beta == 1e-3
    assert chosen.method.loss.clip.high == 0.3
    assert (chosen.method.anchor, chosen.reference.every, chosen.needs_reference) == ("every", 5, True)
    assert settings("dapo", {"mismatch": "tis"}).needs_sampler
    assert settings("rpg-urkl", {"kl_to_go": True, "kl_in_clip": False}).method.loss.kl_to_go
    assert settings("grpo", {"reference": {"update": "kl", "smoothing": 0}}).reference.smoothing == 0


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("capo", {}, "capo cannot run inside verl: its gate needs logits and the optimiser's moments"),
        ("high-entropy", {}, "high-entropy cannot run inside verl: its gate compares all tokens"),
        ("skywork-or1", {}, "skywork-or1 cannot run inside verl: its entropy bonus"),
        ("distill", {}, "distill cannot run inside verl: it learns from a teacher"),
        ("grpo", {"reference": {"model": "x"}}, "reference.model: a teacher cannot be had inside verl"),
        ("warp", {}, "reference.update=ema cannot be had inside verl"),
        ("dapo", {"control_variate": True}, "control_variate cannot run inside verl"),
        ("grpo", {"reference": {"update": "ema"}}, "update=ema cannot be had inside verl: every, kl, frozen or old"),
        ("grpo", {"reference": {"update": "old"}}, "grpo is another method without its reference"),
        ("grpo", {"reference": {"evry": 3}}, "Did you mean 'every'"),
        ("grpo", {"reference": {"every": "x"}}, "reference.every must be a whole number of at least 1; got 'x'"),
        ("grpo", {"reference": {"every": 0}}, "reference.every must be a whole number of at least 1; got 0"),
        ("grpo", {"reference": {"every": 2.5}}, "reference.every must be a whole number of at least 1; got 2.5"),
        ("grpo", {"reference": {"every": True}}, "reference.every must be a whole number of at least 1; got True"),
        ("grpo", {"reference": {"kl": 0.0}}, "reference.kl must be a positive number; got 0.0"),
        ("grpo", {"reference": {"smoothing": 5}}, "reference.smoothing must be at least 0 and below 1; got 5"),
        ("grpo", {"reference": {"decay": 1.0}}, "reference.decay must be at least 0 and below 1; got 1.0"),
        ("grpo", {"beta": True}, "beta must be a number; got True"),
        ("grpo", {"max_log_ratio": True}, "max_log_ratio must be a number; got True"),
        ("grpo", {"mismatch": "tsi"}, "Did you mean 'tis'"),
        ("dapo", {"reduction": "none"}, "reduction=none leaves no number to differentiate"),
        ("dapo", {"high": "x"}, "cannot have high='x'"),
        ("grop", {}, "Did you mean 'grpo'"),
        ("otb", {}, "otb cannot run inside verl: its baseline needs Σπ² of every token"),
        ("grpo", {"reference": {"update": "every", "count": "steps"}}, "optimizer-steps"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(name, options, line):
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        settings(name, options)
    assert "\n" not in str(raised.value)


def test_every_other_preset_has_its_settings():
    for name in rpg.algorithms():
        if not rpg.algorithm(name).only_here and name != "warp":
            found = wanted(settings(name))
            assert names()[found[f"{ACTOR}.policy_loss.loss_mode"]] == name
    assert wanted(settings("grpo"))[f"{ACTOR}.kl_loss_coef"] == 0
    assert f"{ACTOR}.use_kl_loss" not in wanted(settings("rpg-urkl"))
    assert wanted(settings("reinforce++"))["algorithm.kl_ctrl.kl_coef"] == 0.01
    assert wanted(settings("remax"))["algorithm.adv_estimator"] == "remax"
