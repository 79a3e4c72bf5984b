"""The advantages of rpg as verl's estimators: rpg's own numbers, and who is in a group."""

import numpy as np
import pytest
import torch

import rpg
from engine_verl.verl_engine import REFUSED, advantages_of, needs_verl, overrides_of, run_config
from integrations.equivalence import Case, preset_case

pytestmark = needs_verl

ONE_OF_EACH = {rpg.algorithm(name).advantage: name for name in rpg.algorithms() if name not in REFUSED}
OPTIONS = [Case("rloo", {"advantage": {"beta": 0.3}}), Case("topr", {"advantage": {"constant": 0.25}})]
OPTIONS += [Case("grpo", {"advantage": {"kind": "batch-mean"}})]


@pytest.mark.parametrize("case", [*map(preset_case, ONE_OF_EACH.values()), *OPTIONS], ids=str)
def test_advantages_are_those_of_rpg(case):
    found_BT = advantages_of(case, run_config(overrides_of(case)))
    own = case.batch.advantage
    own_BT = (own if own.dim() == 2 else own.unsqueeze(-1)) * case.batch.mask_BT
    torch.testing.assert_close(found_BT, own_BT.to(found_BT.dtype))


GROUPED = ("rpg:group-mean-std", "rpg:batch-whitening", "rpg:leave-one-out", "rpg:gpg")


def estimate(name, rewards, uids, mask=None):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    last = torch.zeros(len(rewards), 3)
    last[:, -1] = torch.tensor(rewards)
    mask = torch.ones_like(last) if mask is None else mask
    return get_adv_estimator_fn(name)(token_level_rewards=last, response_mask=mask, index=np.array(uids, dtype=object))[
        0
    ]


@pytest.mark.parametrize("name", GROUPED)
def test_what_verl_fills_a_batch_up_with_is_in_no_group(name):
    mask = torch.ones(6, 3)
    mask[4:] = 0
    rewards, uids = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b", "padf0e1", "padf0e1"]
    whole = estimate(name, rewards, uids, mask)
    torch.testing.assert_close(whole[:4], estimate(name, rewards[:4], uids[:4]))
    assert not whole[4:].any()


@pytest.mark.parametrize("name", [*GROUPED, "grpo", "rpg:reward-to-go"])
def test_a_rejected_response_keeps_its_reward_in_its_group(name):
    """verl's rollout correction takes the mask away before advantages are computed; so does verl's own grpo."""
    mask = torch.ones(4, 3)
    mask[0] = mask[3, 2] = 0
    rewards, uids = [1.0, 0.0, 1.0, 0.5], ["a", "a", "b", "b"]
    torch.testing.assert_close(estimate(name, rewards, uids, mask), estimate(name, rewards, uids) * mask)


@pytest.mark.parametrize("name", ["rpg:group-mean", "rpg:group-mean-std", "rpg:leave-one-out"])
def test_a_response_alone_in_its_group_has_no_advantage(name, caplog):
    with caplog.at_level("WARNING", logger="rpg.integrations.verl"):
        found = estimate(name, [1.0, 0.0, 5.0], ["a", "a", "b"])
    torch.testing.assert_close(found[:2], estimate(name, [1.0, 0.0], ["a", "a"]))
    assert found[:2].any()
    assert not found[2].any()
    assert not estimate(name, [5.0], ["b"]).any()
    assert "1 prompts have one response only" in caplog.text
