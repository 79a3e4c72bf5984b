"""Where the gradient is cut, against the paper's pseudo-code read line by line and against textbook formulas."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rpg import PolicyLoss, clip, vocabulary_kl

EPS1, EPS2, C = 0.2, 0.28, 3.0
INF = math.inf
exact = settings(max_examples=60, deadline=None)


def number(low, high):
    return st.floats(low, high, allow_nan=False)


nonzero = number(-2, 2).map(lambda x: x + math.copysign(1e-3, x))
# log π, log w = log π/old, log u = log π/ref, A
sample = st.tuples(number(-6, -0.01), number(-2.5, 2.5), number(-2.5, 2.5), nonzero)
samples = st.lists(sample, min_size=1, max_size=6)
betas = st.sampled_from([1e-4, 0.1, 0.7])


def gradient(loss, logp, *args, **kwargs):
    """d loss / d log π of every token."""
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss.sum(), logp)[0]


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def columns(drawn, same_ref):
    """The drawn samples as float64 vectors: logp, old, ref, advantage."""
    logp, log_w, log_u, advantage = f64(drawn).unbind(-1)
    old = logp - log_w
    return logp, old, (old if same_ref else logp - log_u), advantage


# ---- the paper's algorithms, one sample at a time --------------------------------------------------------------------


def algorithm_1(kind, logp, old, ref, advantage, beta, eps1=EPS1, eps2=EPS2, c=C):
    """Lines 10 to 23 of Algorithm 1; autograd flows through w and through the advantage analogue."""
    w = torch.exp(logp - old)
    log_u = logp - ref
    a_hat = advantage - beta * (log_u + 1) if kind == "rkl" else advantage - beta * log_u
    loss_term1 = -w * a_hat
    w_clipped = torch.clip(w, 1 - eps1, 1 + eps2)
    loss_term2 = -w_clipped * a_hat
    l_clip = torch.max(loss_term1, loss_term2)
    if a_hat >= 0:
        return l_clip
    return torch.min(l_clip, -c * a_hat)


def algorithm_2(kind, logp, old, ref, advantage, beta, eps1=EPS1, eps2=EPS2, c=C):
    """Lines 10 to 36 of Algorithm 2; SG is detach. The KL component is the part of ω beside w·R."""
    sg = torch.Tensor.detach
    w = torch.exp(logp - old)
    log_u, v = logp - ref, torch.exp(ref - old)
    ell = -logp
    component = {"fkl": v, "ufkl": v - w, "rkl": -w * (log_u + 1), "urkl": -w * log_u}[kind]
    c_kl = beta * component
    a_effective = advantage + sg(c_kl) / sg(w)
    psi = a_effective * ell
    if psi >= 0:
        w_high = 1 + eps2
        if w < w_high:
            return psi * sg(w)
        a_high = advantage + sg(c_kl) / w_high
        return a_high * sg(ell) * w_high
    w_low = 1 - eps1
    if w <= w_low:
        a_low = advantage + sg(c_kl) / w_low
        return a_low * sg(ell) * w_low
    if w < c:
        return psi * sg(w)
    return advantage * sg(ell) * c + sg(c_kl) * sg(ell)


def reference_gradients(algorithm, kind, columns, beta, **bounds):
    out = []
    for logp, old, ref, advantage in zip(*columns, strict=True):
        logp = logp.clone().requires_grad_()
        loss = algorithm(kind, logp, old, ref, advantage, beta, **bounds)
        out.append(torch.autograd.grad(loss, logp)[0] if loss.requires_grad else torch.zeros_like(logp))
    return torch.stack(out)


def ours(kind, estimator, rule, columns, beta, level, same_ref, **options):
    """The library's coefficient on each sample; at sequence level a sample is a response of three tokens."""
    logp, old, ref, advantage = columns
    loss = PolicyLoss(kind, beta, estimator, rule, level=level, reduction="none", **options)
    if level == "token":
        args = [x.unsqueeze(-1) for x in (logp, old, advantage)]
        ref = None if same_ref else ref.unsqueeze(-1)
        return gradient(loss, *args, torch.ones_like(args[0]), ref_logp=ref).squeeze(-1)
    share = f64([0.5, 0.125, 0.375])  # dyadic: the tokens of a response add up to its total exactly
    logp, old, ref = (x.unsqueeze(-1) * share for x in (logp, old, ref))
    c_BT = gradient(loss, logp, old, advantage, torch.ones_like(logp), ref_logp=None if same_ref else ref)
    torch.testing.assert_close(c_BT, c_BT[:, :1].expand_as(c_BT))  # every token of a response gets the same
    return c_BT[:, 0]


@pytest.mark.parametrize("same_ref", [True, False], ids=["ref=old", "ref≠old"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["rkl", "urkl"])
@given(drawn=samples, beta=betas)
@exact
def test_algorithm_1_as_printed_and_its_gradient_inside_the_box(kind, level, same_ref, drawn, beta):
    """``through_advantage`` is the printed algorithm; without it c = −ω, and nothing where the clip cuts."""
    data = columns(drawn, same_ref)
    logp, old, ref, advantage = data
    a_hat = advantage - beta * (logp - ref + (kind == "rkl"))
    w = (logp - old).exp()
    near_tie = torch.stack([a_hat, w - (1 - EPS1), w - (1 + EPS2), w - C]).abs().min()
    assume(near_tie > 1e-9)  # max and min of equal numbers: autograd's choice is arbitrary there
    expected = reference_gradients(algorithm_1, kind, data, beta)
    how = ("differentiable", clip.DualClip(EPS1, EPS2, C), data, beta, level, same_ref)
    got = ours(kind, *how, through_advantage=True)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    inside = torch.where(a_hat >= 0, w < 1 + EPS2, (w > 1 - EPS1) & (w < C))
    torch.testing.assert_close(ours(kind, *how), -w * a_hat * inside, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("same_ref", [True, False], ids=["ref=old", "ref≠old"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["fkl", "ufkl", "rkl", "urkl"])
@given(drawn=samples, beta=betas)
@exact
def test_rpg_clip_is_algorithm_2(kind, level, same_ref, drawn, beta):
    data = columns(drawn, same_ref)
    logp, old, ref, advantage = data
    w, v, log_u = (logp - old).exp(), (ref - old).exp(), logp - ref
    omega_over_w = advantage + beta * {"fkl": v / w, "ufkl": v / w - 1, "rkl": -log_u - 1, "urkl": -log_u}[kind]
    assume(torch.stack([omega_over_w, w - (1 - EPS1), w - (1 + EPS2), w - C]).abs().min() > 1e-9)
    expected = reference_gradients(algorithm_2, kind, data, beta)
    for estimator in ("reinforce", "differentiable"):  # RPGClip cuts the whole sample in both styles
        got = ours(kind, estimator, clip.RPGClip(EPS1, EPS2, C), data, beta, level, same_ref)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["rkl", "urkl"])
def test_algorithm_1_loss_value_and_its_leak(kind):
    """The loss itself, also exactly on a bound; and what the paper lets through on cut samples: β·(the bound)."""
    logp, old = f64([-1.0, -1.0, -1.0, -1.0]), f64([-2.0, -0.5, -3.5, -1.1])
    advantage, beta = f64([1.0, -1.0, -1.0, 0.5]), 0.1
    rule = clip.DualClip(EPS1, EPS2, C)
    loss = PolicyLoss(kind, beta, "differentiable", rule, reduction="none", through_advantage=True)
    got = loss(logp[:, None], old[:, None], advantage, torch.ones(4, 1)).loss[:, 0]
    expected = [algorithm_1(kind, *x, beta) for x in zip(logp, old, old, advantage, strict=True)]
    torch.testing.assert_close(got, torch.stack(expected))
    c = gradient(loss, logp[:, None], old[:, None], advantage, torch.ones(4, 1))[:, 0]
    torch.testing.assert_close(c[:3], f64([beta * (1 + EPS2), beta * (1 - EPS1), beta * C]))
    w, shift = math.exp(0.1), beta * 1.0 if kind == "rkl" else 0.0
    assert float(c[3]) == pytest.approx(-w * (0.5 - beta * 0.1 - shift) + beta * w)  # uncut: −w·Â + β·w


@pytest.mark.parametrize("rule", [clip.RPGClip, clip.DualClip])
@pytest.mark.parametrize(
    ("log_w", "advantage", "name"), [(0.25, 1.0, "high"), (-0.25, -1.0, "low"), (1.5, -1.0, "c")], ids=str
)
def test_a_ratio_exactly_on_its_bound_is_cut(log_w, advantage, name, rule):
    logp, old = f64([[-1.0]]), f64([[-1.0 - log_w]])
    w = float((logp - old).exp())
    beyond = math.nextafter(w, 0 if name == "low" else INF)
    for bound, cut in ((w, True), (beyond, False)):  # no rounding: w − 1 is exact for w in [0.5, 2]
        options = {"low": 0.5, "high": 0.5, "c": 8.0} | {name: {"high": bound - 1, "low": 1 - bound, "c": bound}[name]}
        loss = PolicyLoss("urkl", 1e-3, "reinforce", rule(**options))
        c = gradient(loss, logp, old, f64([advantage]), torch.ones(1, 1))
        assert float(c) == (0.0 if cut else pytest.approx(-w * (advantage - 1e-3 * log_w)))
        c = gradient(
            PolicyLoss("none", 0, "differentiable", rule(**options)), logp, old, f64([advantage]), torch.ones(1, 1)
        )
        assert float(c) == (0.0 if cut else pytest.approx(-w * advantage))
        below, above = rule(**options).outside(f64([w]), f64([advantage]))
        assert (bool(below), bool(above)) == (cut and name == "low", cut and name != "low")
        assert bool(rule(**options).keep(f64([w]), f64([advantage]))) is not cut


def test_the_sign_that_counts_is_the_regularised_one():
    """A = 0.05, Â = A − β·log u = −0.05: the raw sign would cut at 1+ε₂ and not at c, the paper does the reverse."""
    w = f64([[1.5]])
    logp = f64([[-1.0]])
    loss = PolicyLoss("urkl", 1.0, "reinforce", clip.RPGClip(EPS1, EPS2, C))
    c = gradient(loss, logp, logp - w.log(), f64([0.05]), torch.ones(1, 1), ref_logp=logp - 0.1)
    assert float(c) == pytest.approx(1.5 * 0.05)
    c = gradient(loss, logp, logp - w.log(), f64([-0.05]), torch.ones(1, 1), ref_logp=logp + 0.1)
    assert float(c) == 0.0


# ---- every rule against its formula ----------------------------------------------------------------------------------

pairs = st.lists(st.tuples(number(-3, 3), nonzero), min_size=1, max_size=12)


def w_and_advantage(drawn, *ties):
    log_w, advantage = f64(drawn).unbind(-1)
    w = log_w.exp()
    assume(all(float((w - tie).abs().min()) > 1e-9 for tie in ties))
    return log_w.requires_grad_(), log_w.exp(), advantage


@given(drawn=pairs, low=st.sampled_from([0.1, 0.2]), high=st.sampled_from([0.2, 0.28]))
@exact
def test_box_is_ppo(drawn, low, high):
    log_w, w, a = w_and_advantage(drawn, 1 - low, 1 + high)
    textbook = -torch.minimum(w * a, w.clamp(1 - low, 1 + high) * a)
    rule = clip.Box(low, high)
    torch.testing.assert_close(-rule.surrogate(w, a) * a, textbook)
    (expected,) = torch.autograd.grad(textbook.sum(), log_w)
    torch.testing.assert_close(-rule.weight(w, a) * a, expected)


@given(drawn=pairs)
@exact
def test_dual_clip_is_ye_et_al(drawn):
    log_w, w, a = w_and_advantage(drawn, 0.8, 1.28, C)
    ppo = torch.minimum(w * a, w.clamp(1 - EPS1, 1 + EPS2) * a)
    objective = torch.where(a < 0, torch.maximum(ppo, C * a), ppo)
    for rule in (clip.DualClip(EPS1, EPS2, C), clip.RPGClip(EPS1, EPS2, C)):
        torch.testing.assert_close(rule.surrogate(w, a) * a, objective)
        (expected,) = torch.autograd.grad(objective.sum(), log_w, retain_graph=True)
        torch.testing.assert_close(rule.weight(w, a) * a, expected)


@given(drawn=pairs)
@exact
def test_log_box_is_cpgd(drawn):
    log_w, w, a = w_and_advantage(drawn, 0.8, 1.3)
    lc = torch.where(a > 0, log_w.clamp(max=math.log(1.3)), log_w.clamp(min=math.log(0.8)))
    rule = clip.LogBox(0.2, 0.3)
    torch.testing.assert_close(rule.surrogate(w, a), lc)
    (expected,) = torch.autograd.grad(lc.sum(), log_w)
    torch.testing.assert_close(rule.weight(w, a), expected)


def test_log_box_exactly_on_its_bound():
    log_w = f64([0.25, -0.25]).requires_grad_()
    w = log_w.exp()
    rule = clip.LogBox(low=1 - float(w[1].detach()), high=float(w[0].detach()) - 1)
    (slope,) = torch.autograd.grad(rule.surrogate(w, f64([1.0, -1.0])).sum(), log_w)
    assert slope.tolist() == [0.0, 0.0]


@given(drawn=pairs)
@exact
def test_truncating_rules_hold_the_ratio(drawn):
    _, w, a = w_and_advantage(drawn)
    for low, high in ((0.2, 0.28), (None, 4.0), (0.3, None)):
        expected = [min(max(x, 0 if low is None else 1 - low), INF if high is None else 1 + high) for x in w.tolist()]
        torch.testing.assert_close(clip.Truncate(low, high).weight(w, a), f64(expected))
    torch.testing.assert_close(clip.Unweighted().weight(w, a), torch.ones_like(w))
    taper = [1.0 if y >= 0 else min(x, 1.0) for x, y in zip(w.tolist(), a.tolist(), strict=True)]
    torch.testing.assert_close(clip.Taper().weight(w, a), f64(taper))


def test_sigmoid_is_sapo():
    w, a = f64([0.5, 1.0, 2.0, 0.5, 1.0, 2.0]), f64([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    expected = [4 / t / (1 + math.exp(-t * (x - 1))) for t in (2.0, 0.5) for x in (0.5, 1.0, 2.0)]
    torch.testing.assert_close(clip.Sigmoid(2.0, 0.5).surrogate(w, a), f64(expected))
    assert clip.Sigmoid().limits() == ((0.0, INF), (0.0, INF))
    assert clip.Sigmoid() == clip.Sigmoid(1.0, 1.05)
    torch.testing.assert_close(clip.Sigmoid().weight(w[[1, 4]], a[[1, 4]]), f64([1.0, 1.0]))  # at w = 1 it is PPO
    zero = clip.Sigmoid(2.0, 3.0).surrogate(f64([2.0]), f64([0.0]))  # "τ = 1 for A > 0, 1.05 otherwise"
    assert float(zero) == pytest.approx(4 / 3 / (1 + math.exp(-3)))


WITH_SURROGATE = [
    clip.Box(),
    clip.Box(None, 0.2),
    clip.Box(0.2, None),
    clip.DualClip(),
    clip.DualClip(c=None),
    clip.RPGClip(c=2.0),
    clip.KL3(0.05),
    clip.KL3(0.3, "k3-inverse", c=5.0),
    clip.LogBox(),
    clip.Sigmoid(),
]


@pytest.mark.parametrize("rule", WITH_SURROGATE, ids=str)
@given(drawn=pairs)
@exact
def test_the_weight_is_the_derivative_of_the_surrogate(rule, drawn):
    log_w, w, a = w_and_advantage(drawn)
    (slope,) = torch.autograd.grad(rule.surrogate(w, a).sum(), log_w, allow_unused=True)
    torch.testing.assert_close(rule.weight(w, a), torch.zeros_like(w) if slope is None else slope)


def test_published_bounds():
    assert clip.Box().bounds() == (0.8, 1.2)
    assert clip.DualClip().limits() == clip.RPGClip().limits() == ((0.0, 1.28), (0.8, 10.0))
    assert clip.Truncate().limits() == ((0.8, 1.28), (0.8, 1.28))
    assert clip.Box(None, None).limits() == ((0.0, INF), (0.0, INF))
    assert clip.DualClip(c=None).limits() == ((0.0, 1.28), (0.8, INF))
    assert clip.Unweighted().limits() == ((1.0, 1.0), (1.0, 1.0))
    assert clip.Taper().limits() == ((1.0, 1.0), (0.0, 1.0))
    assert clip.KL3(c=4.0).limits().negative[1] == 4.0
    assert clip.KL3() == clip.KL3(0.05, "k3", None)
    for rule in (clip.Truncate(), clip.Unweighted(), clip.Taper()):
        with pytest.raises(TypeError, match="no differentiable form"):
            rule.surrogate(f64([1.0]), f64([1.0]))


def test_the_kl_inside_a_truncating_rule_sees_the_truncated_ratio():
    logp, a, beta = f64([[-1.0, -1.0]]), f64([2.0]), 0.1
    log_w, log_u = f64([[1.0, -1.0]]), f64([[0.3, -0.2]])
    for inside in (True, False, None):
        loss = PolicyLoss("rkl", beta, "reinforce", clip.Truncate(), reduction="none", kl_in_clip=inside)
        c = gradient(loss, logp, logp - log_w, a, torch.ones(1, 2), ref_logp=logp - log_u)
        held = f64([[1.28, 0.8]])
        kl_ratio = log_w.exp() if inside is False else held
        kl_log_u = log_u + kl_ratio.log() - log_w
        torch.testing.assert_close(c, -(held * 2.0 - beta * kl_ratio * (kl_log_u + 1)))


def test_hard_truncation_is_remark_f_2():
    """w̄ stands for w in log w too: ω̄ = w̄(A − β·log w̄), here 1.28·(0.2 − 0.5·log 1.28)."""
    loss = PolicyLoss("urkl", 0.5, "reinforce", clip.Truncate(0.2, 0.28), reduction="none")
    c = gradient(loss, f64([[-0.5]]), f64([[-0.5 - math.log(6)]]), f64([0.2]), torch.ones(1, 1))
    assert float(c) == pytest.approx(-0.098, abs=1e-3)
    for log_w in (30.0, -30.0):  # past the bound of exponents too
        bound = math.log(1.28 if log_w > 0 else 0.8)
        logp, old = f64([[-1.0]]), f64([[-1.0 - log_w]])
        c = gradient(loss, logp, old, f64([0.2]), torch.ones(1, 1), ref_logp=old + 3.0)
        assert float(c) == pytest.approx(-math.exp(bound) * (0.2 - 0.5 * (bound - 3.0)))


# ---- TrustRegion: probabilities, not ratios --------------------------------------------------------------------------


def coins(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


MEASURED = {"tv": lambda p, q: abs(p - q), "kl": coins, "kl-reverse": lambda p, q: coins(q, p)}


@pytest.mark.parametrize("measure", MEASURED)
def test_a_trust_region_cuts_what_is_outside_and_moves_away(measure):
    p, q = f64([0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.9, 1e-3]), f64([0.4, 0.4, 0.2, 0.2, 0.55, 0.9, 0.5, 0.5])
    sign = f64([0.5, -0.5, 0.5, -0.5, 0.5, 0.5, -0.5, 0.5])
    rule = clip.TrustRegion(0.12, measure)
    distance = [MEASURED[measure](x, y) for x, y in zip(p.tolist(), q.tolist(), strict=True)]
    away = [(y > x) == (s > 0) for x, y, s in zip(p.tolist(), q.tolist(), sign.tolist(), strict=True)]
    kept = [not (d > 0.12 and out) for d, out in zip(distance, away, strict=True)]
    seen = clip.Seen(p.log())
    torch.testing.assert_close(rule.distance(q / p, seen), f64(distance))
    assert rule.keep(q / p, sign, seen).tolist() == kept
    assert {True, False} == set(kept)
    below, above = rule.outside(q / p, sign, seen)
    assert below.tolist() == [not k and s < 0 for k, s in zip(kept, sign.tolist(), strict=True)]
    assert above.tolist() == [not k and s > 0 for k, s in zip(kept, sign.tolist(), strict=True)]
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss("none", 0, estimator, rule, reduction="none")
        c = gradient(loss, q.log()[:, None], p.log()[:, None], sign, torch.ones(8, 1))[:, 0]
        torch.testing.assert_close(c, -sign * q / p * f64(kept))
    assert rule.keep(f64([1.0]), f64([0.0]), clip.Seen(f64([0.0]))).tolist() == [True]  # a certain token
    assert rule.keep(f64([0.4]), f64([-0.5]), clip.Seen(f64([0.0]))).tolist() == [False]
    assert rule.keep(f64([1.4]), f64([0.0]), clip.Seen(f64([-0.5]))).tolist() == [False]  # A = 0 counts as positive
    assert math.isfinite(float(rule.distance(f64([2.0]), clip.Seen(f64([-math.log(2)])))))
    assert clip.TrustRegion(0.25).keep(f64([2.0]), f64([1.0]), clip.Seen(f64([0.25]).log())).tolist() == [True]
    far = clip.TrustRegion(0.01, "state-kl")  # whatever the token's own ratio, what is at 1 moves nowhere
    one = clip.Seen(f64([-1.0, -1.0]), f64([1.0, 1.0]))
    assert far.keep(f64([1.0, 1.0]), f64([0.5, -0.5]), one).tolist() == [True, True]
    assert far.keep(f64([1.1, 0.9]), f64([0.5, -0.5]), one).tolist() == [False, False]
    assert clip.TrustRegion() == clip.TrustRegion(0.15, "tv")
    assert clip.TrustRegion().limits() == clip.SoftWeight().limits() == ((0.0, INF), (0.0, INF))


def test_a_trust_region_of_the_whole_vocabulary():
    """KL_t ≤ δ on the state's own distribution, which the call is given."""
    logits, old_logits = f64([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]]), f64([[[0.0, 1.0, 1.9], [0.0, 0.0, 2.0]]])
    logp, old = (x.log_softmax(-1)[..., 0] for x in (logits, old_logits))
    state_kl = vocabulary_kl(old_logits, logits)
    loss = PolicyLoss("none", 0, "differentiable", clip.TrustRegion(0.05, "state-kl"), reduction="none")
    c = gradient(loss, logp, old, f64([1.0]), torch.ones(1, 2), state_kl=state_kl)
    assert (float(c[0, 1]), state_kl[0, 1] > 0.05, logp[0, 1] > old[0, 1]) == (0.0, True, True)
    assert float(c[0, 0]) == pytest.approx(-float((logp - old).exp()[0, 0]))
    with pytest.raises(ValueError, match="state_kl is needed"):
        loss(logp, old, f64([1.0]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="old log-probabilities"):
        clip.TrustRegion().keep(f64([1.0]), f64([1.0]))


def test_soft_weight_is_vespo():
    w, a = f64([0.2, 1.5, 3.0, 0.2, 1.5, 3.0]), f64([0.5, 0.0, 0.5, -0.5, -0.5, -0.5])
    expected = [x**k * math.exp(r * (1 - x)) for k, r in ((2, 3), (3, 2)) for x in (0.2, 1.5, 3.0)]
    torch.testing.assert_close(clip.SoftWeight().weight(w, a), f64(expected))
