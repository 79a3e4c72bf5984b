"""Head and loss together, a block at a time: the gradients are those of the loss on the whole micro-batch."""

from dataclasses import replace

import pytest
import torch

import rpg
from rpg import PolicyLoss
from rpg.loss import mismatch
from rpg.models import blocks as blocks_module
from rpg.models import policy as policy_module
from rpg.models.blocks import Block, cut
from rpg.training import together
from rpg.training.update import Means
from training.test_update import make_data, make_policy, make_run


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Log-probabilities reach the loss as they are, in float64."""

    def in_rows(x_N, place_N, shape):
        return torch.zeros(shape.numel(), dtype=x_N.dtype).index_copy(0, place_N, x_N).view(shape)

    monkeypatch.setattr(policy_module, "in_rows", in_rows)
    monkeypatch.setattr(blocks_module, "in_rows", in_rows)


DTYPE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}  # of what it says


def off_policy(policy, seed=0):
    """Ratios on both sides of every clip, three different policies, responses of many lengths."""
    batch, g = make_data(policy, "grpo"), torch.Generator().manual_seed(seed)
    noise = (0.3 * torch.randn(4, *batch.old_logp_BT.shape, generator=g)) * batch.mask_BT
    old_BT = (batch.old_logp_BT + noise[0]).to(DTYPE[policy.model.dtype])
    return replace(
        batch,
        old_logp_BT=old_BT,
        ref_logp_BT=old_BT + noise[1],
        rollout_logp_BT=old_BT + noise[2] / 3,
        advantage=torch.randn(len(batch), generator=g),
    )


def gradients(algorithm, folder, blocks_of, tokens=40, model="llama-tied", batch=None, dtype=torch.float64, bonus=None):
    """Of an optimiser step, by parameter, and what _accumulate gives; ``blocks_of``: tokens of a block, None: apart."""
    policy = make_policy(model, dtype=dtype)
    run = make_run(policy, folder, algorithm, minibatches=1)
    run.together = blocks_of is not None
    if bonus is not None:
        run._bonus = lambda: bonus
    used = []
    if blocks_of is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "rows_at_once", lambda *_: blocks_of)
            learn = policy.learn
            policy.learn = lambda *args, **how: (used.append(how["blocks"]), learn(*args, **how))[1]
            out = run._accumulate(off_policy(policy) if batch is None else batch, Means(), tokens)
    else:
        out = run._accumulate(off_policy(policy) if batch is None else batch, Means(), tokens)
    sums = {name: run.optimizer.masters[p].grad for name, p in policy.parameters()}
    assert all(p.grad is None or run.optimizer.masters[p] is p for _, p in policy.parameters())
    return sums, out, used


def assert_same(one, other, near=1e-12):
    (a, (loss, logp_BT, entropy), used), (b, (other_loss, other_logp_BT, other_entropy), unused) = one, other
    assert used
    assert not unused
    assert loss == pytest.approx(other_loss, rel=max(near, 1e-6), abs=1e-9)
    assert entropy == pytest.approx(other_entropy, rel=1e-6)
    torch.testing.assert_close(logp_BT, other_logp_BT, rtol=1e-6, atol=1e-6)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= near * b[name].norm(), name
    assert any(x.norm() > 0 for x in a.values())


def with_loss(**choices):
    return replace(rpg.algorithm("grpo"), loss=PolicyLoss(**choices))


@pytest.mark.parametrize("name", sorted(set(rpg.algorithms())))
def test_every_method(name, tmp_path):
    algorithm = rpg.algorithm(name)
    policy = make_policy()
    if not together.goes_together(algorithm, policy, 1):
        assert algorithm.curvature_gate or algorithm.loss.control_variate
        return
    most = 20 if together.needs_whole_responses(algorithm.loss) else 7
    assert_same(gradients(algorithm, tmp_path, most), gradients(algorithm, tmp_path, None))


LEVELS = ("token", "sequence", "sequence-mean")
REDUCTIONS = {"token-mean": None, "seq-mean-token-mean": None, "seq-mean-token-sum": None, "constant": 9.0}
LOSSES = {
    **{
        f"{level}, {reduction}": {"level": level, "reduction": reduction, "constant": constant}
        for level in LEVELS
        for reduction, constant in REDUCTIONS.items()
    },
    "entropy": {"divergence": "none", "entropy_bonus": 0.1},
    "entropy of responses": {"divergence": "none", "entropy_bonus": 0.1, "level": "sequence-mean"},
    "to go": {"divergence": "rkl", "kl_to_go": True, "beta": 0.1},
    "differentiable": {"divergence": "ufkl", "estimator": "differentiable", "beta": 0.1},
    **{f"mismatch {name}": {"mismatch": rule} for name, rule in mismatch.BY_NAME.items()},
    "mismatch of responses": {"mismatch": mismatch.TIS(level="sequence")},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_every_kind_of_loss(name, model, tmp_path):
    algorithm = with_loss(**LOSSES[name])
    one = gradients(algorithm, tmp_path, 12, model=model)
    assert_same(one, gradients(algorithm, tmp_path, None, model=model))


def test_an_advantage_for_each_token_and_one_block_for_all(tmp_path):
    batch = off_policy(make_policy(dtype=torch.float64))
    batch = replace(batch, advantage=torch.randn(batch.mask_BT.shape, generator=torch.Generator().manual_seed(1)))
    for most in (5, 10**6):
        one, other = (gradients("dapo", tmp_path, m, batch=batch, tokens=10**6) for m in (most, None))
        assert_same(one, other)
        assert [len(blocks) for blocks in one[2]] == [-(-int(batch.mask_BT.sum()) // most)]


def test_an_entropy_bonus_that_is_zero_in_this_step(tmp_path):
    algorithm = with_loss(divergence="none", entropy_target=0.5, entropy_bonus=0.1)
    assert_same(*(gradients(algorithm, tmp_path, most, bonus=0.0) for most in (7, None)))


@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_half_types_add_into_the_float32_sums(model, tmp_path):
    exact_sums, _, _ = gradients("dapo", tmp_path, None, model=model)
    found, _, used = gradients("dapo", tmp_path, 7, model=model, dtype=torch.bfloat16)
    apart, _, _ = gradients("dapo", tmp_path, None, model=model, dtype=torch.bfloat16)
    assert used
    for name, total in found.items():
        assert total.dtype == torch.float32
        distance, usual = ((x.double() - exact_sums[name]).norm() for x in (total, apart[name]))
        assert distance <= 1.5 * usual + 0.01 * exact_sums[name].norm(), name


def test_recomputed_activations_and_a_head_that_is_not_trained(tmp_path):
    found = []
    for most in (7, None):
        policy = make_policy("llama", dtype=torch.float64)
        policy.model.lm_head.weight.requires_grad_(False)
        run = make_run(policy, tmp_path, "dapo", minibatches=1)
        run.oom_retry.recompute, run.together = True, most is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "rows_at_once", lambda *_, most=most: most)
            run._accumulate(off_policy(policy), Means(), 40)
        assert policy.model.lm_head.weight.grad is None
        found.append({name: p.grad for name, p in policy.parameters()})
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).norm() <= 1e-12 * gradient.norm(), name


def test_a_response_longer_than_a_block_goes_alone_where_it_must_be_whole(tmp_path):
    policy = make_policy()
    batch, head = off_policy(policy), policy.head()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "rows_at_once", lambda *_: int(batch.mask_BT.sum(-1).max()) - 1)
        assert together.blocks_of(batch, rpg.algorithm("gspo").loss, head) is None
        assert together.blocks_of(batch, rpg.algorithm("dapo").loss, head) is not None


def test_on_a_cpu_nothing_changes(tmp_path):
    run = make_run(make_policy(), tmp_path, "dapo")
    assert together.goes_together(run.method, run.policy, 1)
    assert not run.together
    assert not together.goes_together(run.method, run.policy, 2)


def test_a_whole_run_learns_the_same(tmp_path):
    after = []
    for most in (7, None):
        policy = make_policy()
        run = make_run(policy, tmp_path, "dapo", minibatches=2, lr=1e-3, warmup=0)
        run.together = most is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "rows_at_once", lambda *_, most=most: most)
            metrics = run.update(off_policy(policy), 1)
        after.append((torch.cat([p.detach().flatten() for p in policy.model.parameters()]), metrics))
    assert after[0][1].keys() == after[1][1].keys()
    assert after[0][1]["grad_norm"] == pytest.approx(after[1][1]["grad_norm"], rel=1e-4)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_of_responses_that_may_be_cut():
    assert cut([3, 0, 5, 2], 4, whole=False) == [
        Block(slice(0, 3), slice(0, 1)),
        Block(slice(3, 6), slice(2, 3)),
        Block(slice(6, 10), slice(2, 4)),
    ]


def test_blocks_of_whole_responses():
    assert cut([3, 0, 5, 2, 4], 7, whole=True) == [
        Block(slice(0, 3), slice(0, 1)),
        Block(slice(3, 10), slice(2, 4)),
        Block(slice(10, 14), slice(4, 5)),
    ]
    assert cut([3, 8, 2], 7, whole=True) is None
    assert cut([0, 0], 7, whole=True) is None
    assert cut([], 7, whole=False) is None


@pytest.mark.parametrize("whole", [False, True])
def test_every_token_is_in_one_block_and_in_its_rows(whole):
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 9, (6,), generator=g).tolist()
        blocks = cut(lengths, 9, whole)
        if blocks is None:
            assert not sum(lengths)
            continue
        rows = [row for row, n in enumerate(lengths) for _ in range(n)]
        assert [token for block in blocks for token in range(block.tokens.start, block.tokens.stop)] == [
            *range(len(rows))
        ]
        for block in blocks:
            assert 0 < block.tokens.stop - block.tokens.start <= 9
            assert set(rows[block.tokens]) <= {*range(block.rows.start, block.rows.stop)}
            if whole:
                assert len(rows[block.tokens]) == sum(lengths[block.rows])
