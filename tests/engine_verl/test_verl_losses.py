"""In verl's own loss function, in this process: rollout correction, metrics, and what a batch must hold."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import rpg
from engine_verl.verl_engine import needs_verl, overrides_of, reference_logp, run_config, tensordict
from integrations.equivalence import Case
from rpg.integrations.verl import loss_fn, metrics, reference

pytestmark = needs_verl

ACTOR = "actor_rollout_ref.actor"


def actor_of(config):
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def moved_logp(case):
    old_BT = case.batch.old_logp_BT
    return old_BT + 0.1 * torch.randn(old_BT.shape, generator=torch.Generator().manual_seed(5))


def ppo_loss_of(case, config, tokens=None, **more):
    """verl's ppo_loss on log-probabilities of the case, as its engine packs them: the loss, and d loss / d logp."""
    from verl.workers.utils import losses

    rows = range(len(case.batch))
    data = tensordict(case, config, rows, 1)
    sizes(data, case, dp_size=1, tokens=tokens)
    lengths = case.batch.mask_BT.sum(-1).tolist()
    for name, x_BT in more.items():
        if x_BT is None:
            del data[name]
        else:
            rows_ = [row[:n] for row, n in zip(x_BT, lengths, strict=True)]
            data[name] = torch.nested.as_nested_tensor(rows_, layout=torch.jagged)
    logp_BT = moved_logp(case).requires_grad_()
    loss, metrics = losses.ppo_loss(actor_of(config), {"log_probs": packed_logp(case, logp_BT)}, data)
    return loss, torch.autograd.grad(loss, logp_BT)[0], metrics


def packed_logp(case, logp_BT):
    """Of all tokens of the rows one after the other, each at the token before it."""
    packed = []
    for i, n in enumerate(case.batch.mask_BT.sum(-1).tolist()):
        prompt = len(case.prompts[int(case.batch.group_B[i])])
        packed.append(torch.cat([logp_BT.new_zeros(prompt - 1), logp_BT[i, :n], logp_BT.new_zeros(1)]))
    return torch.cat(packed)


def sizes(data, case, dp_size, tokens=None):
    """What verl's engine notes in a batch."""
    from verl.utils import tensordict_utils as tu

    total = int(case.batch.mask_BT.sum()) if tokens is None else tokens
    tu.assign_non_tensor(data, dp_size=dp_size, batch_num_tokens=total)


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


def test_loss_fn_refuses_a_reference_that_nobody_would_renew():
    for update in ("every", "kl"):
        with pytest.raises(ValueError, match=rf"reference\.update={update}.*give frozen") as raised:
            loss_fn("grpo", reference={"update": update})
        assert "\n" not in str(raised.value)


def _swap(fn, config, model_output, data):
    return fn(config=config, model_output=model_output, data=data, dp_group=None)


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


def test_a_kl_in_the_reward_is_measured_where_it_renews_the_reference():
    plain, asked = Case("reinforce++"), Case("reinforce++", reference="kl")
    a, b = (ppo_loss_of(case, run_config(overrides_of(case))) for case in (plain, asked))
    torch.testing.assert_close(a[:2], b[:2], rtol=0, atol=0)
    assert "actor/rpg/kl/ref" not in a[2]
    assert b[2]["actor/rpg/kl/ref"].aggregate() > 0.01
    with pytest.raises(ValueError, match=r"needs ref_log_prob.*algorithm\.use_kl_in_reward=True"):
        ppo_loss_of(asked, run_config(overrides_of(asked)), ref_log_prob=None)


def test_metrics_are_means_over_what_was_not_rejected():
    case = Case("grpo")
    config, mask = run_config(overrides_of(case)), case.batch.mask_BT.long()
    mask[::2] = 0  # as verl's rollout correction leaves it; the tokens that verl divides by are still all of them
    whole, rejected = (ppo_loss_of(case, config, response_mask=m)[2] for m in (case.batch.mask_BT.long(), mask))
    found, all_of_it = ({name: [m.aggregate()] for name, m in x.items() if "rpg" in name} for x in (rejected, whole))
    share = float(mask.sum() / case.batch.mask_BT.sum())
    assert found[metrics.KEPT] == [pytest.approx(share)]
    metrics.over_kept(all_of_it)
    assert all_of_it[metrics.KEPT] == [pytest.approx(1)]
    assert all_of_it["actor/rpg/kl/ref"] == [pytest.approx(whole["actor/rpg/kl/ref"].aggregate())]
    metrics.over_kept(found)
    logp_BT = moved_logp(case)
    own = case.method.loss(logp_BT, case.batch.old_logp_BT, case.batch.advantage, mask, reference_logp(case)).metrics
    for name in ("kl/old", "kl/ref", "ratio/max", "ess", "entropy_sampled"):
        assert found[f"actor/rpg/{name}"] == [pytest.approx(float(own[name]), rel=1e-5)], name


def test_the_worker_divides_by_what_was_kept_before_the_reference_reads_it(monkeypatch):
    class Worker:
        def update_actor(self, data):
            return data

        save_checkpoint = load_checkpoint = update_actor

    monkeypatch.setitem(sys.modules, metrics.WORKERS, SimpleNamespace(ActorRolloutRefWorker=Worker))
    read = []
    monkeypatch.setattr(reference, "renewal_of", lambda worker: True)
    monkeypatch.setitem(
        reference.AFTER, "update_actor", lambda worker, renewal, out, *_: read.append(reference._measured(out))
    )
    overrides = overrides_of(Case("grpo", reference="kl"))
    for _ in range(2):
        actor_of(run_config(overrides))
    kls = {"actor/rpg/kl/ref": [0.02, 0.0, 0.03], metrics.KEPT: [0.5, 0.0, 0.5], "kl_loss": [1.0, 1.0, 1.0]}
    Worker().update_actor({"metrics": kls})
    assert read == [(pytest.approx(0.05), 3)]  # of the two mini-batches that had tokens left; three optimiser steps
    assert kls["kl_loss"] == [1.0, 1.0, 1.0]
    assert metrics.KEPT in kls


def test_a_step_of_filler_alone_has_no_loss():
    case = Case("dapo")
    nothing = torch.zeros_like(case.batch.mask_BT.long())
    loss, gradient, _ = ppo_loss_of(case, run_config(overrides_of(case)), response_mask=nothing, tokens=0)
    assert float(loss.detach()) == 0
    assert not gradient.any()


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
    expected = case.method.loss(given["log_prob"], given["old_log_prob"], batch.advantage, batch.mask_BT)
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
