"""What one optimiser step of RPGTrainer is made of, however TRL cuts it: windows, denominators, dropped groups."""

import math

import pytest
import torch

pytest.importorskip("trl")

from integrations.equivalence import LONGEST, OF_A_RESPONSE, SAMPLES, Case, difference, same, through_rpg_train
from integrations.trl_fixed import through_trl, weighed

# of each reduction one; where a loss's denominator matters
REDUCTIONS = ["dapo", "sapo", "gspo", "dr-grpo", "grpo"]


def on_policy(name, **options):
    """Nothing moved between generation and step: what TRL makes of an optimiser step with whole generations."""
    case = Case(name, options)
    vars(case)["theta"] = case.theta0
    return case


@pytest.mark.parametrize("name", REDUCTIONS)
def test_several_generations_in_one_optimiser_step(name):
    """Each of 4 micro-batches has a generation of its own: all are made before the first is divided."""
    case = on_policy(name)
    found = through_trl(case, 4, generation_batch_size=SAMPLES, num_iterations=1)
    same(found, through_rpg_train(weighed(case), 1), OF_A_RESPONSE)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_generation_for_several_optimiser_steps(name):
    """Of 4 parts of a generation two make the second optimiser step: its denominator is theirs, not the generation's.

    The parts are TRL's own random cut, so the step is done once as 2 micro-batches and once as 1 of both.
    """
    case = Case(name)
    half = {"generation_batch_size": 4 * SAMPLES, "num_iterations": 1, "step": 2, "seed": 3}
    cut = through_trl(case, 2, per_device_train_batch_size=SAMPLES, **half)
    whole = through_trl(case, 1, per_device_train_batch_size=2 * SAMPLES, **half)
    same(cut, whole)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_short_last_window(name):
    """6 micro-batches, 4 to an optimiser step: the second has the last 2, and is divided by theirs alone."""
    case = on_policy(name)
    short = through_trl(
        case, 4, groups=[0, 1, 2, 3, 1, 2], generation_batch_size=SAMPLES, num_iterations=1, step=2, num_train_epochs=1
    )
    alone = through_trl(case, 1, groups=[1, 2], generation_batch_size=2 * SAMPLES, num_iterations=1,
                        per_device_train_batch_size=2 * SAMPLES)  # fmt: skip
    same(short, alone)


@pytest.mark.parametrize("name", ["rpg-reinforce-urkl", "dapo"])
def test_groups_without_signal_have_no_part(name):
    case = Case(name)
    rewards = [*case.rewards[:SAMPLES], *[0.5] * SAMPLES, *case.rewards[2 * SAMPLES :]]
    dropped = through_trl(case, 4, rewards=rewards)
    without = through_trl(case, 1, groups=[0, 2, 3], per_device_train_batch_size=12, generation_batch_size=12)
    same(dropped, without)
    kept = through_trl(case, 4, rewards=rewards, dynamic=False)
    assert difference(kept[1], without[1]) > 1e-2


def test_tokens_of_tools_have_no_part():
    """An environment's tokens (env_mask 0, as with tools) count neither in the loss nor in its denominator."""
    case = on_policy("dapo")
    mask = [[int(t % 3 != 1) for t in range(len(r))] for r in case.responses]
    found = through_trl(case, 4, env_mask=mask, num_iterations=1)
    batch, policy = case.batch, case.policy(case.theta)
    keep_BT = torch.zeros_like(batch.mask_BT)
    for row, ones in zip(keep_BT, mask, strict=True):
        row[: len(ones)] = torch.tensor(ones, dtype=torch.bool)
    scored = policy.score(batch.ids_BL, batch.start_B, batch.mask_BT, batch.group_B)
    rule = weighed(case).method.loss
    old_BT, rollout_BT = scored.logp_BT.detach(), batch.rollout_logp_BT
    loss = rule(scored.logp_BT, old_BT, batch.advantage, keep_BT, rollout_logp=rollout_BT).loss
    loss.backward()
    same(found, (float(loss.detach()), {name: p.grad for name, p in policy.parameters()}))


def test_overlong_responses_are_penalised():
    """Only responses of full length are: by 1, so within their groups alone advantages change."""
    case = Case("dapo")
    long = [len(r) == LONGEST for r in case.responses]
    rewards = [r - float(cut) for r, cut in zip(case.rewards, long, strict=True)]
    same(through_trl(case, 1, overlong=True, overlong_tokens=1), through_trl(case, 1, rewards=rewards))


def test_what_the_sampler_does_not_know_is_the_trainers():
    """nan, which vLLM gives where it has no log-probability: there π_old/μ is 1."""
    case, filled = Case("dapo", {"mismatch": "tis"}), Case("dapo", {"mismatch": "tis"})
    known = [list(row) for row in case.rollout_logp]
    old_BT = case.batch.old_logp_BT
    vars(filled)["rollout_logp"] = [[float(old_BT[i, 0]), *row[1:]] for i, row in enumerate(known)]
    vars(case)["rollout_logp"] = [[math.nan, *row[1:]] for row in known]
    same(through_trl(case, 4), through_rpg_train(filled))


def stale(case):
    """What the tokens were drawn from is far from old: earlier weights, and more than one of them in a response."""
    g = torch.Generator().manual_seed(9)
    vars(case)["rollout_logp"] = [
        [x + float(0.3 * torch.randn((), generator=g)) for x in row] for row in case.rollout_logp
    ]
    return case


@pytest.mark.parametrize("options", [{}, {"mismatch": "exact"}])
def test_what_each_token_was_drawn_from_is_in_the_gradient(options):
    """Where nothing is clipped it is that of −A·π/μ, μ being the sampler's, whatever old is."""
    case = stale(Case("dapo", {"low": 0.999, "high": 1e6, **options}))
    found = through_trl(case, 4)
    batch, policy = case.batch, case.policy(case.theta)
    scored = policy.score(batch.ids_BL, batch.start_B, batch.mask_BT, batch.group_B)
    sampler_BT = weighed(case).batch.rollout_logp_BT
    ratio_BT = (scored.logp_BT - sampler_BT).exp() * batch.mask_BT
    loss = -(batch.advantage.unsqueeze(-1) * ratio_BT).sum() / batch.mask_BT.sum()
    loss.backward()
    same(found, (float(loss.detach()), {name: p.grad for name, p in policy.parameters()}))


def test_the_weight_can_be_left_away():
    case = stale(Case("dapo"))
    left, weight = through_trl(case, 1, vllm_importance_sampling_correction=False), through_trl(case, 1)
    same(left, through_rpg_train(case))
    assert difference(weight[1], left[1]) > 1e-2
