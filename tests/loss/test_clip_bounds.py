"""Bounds that are computed: KL3's level sets, and Adaptive's fit to its target."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from rpg import PolicyLoss, clip

exact = settings(max_examples=60, deadline=None)

LEVEL_SETS = {
    "k3": lambda r: r - 1 - math.log(r),
    "k3-inverse": lambda r: 1 / r - 1 + math.log(r),
    "k3-weighted": lambda r: 1 - r + r * math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
}
deltas = st.floats(1e-5, 4.0)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def gradient(loss, logp, *args, **kwargs):
    """d loss / d log π of every token."""
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss.sum(), logp)[0]


@pytest.mark.parametrize("form", clip.KL3_FORMS)
@given(delta=deltas, other=deltas)
@exact
def test_kl3_bounds_are_where_the_divergence_is_delta(form, delta, other):
    divergence = LEVEL_SETS[form]
    low, high = clip.KL3(delta, form).bounds()
    assert divergence(high) == pytest.approx(delta, rel=1e-6)
    assert high > 1 > low >= 0
    inside, outside = high - (high - 1) * 1e-3, high + (high - 1) * 1e-3
    assert divergence(inside) < delta < divergence(outside)
    if form == "k3-weighted" and delta >= 1:
        assert low == 0  # 1 − r + r·log r never exceeds 1 below r = 1: nothing is too low
    else:
        assert divergence(low) == pytest.approx(delta, rel=1e-6)
        assert divergence(low + (1 - low) * 1e-3) < delta < divergence(low - low * 1e-3 * (1 - low))
    assume(abs(other - delta) > 1e-3 * delta)
    low_o, high_o = clip.KL3(other, form).bounds()
    assert (high_o > high) == (other > delta)
    assert low_o == low == 0 or (low_o < low) == (other > delta)


@given(delta=deltas)
@exact
def test_kl3_bounds_are_scipy_lambert_w(delta):
    def w(x, branch):
        return float(lambertw(x, branch).real)

    x = -math.exp(-(1 + delta))
    low, high = -w(x, 0), -w(x, -1)
    assert clip.KL3(delta).bounds() == pytest.approx((low, high), rel=1e-7)
    assert clip.KL3(delta, "k3-inverse").bounds() == pytest.approx((1 / high, 1 / low), rel=1e-7)
    x = (delta - 1) / math.e
    weighted = (math.exp(1 + w(x, -1)) if delta < 1 else 0.0, math.exp(1 + w(x, 0)))
    assert clip.KL3(delta, "k3-weighted").bounds() == pytest.approx(weighted, rel=1e-7)
    k = math.sqrt(2 * delta)
    assert clip.KL3(delta, "k2").bounds() == pytest.approx((math.exp(-k), math.exp(k)), rel=1e-12)


@given(x=st.floats(-1 / math.e + 1e-4, 50.0))  # nearer to the branch point scipy itself is wrong
@exact
def test_lambert_w_is_scipys(x):
    assert clip.lambert_w(x, 0) == pytest.approx(float(lambertw(x, 0).real), rel=1e-10, abs=1e-12)
    if x < -1e-300:
        assert clip.lambert_w(x, -1) == pytest.approx(float(lambertw(x, -1).real), rel=1e-10)


@given(p=st.floats(1e-6, 0.1))
@exact
def test_lambert_w_at_its_branch_point(p):
    x = (p * p / 2 - 1) / math.e
    for branch, side in ((0, 1), (-1, -1)):
        w = clip.lambert_w(x, branch)
        assert w == pytest.approx(-1 + side * p - p * p / 3 + side * 11 / 72 * p**3, abs=1e-14 / p + p**4)
        assert w * math.exp(w) == pytest.approx(x, rel=1e-14)


@pytest.mark.parametrize(("x", "branch"), [(-0.4, 0), (-0.4, -1), (0.1, -1), (0.0, -1), (0.1, 1)])
def test_lambert_w_refuses_what_is_not_real(x, branch):
    with pytest.raises(ValueError, match="no real value"):
        clip.lambert_w(x, branch)


@pytest.mark.parametrize(
    ("form", "delta", "low", "high"),
    [
        ("k3", 0.023144, 0.8000, 1.2308),
        ("k3", 0.05, 0.7162, 1.3504),
        ("k3-inverse", 0.026856, 0.8000, 1.2726),
        ("k3-weighted", 0.021485, 0.8000, 1.2143),
        ("k3-weighted", 1.0, 0.0, math.e),
        ("k3-weighted", 2.0, 0.0, 3.5911),
    ],
)
def test_kl3_check_values(form, delta, low, high):
    assert clip.KL3(delta, form).bounds() == pytest.approx((low, high), abs=5e-5)


def test_kl3_cuts_like_a_box_of_its_bounds():
    low, high = clip.KL3(0.05).bounds()
    w, a = f64([low, low + 1e-9, high - 1e-9, high, 0.1, 9.0]), f64([-1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    assert clip.KL3(0.05).keep(w, a).tolist() == [False, True, True, False, True, True]
    assert clip.KL3(0.05, c=8.0).keep(w, a).tolist() == [False, True, True, False, True, False]


# ---- Adaptive --------------------------------------------------------------------------------------------------------


def met(rule, log_w, k):
    """The statistic of ratios clamped to e^±k, naively, and whether it meets the target."""
    w = [math.exp(min(max(x, -k), k)) for x in log_w.tolist()]
    if rule.target_kl is not None:
        return sum(x - 1 - math.log(x) for x in w) / len(w) <= rule.target_kl
    return sum(w) ** 2 >= rule.target_ess * len(w) * sum(x * x for x in w)


adaptive = st.one_of(
    st.floats(0.3, 0.999).map(lambda t: clip.Adaptive(target_ess=t)),
    st.floats(1e-3, 0.3).map(lambda t: clip.Adaptive(target_kl=t)),
)


@given(rule=adaptive, seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0]))
@settings(max_examples=150, deadline=None)
def test_adaptive_bounds_are_the_widest_that_meet_the_target(rule, seed, spread):
    log_w = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * spread
    valid = torch.arange(40) < 30
    log_w[~valid] = 50.0  # what lies under the mask has no say
    fitted = rule.fit(log_w, valid)
    low, high = fitted.bounds()
    k = math.log(high)
    assert low * high == pytest.approx(1.0, rel=1e-6)
    assert isinstance(fitted, clip.RPGClip)
    assert fitted.c == rule.c == 10.0
    assert rule.narrowest - 1e-9 <= k <= rule.widest + 1e-9
    if k > rule.narrowest + 1e-6:
        assert met(rule, log_w[:30], 0.999 * k)
    if k < rule.widest - 1e-6:
        assert not met(rule, log_w[:30], 1.001 * k)


def test_adaptive_is_monotone_in_its_target_and_stays_in_its_range():
    log_w, valid = torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.ones(500)
    bounds = [clip.Adaptive(target_kl=t).fit(log_w, valid).bounds()[1] for t in (1e-6, 0.01, 0.05, 0.1, 0.2, 50.0)]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) == 6
    assert bounds[0] == pytest.approx(math.exp(0.02))
    assert bounds[-1] == pytest.approx(math.e)
    bounds = [clip.Adaptive(target_ess=t).fit(log_w, valid).bounds()[1] for t in (0.1, 0.7, 0.8, 0.9, 0.99, 0.9999)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == pytest.approx(math.e)
    for rule in (clip.Adaptive(target_ess=0.9, widest=0.5, c=5.0), clip.Adaptive(target_kl=0.01, widest=0.5, c=5.0)):
        for log_w_here, valid_here in ((torch.zeros(7), torch.ones(7)), (torch.ones(7), torch.zeros(7))):
            fitted = rule.fit(log_w_here, valid_here)  # all ratios 1, or none at all: the widest
            assert fitted.bounds() == pytest.approx((math.exp(-0.5), math.exp(0.5)))
            assert fitted.c == 5.0
    just_met = float(torch.expm1(torch.ones(4)).sub(1).mean())  # with equality, at the widest
    high = clip.Adaptive(target_kl=just_met).fit(torch.full((4,), 2.0), torch.ones(4)).bounds()[1]
    assert high == pytest.approx(math.e, rel=1e-9)
    with pytest.raises(TypeError, match="fit"):
        clip.Adaptive(target_kl=0.1).bounds()


def test_adaptive_by_hand():
    """Ratios of e^±k in equal parts have the effective sample size cosh²k / cosh 2k, which is 0.8 at k = log √3."""
    fitted = clip.Adaptive(target_ess=0.8).fit(torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4))
    assert fitted.bounds() == pytest.approx((3**-0.5, 3**0.5), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_adaptive_fits_once_for_all_micro_batches(level):
    g = torch.Generator().manual_seed(3)
    logp = -torch.rand(6, 5, generator=g, dtype=torch.float64) * 3
    old = logp - 0.4 * torch.randn(6, 5, generator=g, dtype=torch.float64)
    a, mask = torch.randn(6, generator=g, dtype=torch.float64), torch.rand(6, 5, generator=g) < 0.8
    rule = clip.Adaptive(target_ess=0.95)
    loss = PolicyLoss("urkl", 0.01, "reinforce", rule, level=level)
    whole = gradient(loss, logp, old, a, mask)
    log_w = (logp - old) * mask
    log_w, valid = (log_w, mask) if level == "token" else (log_w.sum(-1), mask.any(-1))
    fitted = rule.fit(log_w, valid)
    fixed = loss.replace(clip=fitted)
    total = loss.step_denominator(mask)
    pieces = [gradient(fixed, logp[i], old[i], a[i], mask[i], denominator=total) for i in ([0, 1], [2, 3, 4], [5])]
    torch.testing.assert_close(torch.cat(pieces), whole)
    metrics = loss(logp, old, a, mask).metrics
    reported = float(metrics["clip/bound_low"]), float(metrics["clip/bound_high"])
    assert reported == pytest.approx(fitted.bounds(), rel=1e-6)
    assert (whole == 0).any()
    assert (whole[mask] != 0).any()
