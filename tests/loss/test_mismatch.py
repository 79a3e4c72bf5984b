"""Corrections for a sampler that is not numerically the trainer: the right weight on every preset's whole loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rpg
from rpg import PolicyLoss, clip
from rpg.loss.mismatch import MIS, TIS, IcePop, Mismatch, SequenceMask

RULES = {
    "exact": Mismatch(),
    "exact-sequence": Mismatch(level="sequence"),
    "tis": TIS(),
    "tis-sequence": TIS(level="sequence", cap=1.5),
    "icepop": IcePop(),
    "icepop-sequence": IcePop(level="sequence", low=0.8, high=1.3),
    "mis": MIS(),
    "opsm": SequenceMask(),
}


def by_hand(name, log_rho, drift, advantage):
    """The weight of each token of one response, from ρ = old/rollout and log(rollout) − log π of its tokens."""
    rho = [math.exp(x) for x in log_rho]
    product = [math.exp(sum(log_rho))] * len(rho)
    return {
        "exact": rho,
        "exact-sequence": product,
        "tis": [min(x, 2.0) for x in rho],
        "tis-sequence": [min(x, 1.5) for x in product],
        "icepop": [x if 0.5 <= x <= 5.0 else 0.0 for x in rho],
        "icepop-sequence": [x if 0.8 <= x <= 1.3 else 0.0 for x in product],
        "mis": [x if x <= 2.0 else 0.0 for x in product],
        "opsm": [0.0 if advantage < 0 and sum(drift) / len(drift) > 0.1 else 1.0] * len(rho),
    }[name]


def batch(seed, rows=10, columns=4):
    g = torch.Generator().manual_seed(seed)

    def randn(scale=1.0):
        return scale * torch.randn(rows, columns, generator=g, dtype=torch.float64)

    logp = -randn().abs() - 0.1
    old = logp - randn(0.3)
    mask = torch.arange(columns) < torch.randint(0, columns + 1, (rows, 1), generator=g)
    mask[0] = True
    return logp, old, torch.randn(rows, generator=g, dtype=torch.float64), mask, old - randn(0.2), old - randn(0.9)


def weights(name, logp, old, a, mask, rollout):
    out = torch.zeros_like(logp)
    for i in range(len(a)):
        here = mask[i]
        if here.any():
            log_rho, drift = (old - rollout)[i, here].tolist(), (rollout - logp)[i, here].tolist()
            out[i, here] = torch.tensor(by_hand(name, log_rho, drift, float(a[i])), dtype=torch.float64)
    return out


def gradient(loss, logp, *args, **kwargs):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss.sum(), logp)[0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("method", rpg.algorithms())
def test_every_rule_on_every_preset(method, name):
    """A rule that names no level takes the loss's: per token, or the product over the response."""
    logp, old, a, mask, ref, rollout = batch(3)
    plain = rpg.algorithm(method, needs=(), gate=None).loss
    loss = plain.replace(mismatch=RULES[name])
    args = (logp, old, a, mask, ref)
    got = gradient(loss, *args, rollout_logp=rollout)
    assert torch.isfinite(got).all()
    if plain.level != "token" and RULES[name].level is None:
        product = weights("exact-sequence", logp, old, a, mask, rollout)
        want = gradient(plain, *args) * RULES[name].weight(product)
    else:
        want = gradient(plain, *args) * weights(name, logp, old, a, mask, rollout)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14)
    assert (got != 0).any()


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_weights(name, seed):
    """Seen through a loss whose own coefficient is −1 on every token; and what share of it was dropped."""
    logp, old, a, mask, _, rollout = batch(seed)
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), reduction="none", mismatch=RULES[name])
    sign = a.sign()
    got = gradient(loss, logp, old, sign, mask, rollout_logp=rollout)
    want = weights(name, logp, old, sign, mask, rollout)
    torch.testing.assert_close(got, -sign[:, None] * want)
    dropped = (want == 0)[mask] if RULES[name].level is None else ((want == 0) & mask).any(-1)[mask.any(-1)]
    metrics = loss(logp, old, sign, mask, rollout_logp=rollout).metrics
    assert float(metrics["mismatch/dropped"]) == pytest.approx(float(dropped.double().mean()))


def test_the_kl_term_is_weighted_too():
    logp, old, a, mask, ref, rollout = batch(5)
    product = ((old - rollout) * mask).sum(-1, keepdim=True).exp()
    for loss, level, weight in (
        (PolicyLoss("urkl", 0.5, kl_to_go=True, reduction="none"), "sequence", product),
        (PolicyLoss("k3", 0.5, "differentiable", clip.Box(), reduction="none"), "token", (old - rollout).exp()),
    ):
        got = gradient(loss.replace(mismatch=Mismatch(level)), logp, old, 0 * a, mask, ref, rollout)
        torch.testing.assert_close(got, gradient(loss, logp, old, 0 * a, mask, ref) * weight)
    loss = PolicyLoss("rkl", 0.5, reduction="none")
    exact_kl = torch.rand(logp.shape, dtype=torch.float64)
    got = loss.replace(mismatch=Mismatch())(logp, old, a, mask, ref, rollout, exact_kl=exact_kl).loss
    torch.testing.assert_close(got, loss(logp, old, a, mask, ref, exact_kl=exact_kl).loss * (old - rollout).exp())


def test_bounds_are_inclusive():
    rho = torch.tensor([0.5, 5.0, 0.49, 5.01])
    assert IcePop().weight(rho).tolist() == [0.5, 5.0, 0.0, 0.0]
    assert MIS().weight(torch.tensor([1e-9, 2.0, 2.01])).tolist() == pytest.approx([1e-9, 2.0, 0.0])
    assert TIS(cap=0.5).weight(rho[:1] * 3).tolist() == [0.5]
    assert TIS().weight(torch.tensor([0.1, 2.0, 7.0])).tolist() == pytest.approx([0.1, 2.0, 2.0])
    assert Mismatch().weight(rho).tolist() == rho.tolist()


@pytest.mark.parametrize("rollout_given", [True, False])
def test_opsm_is_strict_and_reads_the_sampler_where_it_can(rollout_given):
    """Mean drift exactly 0.125, then a little more; only negative advantages are dropped; A may be per token."""
    logp = torch.full((5, 2), -2.0, dtype=torch.float64)
    drift = [[0.25, 0.0], [0.25, 0.0625], [0.5, 0.5], [-0.5, -0.5], [0.5, 0.5]]
    sampler = logp + torch.tensor(drift, dtype=torch.float64)
    a = torch.tensor([-1.0, -1.0, 0.5, -1.0, 0.0], dtype=torch.float64)
    loss = PolicyLoss("none", 0, clip=clip.Unweighted(), reduction="none", mismatch=SequenceMask(delta=0.125))
    old, rollout = (logp - 3, sampler) if rollout_given else (sampler, None)
    for advantages in (a, torch.stack([2 * a, torch.zeros(5)], -1)):
        got = gradient(loss, logp, old, advantages, torch.ones(5, 2), rollout_logp=rollout)
        per_token = advantages[:, None].expand(5, 2) if advantages.dim() == 1 else advantages
        torch.testing.assert_close(got, -per_token * torch.tensor([[1.0], [0.0], [1.0], [1.0], [1.0]]))
        metrics = loss(logp, old, advantages, torch.ones(5, 2), rollout_logp=rollout).metrics
        assert float(metrics["mismatch/dropped"]) == pytest.approx(1 / 5)


def test_without_rollout_logp():
    logp, old, a, mask, _, _ = batch(0)
    for name, rule in RULES.items():
        loss = PolicyLoss(mismatch=rule)
        if name == "opsm":
            assert torch.isfinite(loss(logp, old, a, mask).loss)
        else:
            with pytest.raises(ValueError, match="needs rollout_logp") as error:
                loss(logp, old, a, mask)
            assert "\n" not in str(error.value)


def test_no_rule_no_weight():
    logp, old, a, mask, _, rollout = batch(0)
    torch.testing.assert_close(
        PolicyLoss()(logp, old, a, mask, rollout_logp=rollout).loss, PolicyLoss()(logp, old, a, mask).loss
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Mismatch(level="tokens"), "level"),
        (lambda: TIS(level="tokens"), "level"),
        (lambda: IcePop(level="tokens"), "level"),
        (lambda: SequenceMask(level="tokens"), "level"),
        (lambda: TIS(cap=0), "cap"),
        (lambda: IcePop(low=2, high=1), "low"),
        (lambda: IcePop(low=-1), "low"),
        (lambda: MIS(low=3), "low"),
        (lambda: SequenceMask(delta=0), "delta"),
    ],
)
def test_errors(make, name):
    with pytest.raises(ValueError, match=name) as error:
        make()
    assert "\n" not in str(error.value)


def test_defaults_are_the_published_ones():
    assert TIS() == TIS(None, 2.0)
    assert IcePop() == IcePop(None, 0.5, 5.0)
    assert MIS() == MIS("sequence", 0.0, 2.0)
    assert SequenceMask() == SequenceMask("sequence", 0.1)
    assert Mismatch().level is None
    assert [Mismatch().level_for(level) for level in ("token", "sequence", "sequence-mean")] == [
        "token",
        "sequence",
        "sequence",
    ]
    assert TIS(level="sequence").level_for("token") == "sequence"
