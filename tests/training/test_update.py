"""Optimiser steps: what is skipped, what is counted, which learning rate, and what the metrics mean."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rpg
import tiny
from rpg import clip, gates
from rpg.distributed.context import RunContext
from rpg.loss.clip import curvature_keep
from rpg.models.policy import Policy
from rpg.run.auto import settled
from rpg.run.config import Config, OptimConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.training import old_logp as old_logp_module
from rpg.training.batch import make_batch, micro_batches, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import learning_rate, make_optimizer
from rpg.training.reference import batch_logp
from rpg.training.update import Means, Updater


def make_policy(name="llama-tied", **how):
    return Policy(tiny.make(name, **how), tiny.tokenizer())


def make_run(policy, folder, algorithm="reinforce", steps=4, **optim):
    algorithm = rpg.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    sizes = RolloutConfig(prompts=3, samples=4)  # those of tiny.groups
    config = settled(Config(steps=steps, rollout=sizes, optim=OptimConfig(**{"schedule": "constant", **optim})))
    messages = []
    context = RunContext(warn=messages.append)
    optimizer = make_optimizer(policy.parameters(), config.optim)
    run = Updater(config, algorithm, policy, optimizer, RunFolder(folder), context=context)
    run.messages = messages
    return run


def make_data(policy, algorithm="reinforce", **how):
    batch = make_batch(tiny.groups(policy, **how), 0, policy.device)
    batch = with_logp(batch, None, None, needs_reference=True)
    return with_advantages(batch, rpg.algorithm(algorithm).advantage, [0.0] * 3)


def weights(policy):
    return torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])


# ---- not finite ------------------------------------------------------------------------------------------------------


def spoilt(batch, rows):
    old = batch.old_logp_BT.clone()
    old[rows, 0] = math.nan
    return replace(batch, old_logp_BT=old)


@pytest.mark.parametrize("estimator", ["dapo", "rpg-reinforce-urkl"])
def test_a_loss_that_is_not_finite_skips_its_step_and_keeps_its_batch(estimator, tmp_path):
    policy = make_policy()
    run = make_run(policy, tmp_path, estimator, minibatches=1, lr=1e-2, warmup=0)
    batch, before = spoilt(make_data(policy), [3]), weights(policy)
    metrics = run.update(batch, step=7)
    assert metrics["skipped"] == 1
    assert run.progress.bad_steps == 1
    assert torch.equal(weights(policy), before)
    assert not run.optimizer.optimizer.state
    assert all(p.grad is None for p in policy.model.parameters())
    assert all(math.isfinite(value) for value in metrics.values())
    assert "loss" not in metrics

    kept = load_file(tmp_path / "bad" / "step-000007-0.safetensors")
    assert sorted(map(tuple, kept["ids_BL"].tolist())) == sorted(map(tuple, batch.ids_BL.tolist()))
    assert int(kept["old_logp_BT"].isnan().sum()) == 1
    assert set(kept) >= {"mask_BT", "start_B", "advantage", "reward_B", "group_B"}
    about = json.loads((tmp_path / "bad" / "step-000007-0.json").read_text())
    assert about["step"] == 7
    assert about["loss"] == "nan"
    row = kept["ids_BL"][0]
    assert about["texts"][0] == tiny.text(row[row > 0].tolist())
    (message,) = run.messages
    assert message.startswith("step 7: loss nan")
    assert "\n" not in message


def test_bad_steps_are_counted_in_a_row(tmp_path):
    policy = make_policy()
    run = make_run(policy, tmp_path, minibatches=1, max_bad_steps=5)
    good = make_data(policy)
    bad = replace(good, advantage=torch.full_like(good.advantage, math.inf))
    seen = []
    for step, batch in enumerate([bad, bad, good, bad, good], start=1):
        run.update(batch, step)
        seen.append(run.progress.bad_steps)
    assert seen == [1, 2, 0, 1, 0]


def test_after_too_many_bad_steps_nothing_more_is_done(tmp_path):
    policy = make_policy()
    run = make_run(policy, tmp_path, minibatches=4, epochs=2, max_bad_steps=3)
    batch, before = make_data(policy), weights(policy)
    metrics = run.update(replace(batch, advantage=torch.full_like(batch.advantage, math.nan)), 1)
    assert metrics["skipped"] == run.progress.bad_steps == 3
    assert len(list((tmp_path / "bad").glob("*.safetensors"))) == 3
    assert torch.equal(weights(policy), before)


def test_one_bad_minibatch_does_not_stop_the_others(tmp_path):
    policy = make_policy()
    run, before = make_run(policy, tmp_path, "dapo", minibatches=12, lr=1e-3), weights(policy)
    steps, step = [], run.optimizer.step
    run.optimizer.step = lambda: (steps.append(1), step())
    metrics = run.update(spoilt(make_data(policy, "dapo"), [5]), 1)
    assert metrics["skipped"] == 1
    assert len(steps) == 11
    last_is_bad = len(list((tmp_path / "bad").glob("*-11.json"))) == 1
    assert run.progress.bad_steps == 0 or last_is_bad
    assert weights(policy).isfinite().all()
    assert not torch.equal(weights(policy), before)


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_the_learning_rate_follows_its_schedule_over_all_optimiser_steps(tmp_path):
    policy = make_policy()
    run = make_run(policy, tmp_path, steps=3, minibatches=2, epochs=2, warmup=3, schedule="linear", lr=1e-3)
    seen, step = [], run.optimizer.step
    run.optimizer.step = lambda: (seen.append({g["lr"] for g in run.optimizer.param_groups}), step())
    batch, last = make_data(policy), []
    for number in (1, 2, 3):
        last.append(run.update(batch, number)["lr"])
    expected = [learning_rate(run.config.optim, i, 12) for i in range(12)]
    assert [lr for (lr,) in seen] == expected
    assert expected[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert expected[-1] == pytest.approx(1e-4)
    assert last == [expected[3], expected[7], expected[11]]


def test_one_step_is_the_one_that_the_gradient_says(tmp_path):
    """AdamW's first step is lr·sign(gradient): down the loss."""
    policy = make_policy(dtype=torch.float64)
    run = make_run(policy, tmp_path, minibatches=1, lr=1e-4, warmup=0, max_grad_norm=math.inf)
    batch = make_data(policy)
    scored = policy.score(batch.ids_BL, batch.start_B, batch.mask_BT)
    loss = rpg.algorithm("reinforce").loss(scored.logp_BT, batch.old_logp_BT, batch.advantage, batch.mask_BT).loss
    grads = torch.autograd.grad(loss, list(policy.model.parameters()))
    before = weights(policy)
    metrics = run.update(batch, 1)
    gradient = torch.cat([g.flatten() for g in grads])
    moved, large = weights(policy) - before, gradient.abs() > 1e-4
    assert torch.allclose(moved[large], -1e-4 * gradient[large].sign(), rtol=1e-3)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_training_raises_what_was_rewarded(tmp_path):
    policy = make_policy()
    run = make_run(policy, tmp_path, "rpg-reinforce-urkl", minibatches=1, lr=3e-3, warmup=0)
    data = make_data(policy, noise=0.0)
    good = data.advantage > 0
    before = batch_logp(policy, data, 1000)
    for step in (1, 2, 3):
        run.update(data, step)
    gain = (batch_logp(policy, data, 1000) - before).sum(-1)
    assert gain[good].mean() > 0 > gain[~good].mean()


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_the_mismatch_is_the_engines_at_the_first_minibatch(tmp_path):
    policy = make_policy()
    data = make_data(policy, noise=0.0)
    own = batch_logp(policy, data, 1000)
    clean = make_run(policy, tmp_path, minibatches=3, lr=0.05, warmup=0).update(replace(data, old_logp_BT=own), 1)
    assert clean["mismatch/max_log_ratio"] < 1e-4  # later minibatches, after large steps, do not count
    assert abs(clean["mismatch/kl"]) < 1e-6
    assert clean["kl/old"] > 1e-3

    policy = make_policy()
    off = 0.01 * torch.ones_like(own)
    off[:, 0] = 0.3
    shifted = replace(data, old_logp_BT=(own - off) * data.mask_BT)
    found = make_run(policy, tmp_path, minibatches=1, lr=0.0).update(shifted, 1)
    log_rho = off[data.mask_BT]
    assert found["mismatch/max_log_ratio"] == pytest.approx(0.3, abs=1e-4)
    assert found["mismatch/kl"] == pytest.approx(float((log_rho.exp() - 1 - log_rho).mean()), rel=1e-2)


def test_the_mismatch_where_old_was_computed_anew(tmp_path):
    policy = make_policy()
    data = make_data(policy, noise=0.0)
    engine = data.old_logp_BT + 0.2 * data.mask_BT
    data = with_logp(replace(data, old_logp_BT=engine), batch_logp(policy, data, 1000), None, needs_reference=False)
    found = make_run(policy, tmp_path, minibatches=2, micro_tokens=30, lr=0.0).update(data, 1)
    assert found["mismatch/max_log_ratio"] == pytest.approx(0.2, abs=1e-4)
    assert found["mismatch/kl"] == pytest.approx(math.exp(-0.2) - 1 + 0.2, rel=1e-2)
    assert found["kl/old"] == pytest.approx(0, abs=1e-6)


def test_metrics_do_not_depend_on_the_micro_batches(tmp_path):
    """Means over tokens and maxima, not means of means."""
    policy = make_policy()
    data = make_data(policy)
    found = {}
    for tokens in (25, 10**6):
        run = make_run(policy, tmp_path, "rpg-reinforce-urkl", minibatches=1, micro_tokens=tokens, lr=0.0)
        found[tokens] = run.update(data, 1)
    assert len(list(micro_batches(data, 25))) == 3
    exact = (
        "entropy",
        "kl/old",
        "kl/old_forward",
        "clip/low",
        "clip/high",
        "ratio/max",
        "loss",
        "grad_norm",
        "bounded",
    )
    for name in exact:
        assert found[25][name] == pytest.approx(found[10**6][name], rel=1e-4, abs=1e-7), name
    scored = policy.score(data.ids_BL, data.start_B, data.mask_BT)
    assert found[25]["entropy"] == pytest.approx(float(scored.entropy_BT[data.mask_BT].mean()), rel=1e-4)
    assert found[25]["ratio/max"] == pytest.approx(
        float((scored.logp_BT - data.old_logp_BT)[data.mask_BT].detach().exp().max()), rel=1e-4
    )
    assert "tokens" not in found[25]


def test_means_weight_by_tokens_and_pass_over_what_is_not_finite():
    means = Means()
    for tokens, value in ((10.0, 1.0), (30.0, 2.0), (5.0, math.nan)):
        metrics = {"tokens": tokens, "ess": value, "ratio/max": value, "sequences": 2.0}
        means.add({name: torch.tensor(x) for name, x in metrics.items()})
    assert means.result() == {"ess": pytest.approx(1.75), "ratio/max": 2.0}


# ---- rules that look at more than one micro-batch, or at the optimiser ---------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_an_adaptive_clip_is_fitted_on_the_whole_minibatch(level, tmp_path):
    policy = make_policy()
    rule = clip.Adaptive(target_ess=0.97)
    algorithm = rpg.algorithm("rpg-reinforce-urkl", clip=rule, level=level, reduction="seq-mean-token-sum")
    data = make_data(policy)
    run = make_run(policy, tmp_path, algorithm, micro_tokens=25)
    micro = [(index, data.rows(index)) for index in micro_batches(data, 25)]
    fitted = run._fitted(data, micro)[0].clip.bounds()
    log_w = batch_logp(policy, data, 1000) - data.old_logp_BT
    if level == "token":
        whole = rule.fit(log_w, data.mask_BT)
    else:
        sums = (log_w * data.mask_BT).sum(-1)
        sums = sums if level == "sequence" else sums / data.mask_BT.sum(-1)
        whole = rule.fit(sums, torch.ones_like(sums))
    assert fitted == pytest.approx(whole.bounds(), rel=1e-4)
    assert len({rule.fit((batch_logp(policy, p, 99) - p.old_logp_BT), p.mask_BT).bounds() for _, p in micro}) > 1


@pytest.mark.parametrize("name", ["high-entropy", "kl-cov"])
def test_a_gate_compares_the_tokens_of_the_whole_minibatch(name, tmp_path):
    """Micro-batches of any size take the same optimiser step, which a choice within each would not."""
    steps = []
    share = {"high-entropy": gates.HighEntropy(0.3), "kl-cov": gates.KLCov(0.3)}[name]
    for tokens in (25, 1000):
        policy = make_policy(dtype=torch.float64)
        run = make_run(policy, tmp_path, rpg.algorithm(name, gate=share), minibatches=1, micro_tokens=tokens, lr=1e-3)
        metrics = run.update(make_data(policy, name), 1)
        steps.append(weights(policy))
        if name == "high-entropy":
            assert metrics["clip/gated"] == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(*steps, rtol=0, atol=1e-7)


@pytest.mark.parametrize("model", ["llama-tied", "gemma2-final-cap"])
def test_an_entropy_bonus_raises_the_entropy(model, tmp_path):
    policy = make_policy(model)
    data = make_data(policy)
    data = replace(data, advantage=torch.zeros_like(data.advantage))
    run = make_run(policy, tmp_path, rpg.algorithm("reinforce", entropy_bonus=0.5), minibatches=1, lr=1e-3, warmup=0)
    entropies = [run.update(data, step)["entropy"] for step in (1, 2, 3)]
    assert entropies[0] < entropies[1] < entropies[2]


def test_an_entropy_target_moves_the_bonus_and_rests_above_it(tmp_path):
    policy, seen = make_policy(), []
    data = make_data(policy, "skywork-or1")
    for target in (50.0, 1e-9):
        algorithm = rpg.algorithm("skywork-or1", entropy_target=target, entropy_step=0.1, entropy_bonus_limit=1.0)
        run = make_run(policy, tmp_path, algorithm, minibatches=1)
        run.progress.entropy_bonus, run.progress.entropy_low = 0.3, True
        seen += [run.update(data, step)["entropy_bonus"] for step in (1, 2)]
        assert run.progress.entropy_bonus == pytest.approx(0.5 if target > 1 else 0.1)
    assert seen == pytest.approx([0.4, 0.5, 0.0, 0.0])


def test_capo_gates_tokens_by_curvature_at_the_head(tmp_path):
    policy = make_policy("llama", dtype=torch.float64)
    run = make_run(policy, tmp_path, "capo", minibatches=1, lr=1e-3, warmup=0)
    data = make_data(policy, "capo")
    gates = []
    share = 1 / data.mask_BT.sum(-1) / len(data)  # GRPO's mean: over the tokens of a response, then over responses
    for step, lr in ((1, 0.05), (2, 3e-5)):  # plain at first, then with Adam's second moments
        scored = policy.score(data.ids_BL, data.start_B, data.mask_BT)
        run.optimizer.param_groups[0]["lr"] = lr
        rule = run.method.loss
        gates.append(run._keep(rule, data, scored, rule.step_denominator(data.mask_BT), run._curvature()))
        row, t = data.mask_BT.nonzero(as_tuple=True)
        head = policy.model.lm_head.weight
        state, scale = run.optimizer.state_of(head), None
        if state:
            scale = 1 / ((state["exp_avg_sq"] / (1 - 0.95 ** (step - 1))).sqrt() + 1e-8)
        expected = curvature_keep(
            scored.hidden_NH @ head.T,
            scored.hidden_NH,
            data.ids_BL[row, data.start_B[row] + t],
            (data.advantage * share)[row],
            lr,
            scale,
        )
        assert torch.equal(gates[-1][data.mask_BT], expected)
        assert 0.02 < expected.double().mean() < 0.98
        assert gates[-1][~data.mask_BT].all()
        assert run.update(data, step)["skipped"] == 0
    assert not torch.equal(*gates)


NEEDS_LINEAR = ("capo", "otb")


@pytest.mark.parametrize("name", NEEDS_LINEAR)
def test_a_head_that_is_not_linear_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"^{name} needs a model with a plain linear head[^\n]*$"):
        make_run(make_policy("phi-bias"), tmp_path, name)


@pytest.mark.parametrize(("model", "temperature"), [("llama-tied", 1.0), ("llama", 0.7), ("gemma3-window", 1.3)])
def test_the_squared_score_of_every_token(model, temperature, monkeypatch):
    """From the model's own logits, and in pieces of a few tokens."""
    policy = Policy(tiny.make(model), tiny.tokenizer(), temperature)
    batch = make_batch(tiny.groups(policy), 0, policy.device)
    monkeypatch.setattr(old_logp_module, "SQUARES_ELEMENTS", 3 * tiny.VOCABULARY)
    found_BT = old_logp_module.batch_score_sq(policy, batch, 60)
    for ids_L, start, length, row_T in zip(
        batch.ids_BL, batch.start_B.tolist(), batch.mask_BT.sum(-1).tolist(), found_BT, strict=True
    ):
        with torch.no_grad():
            logits_TV = policy.model(ids_L[None, : start + length]).logits[0, start - 1 : -1] / temperature
        want_T = rpg.logit_score_sq(logits_TV[None], ids_L[None, start : start + length])[0]
        torch.testing.assert_close(row_T[:length], want_T, rtol=1e-4, atol=1e-5)
        assert not row_T[length:].any()


@pytest.mark.parametrize("name", [name for name in rpg.algorithms() if name not in NEEDS_LINEAR])
def test_every_other_preset_trains_a_model_whose_head_is_not_linear(name, tmp_path):
    policy = make_policy("gemma2-final-cap")
    before = weights(policy)
    metrics = make_run(policy, tmp_path, name, lr=1e-3).update(make_data(policy, name), 1)
    assert metrics["skipped"] == 0
    assert not torch.equal(weights(policy), before)


# ---- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["capo", "rpg-reinforce-urkl"])
def test_bfloat16_follows_float32_where_its_own_steps_would_be_lost(name, tmp_path):
    """Learning rates of 1e-6, as for large models: masters go where the float32 run goes."""
    half, full = make_policy(dtype=torch.bfloat16), make_policy(dtype=torch.bfloat16)
    full.model.float()
    start, moved = weights(half), []
    for policy in (half, full):
        run = make_run(policy, tmp_path, name, steps=20, minibatches=1, lr=1e-6, warmup=0, micro_tokens=60)
        data = make_data(full, name)
        assert sum(run.update(data, step)["skipped"] for step in range(1, 21)) == 0
        moved.append(torch.cat([m.detach().flatten() for m in run.optimizer.masters.values()]) - start.float())
    assert float(moved[1].abs().median()) > 5e-6
    alike = torch.nn.functional.cosine_similarity(*moved, dim=0)
    assert float(alike) > 0.9  # gradients of bfloat16 differ in sign where they are next to nothing
    assert (weights(half) == start).float().mean() > 0.9  # and hardly any weight shows it yet


# ---- out of memory ---------------------------------------------------------------------------------------------------


class Small(Policy):
    """On a device with room for so many rows, in the forward pass or in the backward pass."""

    def __init__(self, limit, backward=False):
        super().__init__(tiny.make("llama-tied"), tiny.tokenizer())
        self.limit, self.backward, self.sizes = limit, backward, []

    def score(self, ids_BL, *others, **named):
        self.sizes.append(len(ids_BL))
        full = len(ids_BL) > self.limit
        if full and not self.backward:
            raise torch.OutOfMemoryError("no room")
        scored = super().score(ids_BL, *others, **named)
        if full and scored.logp_BT.requires_grad:
            scored.logp_BT.register_hook(no_room)
        return scored


def no_room(gradient):
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("backward", [False, True])
def test_out_of_memory_changes_the_size_and_nothing_else(backward, tmp_path):
    """Parts of 4, 5 and 3 rows: the first has left gradients behind when the second does not fit."""
    found = {}
    for case, limit, tokens in (("short", 4, 25), ("cut", 99, 12), ("whole", 99, 1000)):
        policy = Small(limit, backward)
        run = make_run(policy, tmp_path, "rpg-reinforce-urkl", minibatches=1, micro_tokens=tokens, lr=1e-3, warmup=0)
        data = make_data(make_policy())
        rows = [run.update(data, step) for step in (1, 2)]
        found[case] = weights(policy), rows, run
    (short, rows, run), (cut, cut_rows, _), (whole, whole_rows, _) = found.values()
    assert run.policy.sizes[:2] == [4, 5]
    assert run.oom_retry.tokens == 12
    assert run.messages == ["out of memory: micro-batches of 12 tokens from here on"]
    assert torch.equal(short, cut)
    assert rows == cut_rows
    assert torch.allclose(short, whole, atol=1e-5)
    for one, other in zip(rows, whole_rows, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert not torch.equal(short, weights(make_policy()))
    before = len(run.policy.sizes)
    run.update(data, 3)
    assert max(run.policy.sizes[before:]) <= 4  # it stays


def test_a_sequence_that_does_not_fit(tmp_path):
    policy = Small(0)
    run = make_run(policy, tmp_path, minibatches=1)
    before = weights(policy)
    with pytest.raises(torch.OutOfMemoryError):
        run.update(make_data(make_policy()), 1)
    assert torch.equal(weights(policy), before)
    assert "recomputed" in run.messages[-1]  # the last resort
    assert all(p.grad is None for p in policy.model.parameters())


def test_what_cannot_be_cut_is_not(tmp_path):
    policy, algorithm = Small(4), rpg.algorithm("rpg-reinforce-urkl", control_variate=True)
    run = make_run(policy, tmp_path, algorithm, minibatches=1)
    with pytest.raises(torch.OutOfMemoryError):
        run.update(make_data(make_policy()), 1)
    assert run.oom_retry.tokens == 1024


# ---- the overlong zone -----------------------------------------------------------------------------------------------


def test_an_overlong_zone_as_long_as_the_response_is_refused_at_the_start():
    from rpg.training.samples.collect import Collector

    config = Config(rollout=RolloutConfig(max_new_tokens=16, overlong_tokens=16))
    with pytest.raises(ValueError, match=r"^rollout.overlong_tokens must be below max_new_tokens, 16; got 16[^\n]*$"):
        Collector(config, rpg.algorithm("dapo").resolve(), None, None)
    Collector(config, rpg.algorithm("grpo").resolve(), None, None)  # has no such penalty
