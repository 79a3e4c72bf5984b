"""Every coefficient written out by hand, per token, in plain Python, from the papers: what the mutants are shown.

The rules of rpg.clip and rpg.mismatch with their published limits and which side of each limit is cut, the losses built
from them, and the reductions. Nothing here uses the package's own formulas.
"""

import inspect
import math
from unittest import mock

import pytest
import torch

from rpg import PolicyLoss, clip, vocabulary_kl
from rpg.clipping import INF
from rpg.mismatch import MIS, TIS, IcePop, Mismatch, SequenceMask
from rpg.objective import bounded

BETA = 0.3
EXACT = ("fkl", "rkl", "ufkl", "urkl")
ESTIMATORS = ("reinforce", "differentiable")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, expected, tolerance=1e-11):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# ---- the clip rules -------------------------------------------------------------------------------------------------

# rule -> limits where A ≥ 0, limits where A < 0
LIMITS = [
    (clip.Box(), (0.0, 1.2), (0.8, INF)),
    (clip.Box(None, 0.5), (0.0, 1.5), (0.0, INF)),
    (clip.Box(0.5, None), (0.0, INF), (0.5, INF)),
    (clip.DualClip(), (0.0, 1.28), (0.8, 10.0)),
    (clip.DualClip(c=None), (0.0, 1.28), (0.8, INF)),
    (clip.RPGClip(c=3.0), (0.0, 1.28), (0.8, 3.0)),
    (clip.Truncate(), (0.8, 1.28), (0.8, 1.28)),
    (clip.Truncate(None, 4.0), (0.0, 5.0), (0.0, 5.0)),
    (clip.Unweighted(), (1.0, 1.0), (1.0, 1.0)),
    (clip.Taper(), (1.0, 1.0), (0.0, 1.0)),
    (clip.LogBox(), (0.0, 1.2), (0.8, INF)),
    (clip.Sigmoid(), (0.0, INF), (0.0, INF)),
]


@pytest.mark.parametrize(("rule", "positive", "negative"), LIMITS)
def test_limits(rule, positive, negative):
    assert rule.limits() == (positive, negative)
    assert rule.bounds() == (negative[0], positive[1])


@pytest.mark.parametrize("rule", [clip.DualClip(0.25, 0.5, 4.0), clip.RPGClip(0.25, 0.5, 4.0)])
def test_a_limit_itself_is_cut(rule):
    """RPG Algorithm 2: A_reg ≥ 0 stops at w ≥ 1+ε₂, A_reg < 0 at w ≤ 1−ε₁ and at w ≥ c. A_reg = 0 counts as positive."""
    w = tensor(0.5, 0.75, 0.76, 1.0, 1.49, 1.5, 3.9, 4.0, 5.0)
    positive = [True, True, True, True, True, False, False, False, False]
    negative = [False, False, True, True, True, True, True, False, False]
    for a, kept in ((2.0, positive), (0.0, positive), (-2.0, negative)):
        a = torch.full_like(w, a)
        assert rule.keep(w, a).tolist() == kept
        below, above = rule.outside(w, a)
        assert (~(below | above)).tolist() == kept
        assert above.tolist() == [x >= (1.5 if a[0] >= 0 else 4.0) for x in w.tolist()]
        assert below.tolist() == [a[0] < 0 and x <= 0.75 for x in w.tolist()]


@pytest.mark.parametrize("rule", [clip.Box(0.25, 0.5), clip.LogBox(0.25, 0.5)])
def test_a_box_cuts_one_side_only(rule):
    w = tensor(0.5, 0.75, 0.76, 1.49, 1.5, 9.0)
    assert rule.keep(w, torch.ones_like(w)).tolist() == [True, True, True, True, False, False]
    assert rule.keep(w, -torch.ones_like(w)).tolist() == [False, False, True, True, True, True]


GRID = torch.linspace(0.05, 12, 97, dtype=torch.float64)


@pytest.mark.parametrize("a", [1.7, -1.7])
def test_surrogates_are_the_published_minima(a):
    """−A·surrogate is −min(wA, clip(w)A), for A < 0 not above −cA, and its slope in log w is −A·weight."""
    A = torch.full_like(GRID, a)
    box = -torch.minimum(GRID * A, GRID.clamp(0.8, 1.2) * A)
    log_box = -torch.minimum(GRID.log() * A, GRID.clamp(0.8, 1.2).log() * A)
    dual = -torch.minimum(GRID * A, GRID.clamp(0.8, 1.28) * A)
    dual = torch.minimum(dual, -10 * A) if a < 0 else dual
    tau = 1.0 if a > 0 else 1.05
    sapo = -A * 4 / tau / (1 + (-tau * (GRID - 1)).exp())
    published = {clip.Box(): box, clip.LogBox(): log_box, clip.DualClip(): dual, clip.Sigmoid(): sapo}
    for rule, value in published.items():
        log_w = GRID.log().requires_grad_()
        surrogate = rule.surrogate(log_w.exp(), A)
        close(-A * surrogate.detach(), value)
        close(rule.weight(GRID, A), torch.autograd.grad(surrogate.sum(), log_w)[0])


def test_truncation_holds_the_weight():
    w, a = tensor(0.5, 1.0, 2.0, 0.5, 1.0, 2.0), tensor(1, 1, 1, -1, -1, -1)
    close(clip.Truncate(0.25, 0.5).weight(w, a), tensor(0.75, 1.0, 1.5, 0.75, 1.0, 1.5))
    close(clip.Truncate(None, 0.5).weight(w, a), tensor(0.5, 1.0, 1.5, 0.5, 1.0, 1.5))
    close(clip.Unweighted().weight(w, a), tensor(1, 1, 1, 1, 1, 1))
    close(clip.Taper().weight(w, a), tensor(1, 1, 1, 0.5, 1, 1))
    with pytest.raises(TypeError, match="reinforce"):
        clip.Truncate().surrogate(w, a)


def test_the_gate_of_a_zero_advantage_is_the_negative_one():
    w = tensor(2.0)
    close(clip.Sigmoid(1.0, 3.0).surrogate(w, tensor(0.0)), 4 / 3 / (1 + torch.exp(tensor(-3.0))))


def level_set(form, r):
    k3 = lambda x: x - 1 - math.log(x)  # noqa: E731
    return {"k3": k3(r), "k3-inverse": k3(1 / r), "k3-weighted": r * k3(1 / r), "k2": math.log(r) ** 2 / 2}[form]


@pytest.mark.parametrize("form", clip.KL3_FORMS)
@pytest.mark.parametrize("delta", [0.01, 0.05, 0.3, 0.9])
def test_kl3_bounds_are_a_level_set(delta, form):
    (zero, high), (low, none) = clip.KL3(delta, form).limits()
    assert (zero, none) == (0.0, INF)
    assert low < 1 < high
    assert level_set(form, low) == pytest.approx(delta, rel=1e-9)
    assert level_set(form, high) == pytest.approx(delta, rel=1e-9)
    assert clip.KL3(delta, form, c=50.0).limits() == ((0.0, high), (low, 50.0))


def test_kl3_values_of_the_paper_and_past_its_pole():
    for form, delta, bounds in [
        ("k3", 0.023144, (0.8, 1.2308)),
        ("k3", 0.05, (0.7162, 1.3504)),
        ("k3-inverse", 0.026856, (0.8, 1.2726)),
        ("k3-weighted", 0.021485, (0.8, 1.2143)),
    ]:
        assert clip.KL3(delta, form).bounds() == pytest.approx(bounds, abs=1e-4)
    assert clip.KL3().bounds() == clip.KL3(0.05, "k3").bounds()
    assert clip.KL3(1.0, "k3-weighted").bounds() == pytest.approx((0.0, math.e))
    assert clip.KL3(1.5, "k3-weighted").bounds()[0] == 0.0


def widest_bounds(log_w, meets, low, high, steps=4000):
    """By trying: the widest k of a grid for which the clamped ratios meet the target."""
    ks = [low + (high - low) * i / steps for i in range(steps + 1)]
    good = [k for k in ks if meets([min(max(x, -k), k) for x in log_w])]
    return max(good, default=low)


@pytest.mark.parametrize("target", [{"target_ess": 0.8}, {"target_ess": 0.9}, {"target_kl": 0.05}, {"target_kl": 0.01}])
def test_adaptive_bounds_are_the_widest_that_meet_the_target(target):
    log_w = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.9
    valid = torch.arange(40) < 30
    log_w[30:] = 15.0  # not counted

    def meets(x):
        if "target_kl" in target:
            return sum(math.exp(v) - 1 - v for v in x) / len(x) <= target["target_kl"]
        return sum(map(math.exp, x)) ** 2 / (len(x) * sum(math.exp(2 * v) for v in x)) >= target["target_ess"]

    rule = clip.Adaptive(**target).fit(log_w, valid)
    k = widest_bounds(log_w[valid].tolist(), meets, 0.02, 1.0)
    assert 0.1 < k < 0.99
    assert math.log(1 + rule.high) == pytest.approx(k, abs=3e-4)
    assert math.log(1 - rule.low) == pytest.approx(-k, abs=3e-4)
    assert isinstance(rule, clip.RPGClip)
    assert rule.c == 10.0


def test_adaptive_bounds_stay_within_their_range():
    def fitted(x, **options):
        return math.log1p(clip.Adaptive(**options).fit(torch.tensor(x), torch.ones(len(x))).high)

    assert fitted([0.1, 0.2, 0.3], target_kl=1.0) == pytest.approx(1.0, abs=1e-12)  # met everywhere
    assert fitted([5.0, -5.0, 0.0], target_kl=1e-9) == pytest.approx(0.02, abs=1e-6)  # met nowhere
    assert fitted([], target_kl=1e-9, widest=0.7) == pytest.approx(0.7, abs=1e-12)
    assert fitted([5.0], target_kl=1e-9) == pytest.approx(0.02, abs=1e-6)
    at_most = float(torch.expm1(torch.tensor(0.3)) - torch.tensor(0.3))
    assert fitted([0.3], target_kl=at_most) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("top_k", [3, 50])
def test_curvature_keep_against_whole_matrices(top_k, adam):
    rng = torch.Generator().manual_seed(3)
    num, vocabulary, width, lr = 8, 7, 4, 0.4
    logits, hidden = torch.randn(num, vocabulary, generator=rng), torch.randn(num, width, generator=rng)
    action, advantage = torch.randint(vocabulary, (num,), generator=rng), 2 * torch.randn(num, generator=rng)
    scale = 0.2 + torch.rand(vocabulary, width, generator=rng)
    signs, inside = set(), set()
    for n in range(num):
        p = logits[n].double().softmax(-1)
        seen = set(p.topk(min(top_k, vocabulary)).indices.tolist())
        inside.add(int(action[n]) in seen)
        seen = sorted(seen | {int(action[n])})
        p, h, a = p[seen], hidden[n].double(), float(advantage[n])
        v = torch.tensor([float(i == int(action[n])) for i in seen], dtype=torch.float64) - p
        g = a * torch.outer(v, h)
        d = g * scale[seen].double() if adam else g
        q = d @ h
        m_f = 0.5 * lr**2 * float(v @ q) ** 2
        curvature = float(v @ q) ** 2 - float(q @ (torch.diag(p) - torch.outer(p, p)) @ q)
        m_h = lr * float((g * d).sum()) + 0.5 * lr**2 * a * curvature
        signs.add(m_h > 0)

        def kept(fisher, hessian):
            one = [x[n : n + 1] for x in (logits, hidden, action, advantage)]
            return bool(clip.curvature_keep(*one, lr, scale if adam else None, fisher, hessian, top_k))

        assert kept(m_f * 1.001, abs(m_h) * 1.001)
        assert not kept(m_f * 0.999, abs(m_h) * 1.001)
        assert not kept(m_f * 1.001, abs(m_h) * 0.999)
    assert signs == {True, False}
    assert inside == ({True, False} if top_k == 3 else {True})


def test_curvature_keep_is_strict_and_has_the_published_defaults():
    one = (torch.zeros(2, 3), torch.ones(2, 2), torch.tensor([0, 1]), torch.zeros(2), 0.1)  # no advantage, no move
    assert clip.curvature_keep(*one).tolist() == [True, True]
    assert clip.curvature_keep(*one, delta_fisher=0.0).tolist() == [False, False]
    assert clip.curvature_keep(*one, delta_hessian=0.0).tolist() == [False, False]
    defaults = {k: p.default for k, p in inspect.signature(clip.curvature_keep).parameters.items()}
    assert (defaults["delta_fisher"], defaults["delta_hessian"], defaults["top_k"]) == (1e-4, 1e-2, 50)


# ---- the losses -----------------------------------------------------------------------------------------------------

RULES = {
    "none": None,
    "box": clip.Box(0.2, 0.3),
    "dual": clip.DualClip(0.2, 0.28, 3.0),
    "rpg": clip.RPGClip(0.2, 0.28, 3.0),
    "kl3": clip.KL3(0.05, "k3"),
    "truncate": clip.Truncate(0.2, 0.28),
    "unweighted": clip.Unweighted(),
    "taper": clip.Taper(),
    "log-box": clip.LogBox(0.2, 0.2),
    "sigmoid": clip.Sigmoid(1.0, 1.5),
}


def batch(seed=0, rows=6, tokens=5):
    """A batch whose ratios reach past every limit, the last row without tokens, garbage under the mask."""
    rng = torch.Generator().manual_seed(seed)
    logp, old, ref = -torch.rand(3, rows, tokens, generator=rng, dtype=torch.float64) * 2.5
    mask = torch.arange(tokens) < torch.tensor([5, 3, 1, 4, 2, 0])[:rows, None]
    a = torch.randn(rows, tokens, generator=rng, dtype=torch.float64)
    for x, garbage in ((logp, -7.0), (old, 3.0), (ref, 11.0), (a, 50.0)):
        x[~mask] = garbage
    return logp, old, ref, mask, a


def omega_of_kl(divergence, w, v, log_u):
    """β's part of ω (RPG, table of section 2)."""
    return {
        "none": 0.0,
        "fkl": v,
        "ufkl": v - w,
        "rkl": -w * (log_u + 1),
        "urkl": -w * log_u,
        "k1": -1.0,
        "k2": -log_u,
        "k3": math.exp(-log_u) - 1,
    }[divergence]


def bounds_of(name, positive):
    """(low, high) that an advantage of this sign is held to."""
    if name == "kl3":
        low, high = RULES["kl3"].bounds()
        return (0.0, high) if positive else (low, INF)
    by_sign = {
        "box": ((0.0, 1.3), (0.8, INF)),
        "dual": ((0.0, 1.28), (0.8, 3.0)),
        "rpg": ((0.0, 1.28), (0.8, 3.0)),
        "truncate": ((0.8, 1.28), (0.8, 1.28)),
        "unweighted": ((1.0, 1.0), (1.0, 1.0)),
        "taper": ((1.0, 1.0), (0.0, 1.0)),
        "log-box": ((0.0, 1.2), (0.8, INF)),
    }
    return by_sign.get(name, ((0.0, INF), (0.0, INF)))[0 if positive else 1]


def textbook(name, divergence, estimator, inside, a, w, v, log_u):
    """d loss / d log π of one token."""
    kl = BETA * omega_of_kl(divergence, w, v, log_u)
    low, high = bounds_of(name, a >= 0)
    if name in ("truncate", "unweighted", "taper"):
        held = min(max(w, low), high)
        return -held * a - (BETA * omega_of_kl(divergence, held, v, log_u) if inside else kl)
    if not inside:
        tau = 1.0 if a > 0 else 1.5
        gate = 1 / (1 + math.exp(-tau * (w - 1)))
        weight = {"log-box": 1.0, "sigmoid": 4 * gate * (1 - gate) * w}.get(name, w)
        return -a * weight * (low < w < high) - kl
    regularised = a + kl / w
    low, high = bounds_of(name, regularised >= 0)
    if estimator == "reinforce" or name == "rpg":  # Algorithm 2
        return -(w * a + kl) if low < w < high else 0.0
    # Algorithm 1: −bound·Â beyond a limit, −w·Â inside, and Â = A − β·log u (− β) has its own gradient −β
    return BETA * min(max(w, low), high) - (w * regularised if low < w < high else 0.0)


def kl_is_inside(name, divergence, estimator):
    if name in ("none", "log-box", "sigmoid") or divergence not in EXACT:
        return False
    return estimator == "reinforce" or divergence in ("rkl", "urkl") or name == "rpg"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", RULES)
def test_coefficients_are_the_textbook_ones(name, estimator):
    if estimator == "differentiable" and name in ("truncate", "unweighted", "taper"):
        pytest.raises(ValueError, PolicyLoss, "none", 0.0, estimator, RULES[name])
        return
    logp, old, ref, mask, a = batch()
    for divergence in ("none", *EXACT, "k1", "k2", "k3"):
        published = kl_is_inside(name, divergence, estimator)
        for kl_in_clip in {None, False, published}:
            leaf = logp.clone().requires_grad_()
            loss = PolicyLoss(divergence, BETA, estimator, RULES[name], reduction="none", kl_in_clip=kl_in_clip)
            assert loss.kl_inside == (published if kl_in_clip is None else kl_in_clip)
            (got,) = torch.autograd.grad(loss(leaf, old, a, mask, ref).loss.sum(), leaf)
            expected = torch.zeros_like(got)
            for i, t in mask.nonzero().tolist():
                w, v = float((logp - old)[i, t].exp()), float((ref - old)[i, t].exp())
                numbers = (float(a[i, t]), w, v, float((logp - ref)[i, t]))
                expected[i, t] = textbook(name, divergence, estimator, loss.kl_inside, *numbers)
            close(got, expected)
        if not published:
            with pytest.raises(ValueError):
                PolicyLoss(divergence, BETA, estimator, RULES[name], kl_in_clip=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_to_go_stands_outside_the_clip(estimator):
    logp, old, ref, mask, a = batch()
    loss = PolicyLoss("urkl", BETA, estimator, clip.RPGClip(), reduction="none", kl_to_go=True)
    assert not loss.kl_inside
    parts = []
    for one in (loss, loss.replace(divergence="none", kl_to_go=False), loss.replace(clip=None)):
        leaf = logp.clone().requires_grad_()
        rewarded = a if one is not parts and one.clip is not None else torch.zeros_like(a)
        parts.append(torch.autograd.grad(one(leaf, old, rewarded, mask, ref).loss.sum(), leaf)[0])
    close(parts[0], parts[1] + parts[2])


def test_a_cap_on_the_ratio_inside_the_kl_term():
    """CPGD: c = −A·1{in} + α·min(r − 1, 2), the cap of r being 3."""
    logp, old, _, mask, a = batch()
    loss = PolicyLoss("ufkl", BETA, "reinforce", clip.LogBox(None, None), reduction="none", kl_ratio_cap=3.0)
    leaf = logp.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(leaf, old, a, mask).loss.sum(), leaf)
    w = (logp - old).exp()
    assert (w[mask] > 3).any()
    close(got, (-a + BETA * (w - 1).clamp(max=2)) * mask)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bounded_exponents_keep_their_gradient(estimator):
    x = tensor(-3.0, -1.0, 2.0, 5.0).requires_grad_()
    y = bounded(x, 2.0)
    close(y.detach(), tensor(-2, -1, 2, 2))
    close(bounded(x.detach(), 2.0), tensor(-2, -1, 2, 2))
    close(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))
    logp, old, ref, mask = (
        tensor([-1.0, -9.0, -2.0]),
        tensor([-5.0, -1.0, -2.5]),
        tensor([-9, -0.5, -1]),
        torch.ones(1, 3),
    )
    leaf = logp.clone().requires_grad_()
    loss = PolicyLoss("ufkl", BETA, estimator, reduction="none", max_log_ratio=3.0)
    (got,) = torch.autograd.grad(loss(leaf, old, tensor(2.0), mask, ref).loss.sum(), leaf)
    w, v = (logp - old).clamp(-3, 3).exp(), (ref - old).clamp(-3, 3).exp()
    if estimator == "reinforce":
        close(got, -2 * w + BETA * (w - v))
    assert (got[:, :2] != 0).all()
    assert PolicyLoss().max_log_ratio == 20
    assert PolicyLoss().beta == 1e-4  # RPG, section 5


def test_keep_cuts_the_gradient_and_not_the_value():
    logp, old, ref, mask, a = batch()
    leaf, keep = logp.clone().requires_grad_(), torch.arange(5) % 2 == 0
    loss = PolicyLoss("urkl", BETA, "differentiable", reduction="none")
    plain, kept = loss(leaf, old, a, mask, ref).loss, loss(leaf, old, a, mask, ref, keep=keep.expand(6, 5)).loss
    close(plain, kept)
    close(*(torch.autograd.grad(x.sum(), leaf)[0] for x in (kept, (plain * keep))))
    with pytest.raises(ValueError, match="keep"):
        loss(leaf, old, a, mask, ref, keep=keep)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_what_is_under_the_mask_is_nothing(level, estimator):
    logp, old, ref, mask, a = batch()
    a = a.masked_fill(~mask, 0) if level == "token" else a[:, 0]
    for options in ({}, {"control_variate": True}, {"kl_to_go": level != "sequence-mean"}):
        loss = PolicyLoss("urkl", BETA, estimator, level=level, reduction="none", **options)
        results = []
        for garbage in (None, 0.0, -4.0, float("-inf"), float("nan")):
            given = [x if garbage is None else x.masked_fill(~mask, garbage) for x in (logp, old, ref)]
            leaf = given[0].clone().requires_grad_()
            value = loss(leaf, given[1], a, mask, given[2]).loss
            results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
        for value, gradient in results[1:]:
            close(value, results[0][0])
            close(gradient, results[0][1])
        assert (results[0][1][~mask] == 0).all()
        assert (results[0][0][~mask if level == "token" else ~mask.any(-1)] == 0).all()


def test_the_control_variate_is_left_alone_where_the_others_say_nothing():
    """Fitted on others that weigh a millionth, c would be rounding error: it is zero. And alone there is nobody to ask."""
    old, mask = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1)
    loss = PolicyLoss("none", 0.0, reduction="none", control_variate=True)
    for log_w, fitted in (
        ([[0.0], [8.0]], [True, False]),
        ([[0.0], [-1.0]], [True, True]),
        ([[1.0], [6.5]], [True, True]),
    ):
        leaf = torch.tensor(log_w, dtype=torch.float64).requires_grad_()
        (c,) = torch.autograd.grad(loss(leaf, old, tensor(3.0, 5.0), mask).loss.sum(), leaf)
        w = leaf.detach().exp()
        baseline = tensor(5.0 if fitted[0] else 0.0, 3.0 if fitted[1] else 0.0).unsqueeze(-1)
        close(c, -w * (tensor([3.0], [5.0]) - baseline))
    leaf = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    (c,) = torch.autograd.grad(loss(leaf, old[:1], tensor(3.0), mask[:1]).loss.sum(), leaf)
    close(c, tensor([-3.0]))


# ---- samplers that are not the trainer ------------------------------------------------------------------------------


def test_mismatch_weights():
    rho = tensor(0.0, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 5.5)
    close(Mismatch().weight(rho), rho)
    close(TIS().weight(rho), tensor(0, 0.25, 0.5, 1, 2, 2, 2, 2))
    close(IcePop().weight(rho), tensor(0, 0, 0.5, 1, 2, 2.5, 5, 0))
    close(MIS().weight(rho), tensor(0, 0.25, 0.5, 1, 2, 0, 0, 0))
    close(MIS(low=0.5).weight(rho), tensor(0, 0, 0.5, 1, 2, 0, 0, 0))
    assert (MIS().level, MIS().low, IcePop().level) == ("sequence", 0.0, "token")
    log_rho, mask = tensor([1.0, 2.0, 9.0], [-3.0, 9.0, 9.0]), tensor([1, 1, 0], [1, 0, 0])
    close(Mismatch("sequence")(log_rho, mask, 2.5), tensor(2.5, -2.5).exp())
    close((Mismatch("token")(log_rho, mask, 2.5) * mask), log_rho.clamp(-2.5, 2.5).exp() * mask)


def test_off_policy_sequence_masking():
    """Dropped if A < 0 and mean_t(log μ − log π) > δ."""
    mask = tensor([1, 1, 0], [1, 1, 1])
    drift = tensor([0.5, 0.5, 9.0], [0.75, 0.75, 0.0])  # means 0.5 and 0.5
    for delta, dropped in ((0.49, True), (0.5, False), (0.51, False)):
        rule = SequenceMask(delta=delta)
        assert rule.drop(drift, tensor(-0.5, -2.0), mask).tolist() == [dropped, dropped]
        assert rule.drop(drift, tensor(0.0, 0.5), mask).tolist() == [False, False]
        per_token = tensor([-1, 0.5, -9], [1, 1, -1])  # means -0.25 and 0.33
        assert rule.drop(drift, per_token, mask).tolist() == [dropped, False]
    assert SequenceMask().delta == 0.1
    close(SequenceMask().weight(tensor(0.2, 7.0)), tensor(1, 1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_mismatch_rule_weighs_the_whole_loss(level, estimator):
    logp, old, ref, mask, a = batch()
    rollout, a = (old + 0.5 * ref + 0.8).masked_fill(~mask, -3.0), a[:, 0]
    plain = PolicyLoss("rkl", BETA, estimator, level=level, reduction="none")
    rho = ((old - rollout) * mask).double()
    total, every = rho.sum(-1), plain(logp, old, a, mask, ref).loss
    row = (lambda x: x.unsqueeze(-1)) if level == "token" else (lambda x: x)
    got = plain.replace(mismatch=TIS("sequence", 1.5))(logp, old, a, mask, ref, rollout).loss
    close(got, every * row(total.exp().clamp(max=1.5)))
    if level == "token":
        got = plain.replace(mismatch=IcePop(low=0.9, high=1.3))(logp, old, a, mask, ref, rollout).loss
        close(got, every * torch.where((rho.exp() >= 0.9) & (rho.exp() <= 1.3), rho.exp(), 0.0))
    else:
        with pytest.raises(ValueError, match="mismatch level"):
            plain.replace(mismatch=TIS())(logp, old, a, mask, ref, rollout)
    for given in (None, rollout):
        mu = old if given is None else given
        drift = ((mu - logp) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        kept = ~((a < 0) & (drift > 0.2) & mask.any(-1))
        got = plain.replace(mismatch=SequenceMask(delta=0.2))(logp, old, a, mask, ref, given).loss
        close(got, every * row(kept))
        assert 0 < int((~kept).sum()) < 5
    with pytest.raises(ValueError, match="rollout_logp"):
        plain.replace(mismatch=TIS("sequence"))(logp, old, a, mask, ref)


# ---- reductions -----------------------------------------------------------------------------------------------------


def test_reductions_by_hand():
    logp, old, ref, mask, a = batch()
    each = PolicyLoss("urkl", BETA, reduction="none")(logp, old, a, mask, ref).loss
    length = [5, 3, 1, 4, 2]
    by_row = [float(each[i, :n].sum()) for i, n in enumerate(length)]
    expected = {
        "token-mean": sum(by_row) / 15,
        "seq-mean-token-mean": sum(x / n for x, n in zip(by_row, length, strict=True)) / 5,
        "seq-mean-token-sum": sum(by_row) / 5,
        "constant": sum(by_row) / 5 / 7,
    }
    counts = {"token-mean": 15, "seq-mean-token-mean": 5, "seq-mean-token-sum": 5, "constant": 35}
    for reduction, value in expected.items():
        loss = PolicyLoss("urkl", BETA, reduction=reduction, constant=7.0 if reduction == "constant" else None)
        assert float(loss(logp, old, a, mask, ref).loss) == pytest.approx(value, rel=1e-6)
        assert float(loss.count(mask)) == counts[reduction]
        assert float(loss.step_denominator(mask, mask[:2])) == {15: 23, 5: 7, 35: 49}[counts[reduction]]
        halved = loss(logp, old, a, mask, ref, denominator=2.0 * counts[reduction]).loss
        assert float(halved) == pytest.approx(value / 2, rel=1e-6)
        for wrong in (0.0, -1.0):
            with pytest.raises(ValueError, match="denominator"):
                loss(logp, old, a, mask, ref, denominator=wrong)
    assert float(PolicyLoss(reduction="none").count(mask)) == 1
    sequence = PolicyLoss("urkl", BETA, level="sequence", reduction="seq-mean-token-mean")
    rows = sequence.replace(reduction="none")(logp, old, a[:, 0], mask, ref).loss[:5]
    expected = sum(float(x) / n for x, n in zip(rows, length, strict=True)) / 5
    assert float(sequence(logp, old, a[:, 0], mask, ref).loss) == pytest.approx(expected, rel=1e-6)


def test_the_denominator_of_several_ranks():
    mask, loss = torch.ones(2, 3), PolicyLoss()
    with (
        mock.patch.object(torch.distributed, "is_initialized", lambda: True),
        mock.patch.object(torch.distributed, "all_reduce", lambda x: x.mul_(4)),
        mock.patch.object(torch.distributed, "get_world_size", lambda: 8),
    ):
        assert float(loss.step_denominator(mask)) == 3.0
        assert float(loss.step_denominator(mask, average_over_ranks=False)) == 24.0
    with pytest.raises(ValueError, match="step_denominator"):
        loss.step_denominator()


def test_an_empty_batch_needs_a_denominator():
    logp, nothing = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="mask"):
        PolicyLoss()(logp, nothing, torch.ones(2), nothing)
    for reduction in ("token-mean", "seq-mean-token-mean"):
        loss = PolicyLoss(reduction=reduction)(logp, nothing, torch.ones(2), nothing, denominator=4.0).loss
        assert loss == 0
        assert (torch.autograd.grad(loss, logp)[0] == 0).all()


# ---- the KL over the vocabulary -------------------------------------------------------------------------------------


def test_vocabulary_kl_by_hand():
    rng = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(2, 2, 3, 4, generator=rng, dtype=torch.float64)
    p, q = logits.softmax(-1), ref.softmax(-1)
    for divergence, expected in {"rkl": p * (p / q).log(), "fkl": q * (q / p).log()}.items():
        for name in (divergence, f"u{divergence}"):
            close(vocabulary_kl(logits, ref, name), expected.sum(-1))
            low = vocabulary_kl(logits.bfloat16(), ref.bfloat16(), name)
            assert low.dtype == torch.float32
            close(low.double(), expected.sum(-1), 0.05)
            assert vocabulary_kl(logits.float(), ref, name).dtype == torch.float32
    with pytest.raises(ValueError, match="shape"):
        vocabulary_kl(logits, ref[:1], "rkl")


@pytest.mark.parametrize("divergence", EXACT)
def test_a_token_masked_out_of_the_vocabulary_adds_nothing(divergence):
    logits, ref = tensor([[1.0, 2.0, 0.5]]).requires_grad_(), tensor([[1.5, 2.0, 0.0]])
    removed = tensor([[-INF]])
    whole = vocabulary_kl(logits, ref, divergence)
    wider = vocabulary_kl(torch.cat([logits, removed], -1), torch.cat([ref, removed], -1), divergence)
    close(wider, whole)
    close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (wider, whole)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_exact_kl_replaces_the_sampled_one(estimator):
    logp, old, ref, mask, a = batch()
    loss = PolicyLoss("rkl", BETA, estimator, reduction="none")
    exact_kl = torch.full_like(logp, 2.0).masked_fill(~mask, float("nan"))
    reward = loss.replace(divergence="none")(logp, old, a, mask, ref).loss
    close(loss(logp, old, a, mask, ref, exact_kl=exact_kl).loss, reward + 2 * BETA * mask.double())
    close(loss.replace(beta=0.0)(logp, old, a, mask, ref, exact_kl=exact_kl).loss, reward)
    with pytest.raises(ValueError, match="level"):
        loss.replace(level="sequence")(logp, old, a[:, 0], mask, ref, exact_kl=exact_kl)
