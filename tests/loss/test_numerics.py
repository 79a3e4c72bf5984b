"""Extreme ratios, half precision, rubbish under the mask: all stays finite, and what was bounded is counted."""

import itertools
import math

import pytest
import torch

import rpg
from rpg import PolicyLoss, clip

DIVERGENCES = ("none", "fkl", "ufkl", "rkl", "urkl", "k1", "k2", "k3")
ESTIMATORS = ("reinforce", "differentiable")
LEVELS = ("token", "sequence", "sequence-mean")
CLIPS = (
    None,
    clip.Box(),
    clip.DualClip(),
    clip.RPGClip(),
    clip.KL3(),
    clip.Adaptive(target_ess=0.9),
    clip.Adaptive(target_kl=0.1),
    clip.Truncate(),
    clip.Truncate(None, None),
    clip.Unweighted(),
    clip.Taper(),
    clip.LogBox(),
    clip.Sigmoid(),
)
NAN, INF = math.nan, math.inf
HUGE = torch.finfo(torch.float32).min
EXTREMES = (-80.0, -21.0, -1.0, 0.0, 1.0, 21.0, 80.0)


class Batch:
    """Every pair of extreme log π/old and log π/ref, both signs of A; an empty row and rows of one token."""

    def __init__(self, dtype, rubbish, per_token=False):
        pairs = torch.tensor(list(itertools.product(EXTREMES, EXTREMES)))
        log_w, log_u = pairs.reshape(7, 7, 2).unbind(-1)  # [B,T]: rows of one log_w, columns of all log_u
        log_w = torch.cat([log_w, log_w.T.flip(0), torch.zeros(1, 7)])  # and rows that mix all log_w
        log_u = torch.cat([log_u, log_u.T, torch.zeros(1, 7)])
        rows = len(log_w)
        logp = -2.0 - torch.arange(7).expand(rows, 7)
        self.mask = torch.ones(rows, 7, dtype=torch.bool)
        self.mask[:7, 5:] = False
        self.mask[2, 1:] = False
        self.mask[3] = False
        a = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
        if per_token:
            a = a[:, None] * torch.linspace(-1, 1, 7)
            self.a = self.dirty(a, rubbish, 0)
        else:
            self.a = torch.where(self.mask.any(-1), a, rubbish[0])
        tensors = (logp, logp - log_w, logp - log_u, logp - log_w + 0.1 * log_u)
        self.logp, self.old, self.ref, self.rollout = (
            self.dirty(x, rubbish, i + 1).to(dtype) for i, x in enumerate(tensors)
        )

    def dirty(self, x, rubbish, i):
        return torch.where(self.mask, x, rubbish[i % len(rubbish)])

    def args(self):
        return self.logp, self.old, self.a, self.mask


def run(loss, b, metrics=True, **kwargs):
    logp = b.logp.clone().requires_grad_()
    out = loss(logp, *b.args()[1:], ref_logp=b.ref, rollout_logp=b.rollout, **kwargs)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~b.mask] == 0).all()
    assert logp.grad.dtype == b.logp.dtype
    for name, value in out.metrics.items() if metrics else ():
        assert torch.isfinite(value), name
    return out.loss.detach(), logp.grad, out


def sound(loss, per_token=False):
    """Finite everywhere, and the same to the last bit whatever lies under the mask."""
    for dtype in (torch.float32, torch.bfloat16):
        clean, grad, out = run(loss, Batch(dtype, (0.0,), per_token))
        assert out.loss.dtype == torch.float32
        assert (grad != 0).any()
        for rubbish in ((NAN, -INF, INF), (HUGE,), (1e30, -1e30, 1e9), (-INF,)):
            same, same_grad, same_out = run(loss, Batch(dtype, rubbish, per_token), metrics=dtype == torch.float32)
            assert torch.equal(same, clean)
            assert torch.equal(same_grad, grad)
            if dtype == torch.float32:
                assert same_out.metrics == out.metrics


@pytest.mark.parametrize("name", rpg.algorithms())
def test_every_preset(name):
    loss = rpg.algorithm(name, needs=(), gate=None).loss
    sound(loss)
    if loss.level == "token":
        sound(loss, per_token=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_combination(divergence, estimator, level):
    for rule in CLIPS:
        if estimator == "differentiable" and rule is not None and rule.action == "truncate":
            continue
        for inside in (None, False):
            loss = PolicyLoss(divergence, 0.1, estimator, rule, level, kl_in_clip=inside)
            grads = []
            for rubbish in ((0.0,), (NAN, -INF, INF), (1e30, HUGE, -1e30)):
                grads.append(run(loss, Batch(torch.float32, rubbish), metrics=inside is None)[1])
            assert torch.equal(grads[0], grads[1])
            assert torch.equal(grads[0], grads[2])
            run(loss, Batch(torch.bfloat16, (NAN, -INF, INF)), metrics=False)


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "none"])
@pytest.mark.parametrize("extra", [{"kl_to_go": True}, {"control_variate": True}], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_options(level, estimator, extra, reduction):
    if reduction == "seq-mean-token-mean" and "control_variate" in extra:
        return
    for divergence in ("rkl", "urkl"):
        sound(PolicyLoss(divergence, 0.1, estimator, clip.RPGClip(), level, reduction, **extra))


@pytest.mark.parametrize("rule", [rpg.mismatch.Mismatch, rpg.mismatch.TIS, rpg.mismatch.IcePop, rpg.mismatch.MIS])
def test_mismatch(rule):
    for level in ("token", "sequence"):
        sound(PolicyLoss("urkl", 0.1, clip=clip.RPGClip(), mismatch=rule(level=level)))
    sound(PolicyLoss("urkl", 0.1, clip=clip.RPGClip(), mismatch=rpg.mismatch.SequenceMask()))


@pytest.mark.parametrize("name", rpg.algorithms())
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (5, 1)])
def test_small_batches(name, rows, columns):
    loss = rpg.algorithm(name, needs=(), gate=None).loss
    logp = torch.full((rows, columns), -1.0).requires_grad_()
    out = loss(logp, logp.detach() - 0.1, torch.ones(rows), torch.ones(rows, columns))
    out.loss.backward()
    assert torch.isfinite(logp.grad).all()
    assert all(torch.isfinite(x) for x in out.metrics.values())


# ---- what is bounded is counted, and not silenced --------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("limit", [20.0, 2.0])
def test_bounded_counts_exactly(level, limit):
    log_w = torch.tensor(
        [[limit, -limit, limit + 0.5], [-3 * limit, 0, 0], [-limit / 2, -limit / 4, 9], [0.5, -0.5, 50]]
    )
    log_u = torch.tensor([[limit, limit / 2, 0.0], [limit, 0.0, 0.0], [-limit - 1, -limit, 9.0], [0.25, 0.25, 50.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    logp = torch.full((4, 3), -64.0)
    loss = PolicyLoss("urkl", level=level, max_log_ratio=limit)
    metrics = loss(logp, logp - log_w, torch.ones(4), mask, ref_logp=logp - log_u).metrics
    mean = log_w[1].sum() / 3
    expected = {"token": 2 / 10, "sequence": 2 / 4, "sequence-mean": float(mean.abs() > limit) / 4}[level]
    assert float(metrics["bounded"]) == pytest.approx(expected)
    beyond = []
    for i in range(4):  # log u or log ref/old out of bounds, at the loss's own level
        u, v = log_u[i][mask[i]], (log_w - log_u)[i][mask[i]]
        if level == "token":
            beyond += ((u.abs() > limit) | (v.abs() > limit)).tolist()
        else:
            n = 1 if level == "sequence" else len(u)
            beyond.append(abs(float(u.sum())) / n > limit or abs(float(v.sum())) / n > limit)
    assert float(metrics["bounded_ref"]) == pytest.approx(sum(beyond) / len(beyond))
    assert "bounded_ref" not in loss(logp, logp - log_w, torch.ones(4), mask).metrics


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_at_the_bound_is_that_of_the_bounded_ratio(estimator, divergence):
    pairs = torch.tensor(list(itertools.product(EXTREMES, EXTREMES)), dtype=torch.float64)
    log_w, log_u = pairs.T.unsqueeze(-1)
    logp = torch.full_like(log_w, -100.0).requires_grad_()
    a, beta = torch.full((len(pairs),), 0.5, dtype=torch.float64), 0.1
    loss = PolicyLoss(divergence, beta, estimator, reduction="none")
    loss(logp, logp - log_w, a, torch.ones_like(log_w), ref_logp=logp - log_u).loss.sum().backward()
    w, v = log_w.clamp(-20, 20).exp(), (log_w - log_u).clamp(-20, 20).exp()
    kl = {
        "none": 0 * w,
        "fkl": -v,
        "ufkl": w - v,
        "rkl": w * (log_u + 1),
        "urkl": w * log_u,
        "k1": torch.ones_like(w),
        "k2": log_u,
        "k3": 1 - torch.exp(-log_u.clamp(-20, 20)),
    }[divergence]
    torch.testing.assert_close(logp.grad, -w * 0.5 + beta * kl)
    assert (logp.grad != 0).all()


def test_the_largest_max_log_ratio_does_not_overflow():
    for level in LEVELS:
        for divergence in DIVERGENCES:
            loss = PolicyLoss(divergence, 0.1, "reinforce", clip.RPGClip(), level=level, max_log_ratio=40.0)
            _, _, out = run(loss, Batch(torch.float32, (NAN,)), metrics=False)
            assert torch.isfinite(out.metrics["ess"])
            assert torch.isfinite(out.metrics["mismatch/ess"])


# ---- types -----------------------------------------------------------------------------------------------------------


def test_float64_stays_float64():
    logp = torch.tensor([[-1.0]], dtype=torch.float64)
    a = torch.tensor([1.0], dtype=torch.float64)
    for estimator in ESTIMATORS:
        for drift in (1e-11, -1e-11):
            x = logp.clone().requires_grad_()
            out = PolicyLoss("urkl", 1.0, estimator)(x, logp - drift, a, torch.ones(1, 1))
            out.loss.backward()
            assert out.loss.dtype == x.grad.dtype == torch.float64
            assert float(x.grad) + 1 == pytest.approx(0.0 * drift, abs=1e-15)  # −w + w·log w = −1 + O(drift²)
            y = logp.clone().requires_grad_()
            PolicyLoss("none", 0, estimator)(y, logp - drift, a, torch.ones(1, 1)).loss.backward()
            assert float(y.grad) + 1 == pytest.approx(-drift, rel=1e-4)


def test_half_precision_is_computed_in_float32():
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(4, 8, generator=g).bfloat16() * 5
    old, ref = logp - torch.randn(4, 8, generator=g).bfloat16(), logp - torch.randn(4, 8, generator=g).bfloat16()
    a, mask = torch.randn(4, generator=g), torch.ones(4, 8)
    for name in rpg.algorithms():
        loss = rpg.algorithm(name, needs=(), gate=None).loss
        half = logp.clone().requires_grad_()
        full = logp.float().requires_grad_()
        got = loss(half, old, a.bfloat16(), mask.bfloat16(), ref_logp=ref).loss
        want = loss(full, old.float(), a.bfloat16().float(), mask, ref_logp=ref.float()).loss
        got.backward()
        want.backward()
        assert torch.equal(got, want)
        assert torch.equal(half.grad, full.grad.bfloat16())


# ---- nothing to learn from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rpg.algorithms())
def test_an_all_masked_batch(name):
    loss = rpg.algorithm(name, needs=(), gate=None).loss
    for rubbish in (0.0, NAN, -INF, 1e30):
        logp = torch.full((2, 3), rubbish).requires_grad_()
        args = (logp, torch.full((2, 3), rubbish), torch.full((2,), rubbish), torch.zeros(2, 3))
        with pytest.raises(ValueError, match="mask selects no token") as error:
            loss(*args)
        assert "\n" not in str(error.value)
        out = loss(*args, ref_logp=torch.full((2, 3), rubbish), denominator=100.0)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0
        assert (logp.grad == 0).all()
        assert float(out.metrics["tokens"]) == float(out.metrics["sequences"]) == 0.0


@pytest.mark.parametrize("rule", CLIPS, ids=str)
def test_an_all_masked_micro_batch_with_every_clip(rule):
    logp = torch.full((2, 3), NAN).requires_grad_()
    for level in LEVELS:
        loss = PolicyLoss("urkl", 0.1, clip=rule, level=level, control_variate=level != "sequence-mean")
        out = loss(logp, logp.detach(), torch.full((2,), NAN), torch.zeros(2, 3), denominator=torch.tensor(7.0))
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0
        assert (logp.grad == 0).all()
        assert isinstance(out.metrics, dict)


def test_a_micro_batch_of_no_rows():
    logp = torch.zeros(0, 3).requires_grad_()
    full = PolicyLoss("urkl", clip=clip.RPGClip())(
        -torch.ones(1, 3), -torch.ones(1, 3), torch.ones(1), torch.ones(1, 3)
    )
    for rule in (None, *CLIPS):
        out = PolicyLoss("urkl", clip=rule)(logp, logp.detach(), torch.zeros(0), torch.zeros(0, 3), denominator=7)
        out.loss.backward()
        assert float(out.loss.detach()) == float(out.metrics["tokens"]) == 0.0
        if rule == clip.RPGClip():
            assert out.metrics.keys() == full.metrics.keys()  # ranks can be averaged by name


def test_an_empty_row_changes_nothing_but_the_counts():
    g = torch.Generator().manual_seed(0)
    logp, old, ref = -torch.rand(3, 4, 5, generator=g)
    a, mask = torch.randn(4, generator=g), torch.ones(4, 5)
    mask[2] = 0
    keep = [0, 1, 3]
    for name in rpg.algorithms():
        loss = rpg.algorithm(name, needs=(), gate=None).loss
        a[2] = NAN
        with_row = loss(logp, old, a, mask, ref_logp=ref)
        without = loss(logp[keep], old[keep], a[keep], mask[keep], ref_logp=ref[keep])
        torch.testing.assert_close(with_row.loss, without.loss)
        for key, value in without.metrics.items():
            torch.testing.assert_close(with_row.metrics[key], value)
