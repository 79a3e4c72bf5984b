"""What reaches the loss in verl's asynchronous trainers: the log-probabilities that each token was drawn with.

A batch as their sampler hands it over goes through their own trainer's steps, up to verl's loss with the plugin.
"""

from types import SimpleNamespace

import pytest
import torch

import rpg
from engine_verl.test_verl_losses import actor_of, moved_logp, packed_logp, sizes
from engine_verl.verl_engine import needs_verl, overrides_of, run_config
from integrations.equivalence import Case

pytestmark = needs_verl

FULLY_ASYNC = "+async_training.staleness_threshold=0.5"
METHODS = ["rpg-reinforce-urkl", "rpg-urkl", "sapo", "gspo", "cispo"]


def right_padded(rows, width, left=False):
    """[B,width]"""
    padded = [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded)


def rollout_logp(case):
    return right_padded(case.rollout_logp, case.batch.mask_BT.shape[1])


def sampled(case):
    """As verl's sampler gives it: padded, with rollout_log_probs and without old_log_probs."""
    from verl import DataProto

    prompts = [case.prompts[int(group)] for group in case.batch.group_B]
    longest, width = max(map(len, prompts)), case.batch.mask_BT.shape[1]
    prompts_BL, responses_BT = right_padded(prompts, longest, left=True), right_padded(case.responses, width)
    seen_BL = right_padded([[1] * len(prompt) for prompt in prompts], longest, left=True)
    mask_BT = case.batch.mask_BT.long()
    attention_BL = torch.cat([seen_BL, mask_BT], 1)
    return DataProto.from_single_dict(
        {
            "prompts": prompts_BL,
            "responses": responses_BT,
            "input_ids": torch.cat([prompts_BL, responses_BT], 1),
            "attention_mask": attention_BL,
            "position_ids": (attention_BL.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask_BT,
            "rollout_log_probs": rollout_logp(case),
        }
    )


def gradient_of(case, config):
    """d loss / d logp, [B,T]: verl's asynchronous trainer prepares the batch, verl's worker calls the loss."""
    import engine_verl.no_servers  # noqa: F401, I001  before verl's trainers
    from verl import DataProto
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils import losses
    from verl.workers.utils.padding import left_right_2_no_padding

    def recomputed(batch):
        found = {"old_log_probs": case.batch.old_logp_BT, "entropys": torch.zeros_like(case.batch.old_logp_BT)}
        return DataProto.from_single_dict(found), 0.0

    actor = actor_of(config)  # of the workers, which have theirs before the trainer's first step
    trainer = SimpleNamespace(config=config, metrics={}, timing_raw={}, _compute_old_log_prob=recomputed)
    batch = SeparateRayPPOTrainer._fit_compute_log_prob(trainer, sampled(case))
    batch.batch["advantages"] = case.batch.advantage.unsqueeze(-1) * case.batch.mask_BT
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(data, global_batch_size=len(case.batch))
    sizes(data, case, dp_size=1)
    logp_BT = moved_logp(case).requires_grad_()
    loss, metrics = losses.ppo_loss(actor, {"log_probs": packed_logp(case, logp_BT)}, data)
    return torch.autograd.grad(loss, logp_BT)[0], metrics


def expected(case, rule, **old):
    logp_BT = moved_logp(case).requires_grad_()
    loss = rule(logp_BT, advantages=case.batch.advantage, mask=case.batch.mask_BT, **old).loss
    return torch.autograd.grad(loss, logp_BT)[0]


def apart(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", METHODS)
def test_in_bypass_mode_old_is_what_each_token_was_drawn_from(name):
    case = Case(name)
    config = run_config([*overrides_of(Case(name, old="sampler")), "algorithm.filter_groups.enable=False", FULLY_ASYNC])
    gradient, metrics = gradient_of(case, config)
    rule = case.method.loss
    assert apart(gradient, expected(case, rule, old_logp=rollout_logp(case))) < 1e-6
    assert apart(gradient, expected(case, rule, old_logp=case.batch.old_logp_BT)) > 1e-3, "the two cannot be told apart"
    assert metrics["actor/rpg/mismatch/kl"].aggregate() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_else_the_exact_rule_has_all_three_policies(name):
    case = Case(name, {"mismatch": "exact"})
    config = run_config([*overrides_of(case), "algorithm.filter_groups.enable=False", FULLY_ASYNC])
    gradient, metrics = gradient_of(case, config)
    old_BT, rule = case.batch.old_logp_BT, case.method.loss
    assert rule.mismatch == rpg.mismatch.Mismatch()
    assert apart(gradient, expected(case, rule, old_logp=old_BT, rollout_logp=rollout_logp(case))) < 1e-6
    assert apart(gradient, expected(case, rule.replace(mismatch=None), old_logp=old_BT)) > 1e-3
    assert metrics["actor/rpg/mismatch/kl"].aggregate() > 1e-6


@pytest.mark.parametrize(("options", "old"), [({}, "sampler"), ({"mismatch": "exact"}, "trainer")])
def test_where_nothing_is_clipped_both_weigh_by_the_policy_over_what_was_sampled_from(options, old):
    """−A·π/μ at each token, over the tokens of the batch."""
    case = Case("dapo", {"low": 0.999, "high": 1e6, **options}, old=old)
    config = run_config([*overrides_of(case), "algorithm.filter_groups.enable=False", FULLY_ASYNC])
    mask_BT = case.batch.mask_BT
    ratio_BT = (moved_logp(case) - rollout_logp(case)).exp() * mask_BT
    wanted = -case.batch.advantage.unsqueeze(-1) * ratio_BT / mask_BT.sum()
    assert apart(gradient_of(case, config)[0], wanted) < 1e-6
