"""Tokens chosen by comparing all of an optimiser step; bounded tokens in a sequence; the entropy's bonus."""

import math

import pytest
import torch

import rpg
from rpg import PolicyLoss, clip, gates


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss, logp, *args, **kwargs):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss.sum(), logp)[0]


def batch(rows=8, columns=25, seed=0):
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, columns, generator=g, dtype=torch.float64) - 0.01
    old = logp - 0.3 * torch.randn(rows, columns, generator=g, dtype=torch.float64)
    a = 2 * torch.randn(rows, generator=g, dtype=torch.float64)
    mask = torch.arange(columns) < torch.randint(5, columns + 1, (rows, 1), generator=g)
    entropy = torch.rand(rows, columns, generator=g, dtype=torch.float64) * torch.arange(1, rows + 1)[:, None]
    return logp, old, a, mask, entropy


def covariances(logp, a, mask):
    """(A − mean A)(log π − mean log π) of each token under the mask, by its place."""
    places = mask.nonzero().tolist()
    mean_a = sum(float(a[i]) for i, _ in places) / len(places)
    mean_logp = sum(float(logp[i, t]) for i, t in places) / len(places)
    return {(i, t): (float(a[i]) - mean_a) * (float(logp[i, t]) - mean_logp) for i, t in places}


def test_high_entropy_keeps_the_share_with_the_highest():
    logp, old, a, mask, entropy = batch()
    entropy[~mask] = 99.0
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(), reduction="none", gate=gates.HighEntropy(0.3))
    chosen = loss.choose(logp, old, a, mask, entropy)
    number = int(0.3 * int(mask.sum()))
    assert int(chosen.sum()) == number
    assert not chosen[~mask].any()
    assert entropy[chosen].min() > entropy[mask & ~chosen].max()
    free = gradient(loss.replace(gate=None), logp, old, a, mask)
    for given in ({}, {"chosen": chosen}):
        got = gradient(loss, logp, old, a, mask, entropy=entropy, **given)
        torch.testing.assert_close(got, free * chosen)
    both = gradient(loss, logp, old, a, mask, entropy=entropy, keep=(torch.arange(25) % 2 > 0).expand_as(mask))
    torch.testing.assert_close(both, free * chosen * (torch.arange(25) % 2 > 0))
    with pytest.raises(ValueError, match="entropy is needed"):
        loss(logp, old, a, mask)
    one = gates.HighEntropy(1e-9)
    assert int(loss.replace(gate=one).choose(logp, old, a, mask, entropy).sum()) == 1


def test_clip_cov_cuts_a_random_few_of_the_right_ones():
    logp, old, a, mask, _ = batch()
    rule = gates.ClipCov(share=0.05, cov_low=0.2, cov_high=1.5)
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(), reduction="none", gate=rule)
    chosen = loss.choose(logp, old, a, mask)
    w, number = (logp - old).exp(), int(0.05 * int(mask.sum()))
    cut = [place for place in mask.nonzero().tolist() if not chosen[tuple(place)]]
    assert len(cut) == number
    inside = torch.where(a[:, None] >= 0, w < 1.2, w > 0.8)
    known = covariances(logp, a, mask)
    candidates = {p for p, value in known.items() if 0.2 < value < 1.5 and inside[p]}
    assert {tuple(p) for p in cut} <= candidates
    assert len(candidates) > 2 * number
    assert torch.equal(chosen, loss.choose(logp, old, a, mask))  # the same batch, the same draw
    drawn = [batch(seed=s) for s in range(5)]
    cuts = {tuple(map(tuple, (~loss.choose(*x[:4])).nonzero().tolist())) for x in drawn}
    assert len(cuts) == 5
    wide = loss.replace(gate=gates.ClipCov(share=1.0, cov_low=0.2, cov_high=1.5))
    assert {tuple(p) for p in (~wide.choose(logp, old, a, mask)).nonzero().tolist()} == candidates
    torch.testing.assert_close(
        gradient(loss, logp, old, a, mask), gradient(loss.replace(gate=None), logp, old, a, mask) * chosen
    )


def test_kl_cov_penalises_the_largest():
    logp, old, a, mask, _ = batch()
    loss = PolicyLoss("abs", 0.7, "differentiable", None, reduction="none", gate=gates.KLCov(0.1))
    known = sorted(covariances(logp, a, mask).items(), key=lambda x: -x[1])
    expected = torch.zeros_like(mask)
    for place, _ in known[: int(0.1 * int(mask.sum()))]:
        expected[place] = True
    assert torch.equal(loss.choose(logp, old, a, mask), expected)
    w = (logp - old).exp()
    want = (-a[:, None] * w + 0.7 * expected * (logp - old).sign()) * mask
    for estimator in ("differentiable", "reinforce"):
        got = gradient(loss.replace(estimator=estimator), logp, old, a, mask)
        torch.testing.assert_close(got, want)
    share = float(loss(logp, old, a, mask).metrics["kl/gradient_share"])
    kl = 0.7 * int(expected.sum())
    assert share == pytest.approx(kl / (kl + float((a[:, None] * w * mask).abs().sum())), rel=1e-5)


def test_a_choice_over_the_step_is_not_one_over_its_parts():
    """The reason for ``chosen``: micro-batches of one step, gradients added, are the step itself."""
    logp, old, a, mask, entropy = batch()
    loss = rpg.algorithm("high-entropy").loss
    total = loss.step_denominator(mask)
    whole = gradient(loss, logp, old, a, mask, entropy=entropy)
    chosen = loss.choose(logp, old, a, mask, entropy)
    parts = [slice(0, 3), slice(3, 8)]
    pieces = [gradient(loss, logp[i], old[i], a[i], mask[i], denominator=total, chosen=chosen[i]) for i in parts]
    torch.testing.assert_close(torch.cat(pieces), whole)
    alone = [gradient(loss, logp[i], old[i], a[i], mask[i], denominator=total, entropy=entropy[i]) for i in parts]
    assert not torch.allclose(torch.cat(alone), whole)


@pytest.mark.parametrize("gate", [gates.HighEntropy, gates.ClipCov, gates.KLCov])
def test_shares_are_shares(gate):
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            gate(share=share)
    published = gates.HighEntropy(0.2), gates.ClipCov(2e-4, 1.0, 5.0), gates.KLCov(2e-4)
    assert published == (gates.HighEntropy(), gates.ClipCov(), gates.KLCov())
    with pytest.raises(ValueError, match="cov_low < cov_high"):
        gates.ClipCov(cov_low=2.0, cov_high=1.0)
    with pytest.raises(TypeError, match="gate"):
        PolicyLoss(gate="entropy")


# ---- tokens bounded before they are joined; responses that count by their length -------------------------------------


def test_token_clip_bounds_each_token():
    """GMPO by hand: A > 0 bounds from above, A < 0 from below; a bounded token is a constant in the mean."""
    log_w, a = f64([0.9, -0.9, 0.1], [0.9, -0.9, 0.1]), f64(1.0, -1.0)
    logp, mask = f64([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]), torch.ones(2, 3)
    rule = clip.Box(low=0.5, high=1.0)
    loss = PolicyLoss("none", 0, "differentiable", None, "sequence-mean", "none", token_clip=rule)
    got = gradient(loss, logp, logp - log_w, a, mask)
    positive = math.exp((math.log(2.0) - 0.9 + 0.1) / 3)
    negative = math.exp((0.9 + math.log(0.5) + 0.1) / 3)
    torch.testing.assert_close(got, f64([0.0, -positive / 3, -positive / 3], [negative / 3, 0.0, negative / 3]))
    metrics = loss(logp, logp - log_w, a, mask).metrics
    assert float(metrics["ratio/max"]) == pytest.approx(max(positive, negative))
    assert (float(metrics["clip/low"]), float(metrics["clip/high"])) == pytest.approx((1 / 6, 1 / 6))
    assert (float(metrics["clip/bound_low"]), float(metrics["clip/bound_high"])) == (0.5, 2.0)


def test_length_weighted_counts_a_response_once_a_token():
    logp, old, a, mask, _ = batch()
    plain = rpg.algorithm("gspo").loss
    weighted = plain.replace(length_weighted=True)
    length = mask.sum(-1, keepdim=True)
    torch.testing.assert_close(
        gradient(weighted, logp, old, a, mask), gradient(plain, logp, old, a, mask) * length, rtol=1e-9, atol=0
    )


# ---- entropy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "reduction"), [("token", "token-mean"), ("sequence", "seq-mean-token-sum")])
def test_the_bonus_ascends_the_entropy(level, reduction):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    logp_V = logits.log_softmax(-1)
    entropy, logp = -(logp_V.exp() * logp_V).sum(-1), logp_V[..., 0]
    loss = PolicyLoss("none", 0, level=level, reduction=reduction, entropy_bonus=0.3)
    assert loss.has_bonus
    assert not loss.replace(entropy_bonus=0.0).has_bonus
    args = (logp, logp.detach() - 0.1, torch.zeros(3, dtype=torch.float64), mask)
    (got,) = torch.autograd.grad(loss(*args, entropy=entropy).loss, logits, retain_graph=True)
    value = -0.3 * (entropy * mask).sum() / loss.count(mask)
    (want,) = torch.autograd.grad(value, logits, retain_graph=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(loss(*args, entropy=entropy).loss, value.detach(), check_dtype=False)
    for given in ({}, {"entropy": entropy.detach()}):
        with pytest.raises(ValueError, match="with its gradient"):
            loss(*args, **given)


def test_the_bonus_follows_its_target():
    loss = rpg.algorithm("skywork-or1").loss
    assert (loss.entropy_bonus, loss.entropy_target, loss.entropy_step) == (0.0, 0.2, 1e-4)
    assert loss.has_bonus
    assert loss.next_bonus(0.0, 0.1) == 1e-4
    assert loss.next_bonus(0.003, 0.2) == pytest.approx(0.0031)
    assert loss.next_bonus(0.003, 0.21) == pytest.approx(0.0029)
    assert (loss.next_bonus(5e-5, 0.3), loss.next_bonus(0.00499, 0.1)) == (0.0, 0.005)
    assert PolicyLoss(entropy_target=1.0).next_bonus(0.99999, 0.0) == 1.0
    assert PolicyLoss(entropy_target=1.0).next_bonus(0.5, 0.0) == pytest.approx(0.5001)
    assert PolicyLoss(entropy_bonus=0.1).next_bonus(0.1, 0.0) == 0.1
