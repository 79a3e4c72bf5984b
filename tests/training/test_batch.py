"""Batches: every row once, within the budget; and a gradient that does not depend on how a batch is cut."""

import itertools
from dataclasses import replace

import pytest
import torch

import rpg
import tiny
from rpg import clip
from rpg.models.policy import Policy
from rpg.run.auto import settled
from rpg.run.config import Config, OptimConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.training.batch import Batch, make_batch, micro_batches, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.reference import batch_logp
from rpg.training.update import Means, Updater

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    return Policy(tiny.make("llama-tied", dtype=torch.float64), tiny.tokenizer())


@pytest.fixture(scope="module")
def groups(policy):
    return tiny.groups(policy)


@pytest.fixture(scope="module")
def batch(groups):
    return make_batch(groups, 0, CPU)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_batch_holds_what_the_groups_hold(groups, batch):
    row = 0
    for g, group in enumerate(groups):
        for response in group.responses:
            tokens, n, t = response.rollout.tokens, len(group.prompt_ids), len(response.rollout.tokens)
            assert batch.ids_BL[row].tolist()[: n + t] == group.prompt_ids + tokens
            assert not batch.ids_BL[row, n + t :].any()
            assert (int(batch.start_B[row]), int(batch.group_B[row]), int(batch.lengths_B[row])) == (n, g, n + t)
            assert batch.mask_BT[row].tolist() == [True] * t + [False] * (batch.mask_BT.shape[1] - t)
            assert batch.old_logp_BT[row, :t].tolist() == pytest.approx(response.rollout.logp)
            assert float(batch.reward_B[row]) == pytest.approx(response.reward)
            row += 1
    assert row == len(batch) == 12


def test_rewards_carry_the_overlong_penalty(groups):
    first = groups[0].responses[0]
    changed = replace(groups[0], responses=[replace(first, penalty=-0.25)])
    assert make_batch([changed], 0, CPU).reward_B.tolist() == [first.score - 0.25]


def test_rows_keep_every_token_and_drop_needless_padding(batch):
    whole = with_logp(batch, None, batch.old_logp_BT * 2, needs_reference=True)
    whole = with_advantages(whole, rpg.algorithm("reinforce++").advantage, None)  # one number a token
    index = torch.tensor([7, 2, 10])
    part = whole.rows(index)
    assert part.ids_BL.shape[1] == int(batch.lengths_B[index].max())
    assert part.mask_BT.shape[1] == int(batch.mask_BT[index].sum(-1).max())
    for new, old in enumerate(index.tolist()):
        n, t = int(whole.lengths_B[old]), int(whole.mask_BT[old].sum())
        assert torch.equal(part.ids_BL[new, :n], whole.ids_BL[old, :n])
        for name in ("mask_BT", "old_logp_BT", "ref_logp_BT", "advantage"):
            assert torch.equal(getattr(part, name)[new, :t], getattr(whole, name)[old, :t])
            assert not getattr(part, name)[new, t:].any()
        for name in ("start_B", "reward_B", "group_B"):
            assert getattr(part, name)[new] == getattr(whole, name)[old]
    assert part.rollout_logp_BT is None


def test_rows_have_their_own_kept_sets(policy):
    made = tiny.groups(policy, kept=True)
    whole, rollouts = make_batch(made, 0, CPU), [r.rollout for group in made for r in group.responses]
    for index in ([7, 2, 10], [0], list(range(12))[::-1]):
        part = whole.rows(torch.tensor(index)).rows(torch.arange(len(index)))  # of a minibatch a micro-batch
        assert part.kept.ids_K.tolist() == [i for row in index for i in rollouts[row].kept.ids.tolist()]
        assert part.kept.count_N.tolist() == [n for row in index for n in rollouts[row].kept.counts.tolist()]
        assert torch.equal(part.kept_count_BT > 0, part.mask_BT)
    assert whole.kept_metrics()["kept/mean"] == pytest.approx(float(whole.kept.count_N.float().mean()))
    assert make_batch(tiny.groups(policy), 0, CPU).rows(torch.tensor([1, 4])).kept is None


def test_old_log_probabilities_and_the_reference_are_over_the_kept_sets(policy):
    """Recomputed, the sampler's own come out again."""
    sampled = make_batch(tiny.groups(policy, kept=True, noise=0.0), 0, CPU)
    for tokens in (20, 10**6):
        torch.testing.assert_close(batch_logp(policy, sampled, tokens), sampled.old_logp_BT, rtol=0, atol=1e-5)
    whole = batch_logp(policy, replace(sampled, kept_ids_K=None), 20)
    assert float((whole - sampled.old_logp_BT).abs().max()) > 0.1


def test_the_curvature_gate_is_over_the_kept_sets(policy, batch, tmp_path):
    """Where nothing else could be drawn a token moves nothing, and no gate closes."""
    algorithm = rpg.algorithm("capo")
    whole = with_advantages(with_logp(batch, None, None, True), algorithm.advantage, None)
    alone = replace(whole, kept_count_BT=whole.mask_BT.int(), kept_ids_K=tokens_of(whole).int())
    for part, shut in ((whole, True), (alone, False)):
        scored = policy.score(part.ids_BL, part.start_B, part.mask_BT, kept=part.kept)
        keep_BT = updater(policy, algorithm, tmp_path, lr=0.1)._keep(algorithm.loss, part, scored, 1.0, None)
        assert bool((~keep_BT[part.mask_BT]).any()) == shut


def tokens_of(batch):
    row_N, t_N = batch.mask_BT.nonzero(as_tuple=True)
    return batch.ids_BL[row_N, batch.start_B[row_N] + t_N]


def packed_tokens(batch, rows):
    """Of these rows end to end: a group's prompt once, and of each response all but the last token."""
    prompts = {int(batch.group_B[i]): int(batch.start_B[i]) for i in rows}
    return sum(prompts.values()) + sum(int(batch.mask_BT[i].sum()) - 1 for i in rows)


@pytest.mark.parametrize("tokens", [1, 15, 16, 30, 47, 100, 10**6])
def test_micro_batches_hold_every_row_once_within_the_budget(batch, policy, tokens):
    parts = list(micro_batches(batch, tokens))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    for index in parts:
        size, part = packed_tokens(batch, index.tolist()), batch.rows(index)
        assert size <= tokens or len(index) == 1
        seen = []
        hook = policy.model.model.norm.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.shape[:2]))
        policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B)
        hook.remove()
        assert seen == [(1, size)]
    for part, following in itertools.pairwise(parts):  # not smaller than they have to be
        assert packed_tokens(batch, [*part.tolist(), int(following[0])]) > tokens
    assert len(parts) == {1: 12, 10**6: 1}.get(tokens, len(parts))
    groups = [g for g, _ in itertools.groupby(batch.group_B[torch.cat(parts)].tolist())]
    assert len(groups) == 3  # each group is in one piece
    longest = [int(batch.lengths_B[batch.group_B == g].max()) for g in groups]
    assert longest == sorted(longest)


@pytest.mark.parametrize("tokens", [1, 15, 16, 30, 47, 100, 10**6])
def test_where_the_policy_pads_padding_and_every_prompt_count(batch, tokens):
    parts = list(micro_batches(batch, tokens, packs=False))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
    sizes = [len(index) * (batch.rows(index).ids_BL.shape[1] - 1) for index in parts]
    assert all(size <= tokens or len(index) == 1 for size, index in zip(sizes, parts, strict=True))
    for part, following in itertools.pairwise(parts):  # not smaller than they have to be
        assert (len(part) + 1) * (int(batch.lengths_B[following[0]]) - 1) > tokens
    lengths = batch.lengths_B[torch.cat(parts)].tolist()
    assert lengths == sorted(lengths)


def test_a_policy_that_pads_is_given_no_more_than_asked_for(tmp_path, monkeypatch):
    policy = Policy(tiny.make(config="Gemma2Config", head_dim=8, sliding_window=4), tiny.tokenizer())
    assert not policy.packs
    seen, score = [], policy.score
    monkeypatch.setattr(policy, "score", lambda ids, *rest, **named: (seen.append(ids), score(ids, *rest, **named))[1])
    batch = with_advantages(make_batch(tiny.groups(policy), 0, CPU), rpg.algorithm("reinforce").advantage, None)
    seen.clear()
    batch_logp(policy, batch, 30)
    updater(policy, rpg.algorithm("reinforce"), tmp_path)._accumulate(batch, Means(), 30)
    assert len(seen) == 8
    assert all(len(ids) * (ids.shape[1] - 1) <= 30 for ids in seen)


def test_the_device_is_not_waited_for_between_two_passes(policy, batch, tmp_path, monkeypatch):
    """What is laid out there is read off the device before the first pass."""
    order, pack, score = [], policy.pack, policy.score
    monkeypatch.setattr(policy, "pack", lambda *how: (order.append("pack"), pack(*how))[1])
    monkeypatch.setattr(policy, "score", lambda *a, **how: (order.append("score"), score(*a, **how))[1])
    layout = Batch.layout
    monkeypatch.setattr(Batch, "layout", lambda self: (order.append("read"), layout(self))[1])
    data = with_advantages(batch, rpg.algorithm("reinforce").advantage, None)
    batch_logp(policy, data, 20)
    expected = ["read"] * 4 + ["pack", "score"] * 4
    assert order == expected
    updater(policy, rpg.algorithm("reinforce"), tmp_path)._accumulate(data, Means(), 20)
    policy.model.zero_grad(set_to_none=True)
    assert order[len(expected) :] == expected


def test_log_probabilities_do_not_depend_on_the_cut(policy, batch):
    whole, small = batch_logp(policy, batch, 10**6), batch_logp(policy, batch, 20)
    assert torch.allclose(whole, small, atol=1e-6)
    assert not small[~batch.mask_BT].any()
    assert 0.05 < float((whole - batch.old_logp_BT).abs().max()) < 2  # old has noise on it


# ---- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_are_by_group(groups, batch):
    means = [sum(r.reward for r in group.responses) / len(group.responses) for group in groups]
    expected = [r.reward - mean for group, mean in zip(groups, means, strict=True) for r in group.responses]
    found = with_advantages(batch, rpg.algorithm("rpg-urkl").advantage, None).advantage
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_greedy_baseline_is_that_of_the_own_group(groups, batch):
    found = with_advantages(batch, rpg.algorithm("remax").advantage, [0.1, 0.2, 0.3]).advantage
    expected = [r.reward - 0.1 * (g + 1) for g, group in enumerate(groups) for r in group.responses]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_with_logp_knows_the_other_policies(batch):
    recomputed, ref = batch.old_logp_BT + 1, batch.old_logp_BT + 2
    plain = with_logp(batch, None, None, needs_reference=False)
    assert plain.ref_logp_BT is None
    assert plain.rollout_logp_BT is None
    both = with_logp(batch, recomputed, ref, needs_reference=True)
    assert both.old_logp_BT is recomputed
    assert both.rollout_logp_BT is batch.old_logp_BT
    assert both.ref_logp_BT is ref
    # the reference is the sampling policy
    assert with_logp(batch, recomputed, None, needs_reference=True).ref_logp_BT is recomputed
    assert with_logp(batch, None, None, needs_reference=True).ref_logp_BT is batch.old_logp_BT


# ---- the gradient ----------------------------------------------------------------------------------------------------

ADAPTIVE = {
    "adaptive": {"clip": clip.Adaptive(target_ess=0.98)},
    "adaptive-sequence": {
        "clip": clip.Adaptive(target_ess=0.9),
        "level": "sequence",
        "reduction": "seq-mean-token-sum",
    },
}


def chosen(name):
    if name in ADAPTIVE:
        return rpg.algorithm("rpg-reinforce-urkl", **ADAPTIVE[name])
    return rpg.algorithm(name)


def updater(policy, algorithm, tmp_path, **optim):
    sizes = RolloutConfig(prompts=3, samples=4)  # those of tiny.groups
    config = settled(Config(algorithm=algorithm.name, rollout=sizes, optim=OptimConfig(**optim)))
    return Updater(config, algorithm, policy, make_optimizer(policy.parameters(), config.optim), RunFolder(tmp_path))


def gradient(policy):
    found = torch.cat([p.grad.flatten() for _, p in policy.parameters()])
    policy.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, False) for name in (*rpg.algorithms(), *ADAPTIVE)), ("dapo", True), ("capo", True), ("adaptive", True)],
)
def test_the_gradient_of_micro_batches_is_that_of_one_batch(name, kept, policy, batch, tmp_path):
    algorithm = chosen(name)
    if kept:
        batch = make_batch(tiny.groups(policy, kept=True), 0, CPU)
    ref = batch.old_logp_BT + 0.2 * torch.randn(batch.mask_BT.shape, generator=torch.Generator().manual_seed(1))
    whole = with_logp(batch, None, ref, needs_reference=True)
    score_sq = whole.old_logp_BT.exp().square() if algorithm.advantage.kind == "optimal-token" else None
    whole = with_advantages(whole, algorithm.advantage, [0.1, 0.2, 0.3], score_sq)
    cut = updater(policy, algorithm, tmp_path, lr=0.1)  # CAPO's gate depends on the rate
    assert len(list(micro_batches(whole, 20))) == 4
    loss, _, _ = cut._accumulate(whole, Means(), 2**62 if algorithm.loss.control_variate else 20)
    found = gradient(policy)

    scored = policy.score(whole.ids_BL, whole.start_B, whole.mask_BT, kept=whole.kept)
    denominator = algorithm.loss.step_denominator(whole.mask_BT)
    keep = cut._keep(algorithm.loss, whole, scored, denominator, None) if algorithm.curvature_gate else None
    if keep is not None:
        assert 0 < keep[whole.mask_BT].float().mean() < 1  # a gate that does something
    given = {"ref_logp": whole.ref_logp_BT, "keep": keep, "entropy": scored.entropy_BT}
    out = algorithm.loss(scored.logp_BT, whole.old_logp_BT, whole.advantage, whole.mask_BT, **given)
    out.loss.backward()
    expected = gradient(policy)
    assert float(expected.norm()) > 1e-4
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
    assert loss == pytest.approx(float(out.loss.detach()), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (5, 3)])
def test_every_row_is_used_once_an_epoch(minibatches, epochs, policy, batch, tmp_path, monkeypatch):
    run = updater(policy, rpg.algorithm("reinforce"), tmp_path, minibatches=minibatches, epochs=epochs, lr=0.0)
    seen, compared = [], []
    monkeypatch.setattr(run, "_accumulate", lambda part, *_: (seen.append(part), (0.0, part.old_logp_BT, 0.0))[1])
    monkeypatch.setattr("rpg.training.update.engine_mismatch", lambda part, *_: (compared.append(part), {})[1])
    run.update(with_advantages(batch, rpg.algorithm("reinforce").advantage, None), step=1)
    assert len(seen) == minibatches * epochs
    assert compared == seen[:1]  # before the first optimiser step
    epochs_rows = []
    for epoch in range(epochs):
        parts = seen[epoch * minibatches : (epoch + 1) * minibatches]
        if minibatches <= 3:  # of the three groups of 4, 3 and 5 none is cut
            assert sorted(g for part in parts for g in part.group_B.unique().tolist()) == [0, 1, 2]
        else:
            assert {len(part) for part in parts} <= {12 // minibatches, 12 // minibatches + 1}
        rows = [tuple(ids[:n].tolist()) for part in parts for ids, n in zip(part.ids_BL, part.lengths_B, strict=True)]
        assert sorted(rows) == sorted(tuple(i[:n].tolist()) for i, n in zip(batch.ids_BL, batch.lengths_B, strict=True))
        epochs_rows.append(rows)
    assert len({tuple(rows) for rows in epochs_rows}) == epochs  # each in an order of its own


def test_the_order_is_decided_by_seed_and_step(policy, batch, tmp_path, monkeypatch):
    batch = with_advantages(batch, rpg.algorithm("reinforce").advantage, None)
    orders = []
    for step in (1, 1, 2):
        run = updater(policy, rpg.algorithm("reinforce"), tmp_path, lr=0.0)
        seen = []
        monkeypatch.setattr(run, "_accumulate", lambda part, *_: (seen.append(part), (0.0, part.old_logp_BT, 0.0))[1])
        run.update(batch, step)
        orders.append([ids.tolist() for part in seen for ids in part.ids_BL])
    assert orders[0] == orders[1] != orders[2]
