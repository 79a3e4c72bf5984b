"""In verl's own functions, in this process: rollout correction, advantages, and what is refused when."""

import re
from functools import partial

import pytest
import torch

import rpg
from engine_verl.verl_engine import advantages_of, needs_verl, overrides_of, reference_logp, run_config, tensordict
from integrations.equivalence import Case
from rpg.integrations.verl import loss_fn

pytestmark = needs_verl

ACTOR = "actor_rollout_ref.actor"


def actor_of(config):
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def ppo_loss_of(case, config, **more):
    """verl's ppo_loss on log-probabilities of the case, as its engine packs them: the loss, and d loss / d logp."""
    from verl.workers.utils import losses

    rows = range(len(case.batch))
    data = tensordict(case, config, rows, 1)
    sizes(data, case, dp_size=1)
    lengths = case.batch.mask_BT.sum(-1).tolist()
    for name, x_BT in more.items():
        if x_BT is None:
            del data[name]
        else:
            rows_ = [row[:n] for row, n in zip(x_BT, lengths, strict=True)]
            data[name] = torch.nested.as_nested_tensor(rows_, layout=torch.jagged)
    logp_BT = (
        case.batch.old_logp_BT + 0.1 * torch.randn(case.batch.old_logp_BT.shape, generator=seeded())
    ).requires_grad_()
    packed = []
    for i, n in enumerate(lengths):
        prompt = len(case.prompts[int(case.batch.group_B[i])])
        packed.append(torch.cat([logp_BT.new_zeros(prompt - 1), logp_BT[i, :n], logp_BT.new_zeros(1)]))
    loss, metrics = losses.ppo_loss(actor_of(config), {"log_probs": torch.cat(packed)}, data)
    return loss, torch.autograd.grad(loss, logp_BT)[0], metrics


def sizes(data, case, dp_size):
    """What verl's engine notes in a batch."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, dp_size=dp_size, batch_num_tokens=int(case.batch.mask_BT.sum()))


def seeded():
    return torch.Generator().manual_seed(5)


WEIGHTS = 0.5 + torch.rand(16, 12, generator=torch.Generator().manual_seed(6))


def test_rollout_correction_weighs_as_verls_own_loss_does():
    case = Case("ppo")
    ours = run_config(overrides_of(case))
    theirs = run_config([*overrides_of(case), f"{ACTOR}.policy_loss.loss_mode=vanilla", f"{ACTOR}.clip_ratio_c=1e9"])
    for weights in (WEIGHTS, torch.ones(16, 12)):
        a, b = (ppo_loss_of(case, config, rollout_is_weights=weights) for config in (ours, theirs))
        torch.testing.assert_close(a[0], b[0])
        torch.testing.assert_close(a[1], b[1])


@pytest.mark.parametrize("name", ["gspo", "grpo", "dr-grpo", "rpg-reinforce-urkl"])
def test_rollout_correction_is_linear_in_its_weights(name):
    case = Case(name)
    config = run_config(overrides_of(case))
    per_response = WEIGHTS[:, :1].expand(16, 12)
    one, weighted, twice = (
        ppo_loss_of(case, config, rollout_is_weights=w)[1] for w in (torch.ones(16, 12), per_response, 2 * per_response)
    )
    torch.testing.assert_close(weighted, one * per_response)
    torch.testing.assert_close(twice, 2 * weighted)


def test_a_loss_per_response_refuses_weights_per_token():
    case = Case("gspo")
    with pytest.raises(ValueError, match=r"rollout_correction\.rollout_is=sequence"):
        ppo_loss_of(case, run_config(overrides_of(case)), rollout_is_weights=WEIGHTS)


ONE_OF_EACH = {rpg.algorithm(name).advantage: name for name in rpg.algorithms() if name != "capo"}


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_advantages_are_those_of_rpg(name):
    case = Case(name)
    found_BT = advantages_of(case, run_config(overrides_of(case)))
    own = case.batch.advantage
    own_BT = (own if own.dim() == 2 else own.unsqueeze(-1)) * case.batch.mask_BT
    torch.testing.assert_close(found_BT, own_BT.to(found_BT.dtype))


def test_empty_responses_are_in_no_group():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards, mask = torch.zeros(4, 3), torch.ones(4, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 1.0, 5.0])
    mask[3] = 0
    for name in ("rpg:group-mean-std", "rpg:batch-whitening", "rpg:leave-one-out"):
        fn = get_adv_estimator_fn(name)
        whole = fn(token_level_rewards=rewards, response_mask=mask, index=["a"] * 4)[0]
        alone = fn(token_level_rewards=rewards[:3], response_mask=mask[:3], index=["a"] * 3)[0]
        torch.testing.assert_close(whole[:3], alone)
        assert not whole[3].any()


def test_loss_fn_is_what_the_plugin_runs():
    case = Case("grpo")
    config = run_config(overrides_of(case))
    plain = run_config([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0", "algorithm.adv_estimator=grpo"])
    from verl.workers.utils import losses

    expected, run = ppo_loss_of(case, config), losses.ppo_loss
    try:
        losses.ppo_loss = partial(_swap, loss_fn("grpo"))
        config.actor_rollout_ref.actor = plain.actor_rollout_ref.actor
        found = ppo_loss_of(case, config)
    finally:
        losses.ppo_loss = run
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
    assert found[2]["actor/rpg/kl/ref"].aggregate() == expected[2]["actor/rpg/kl/ref"].aggregate()


def _swap(fn, config, model_output, data):
    return fn(config=config, model_output=model_output, data=data, dp_group=None)


@pytest.mark.parametrize(
    ("case", "more", "line"),
    [
        (Case("grpo"), [f"{ACTOR}.use_kl_loss=False"], f"set {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0"),
        (Case("grpo"), [f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef=0 keeps verl's from being added"),
        (Case("rpg-urkl"), [f"{ACTOR}.use_kl_loss=True"], "has a KL term of its own, anchored at the sampling policy"),
        (Case("rpg-urkl"), ["algorithm.use_kl_in_reward=True"], "set algorithm.use_kl_in_reward=False"),
        (Case("reinforce++"), ["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef=0.01"),
        (Case("dapo"), [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"], "policy_loss.rpg.reduction=seq-mean-token-sum"),
        (Case("dr-grpo"), [f"{ACTOR}.loss_scale_factor=null"], "loss_scale_factor to data.max_response_length"),
        (Case("dr-grpo", {"constant": 7.0}), [f"{ACTOR}.loss_scale_factor=8"], "differ: give one"),
        (Case("remax"), ["trainer.use_v1=True"], "set trainer.use_v1=False algorithm.adv_estimator=remax"),
        (
            Case("dapo", {"mismatch": "tis"}),
            ["actor_rollout_ref.rollout.calculate_log_probs=False"],
            "needs the sampler's log-probabilities",
        ),
        (Case("dapo", {"mismatch": "tis"}), ["+algorithm.rollout_correction.rollout_is=token"], "the same thing twice"),
        (Case("dapo", {"high": 0.3}), [f"{ACTOR}.policy_loss.loss_mode=vanilla"], "vanilla is no preset of rpg"),
    ],
)
def test_a_run_that_contradicts_its_preset_is_refused(case, more, line):
    with pytest.raises(Exception, match=re.escape(line)):  # hydra wraps what an option's check raises
        run_config([*overrides_of(case), *more])


@pytest.mark.parametrize(
    ("case", "missing", "line"),
    [
        (Case("grpo"), "ref_log_prob", "grpo needs ref_log_prob"),
        (Case("dapo", {"mismatch": "tis"}), "rollout_log_probs", "policy_loss.rpg.mismatch needs rollout_log_probs"),
    ],
)
def test_a_batch_without_what_the_loss_needs_is_refused(case, missing, line):
    config = run_config(overrides_of(case))
    config.actor_rollout_ref.actor.use_kl_loss = False  # verl's own loss would look for it first
    with pytest.raises(ValueError, match=line):
        ppo_loss_of(case, config, **{missing: None} if missing == "rollout_log_probs" else {})


def test_through_the_registry_alone_a_reference_is_missing_and_old_is_enough():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    case = Case("rpg-reinforce-urkl")
    actor = actor_of(run_config(overrides_of(case)))
    batch, shape = case.batch, case.batch.mask_BT.shape
    given = {
        "old_log_prob": batch.old_logp_BT,
        "log_prob": batch.old_logp_BT + 0.1,
        "advantages": batch.advantage.unsqueeze(-1).expand(shape),
        "response_mask": batch.mask_BT,
        "loss_agg_mode": "token-mean",
        "config": actor,
    }
    loss, metrics = get_policy_loss_fn("rpg-reinforce-urkl")(**given)
    expected = case.algorithm.loss(given["log_prob"], given["old_log_prob"], batch.advantage, batch.mask_BT)
    torch.testing.assert_close(loss, expected.loss)
    assert metrics["actor/rpg/kl/old"] == pytest.approx(float(expected.metrics["kl/old"]))
    with pytest.raises(ValueError, match="grpo needs ref_log_prob"):
        get_policy_loss_fn("rpg:grpo")(**given | {"config": actor_of(run_config(overrides_of(Case("grpo"))))})


def test_bounds_fitted_to_the_step_need_it_whole():
    case = Case("rpg-reinforce-urkl")
    config = run_config([*overrides_of(case)])
    fitted = rpg.algorithm("rpg-reinforce-urkl", clip=rpg.clip.Adaptive(target_kl=1e-3))
    data = tensordict(case, config, range(16), 1)
    sizes(data, case, dp_size=2)
    logp = torch.zeros(sum(len(x) for x in data["input_ids"].unbind()))
    with pytest.raises(ValueError, match="Adaptive fits its bounds to the whole optimiser step"):
        loss_fn(fitted)(actor_of(config), {"log_probs": logp}, data)
    sizes(data, case, dp_size=1)
    loss, metrics = loss_fn(fitted)(actor_of(config), {"log_probs": logp}, data)
    assert torch.isfinite(loss)
    assert "actor/rpg/clip/bound_high" in metrics


def test_reference_of_the_case_differs():
    """The oracle of the tests above would be blind if the reference were the sampling policy."""
    case = Case("grpo")
    assert float((reference_logp(case) - case.batch.old_logp_BT).abs().max()) > 0.01
