"""What the mutants of test_mutations.py are shown first: every coefficient of every rule, written out per token.

Plain Python from the papers, on one batch whose ratios reach past every limit; then what happens exactly on a limit,
under the mask and at the guards, where a mutant could hide from tests on random numbers.
"""

import inspect
import math
from unittest import mock

import pytest
import torch

from rpg import PolicyLoss, clip, logit_score_sq, vocabulary_kl
from rpg.loss.clip import INF
from rpg.loss.mismatch import SequenceMask
from rpg.loss.objective import Ratios, bounded

BETA = 0.3
EXACT = ("fkl", "rkl", "ufkl", "urkl")
ESTIMATORS = ("reinforce", "differentiable")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def gradient(loss, logp, *args, **kwargs):
    leaf = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, *args, **kwargs).loss.sum(), leaf)[0]


# ---- coefficients ---------------------------------------------------------------------------------------------------

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
TRUNCATING = ("truncate", "unweighted", "taper")
OUTSIDE = ("none", "log-box", "sigmoid", "unweighted", "taper")  # the KL term never stands inside them
LIMITS = {  # where A ≥ 0, where A < 0; KL3 to four digits
    "none": ((0.0, INF), (0.0, INF)),
    "box": ((0.0, 1.3), (0.8, INF)),
    "dual": ((0.0, 1.28), (0.8, 3.0)),
    "rpg": ((0.0, 1.28), (0.8, 3.0)),
    "kl3": ((0.0, 1.3504), (0.7162, INF)),
    "truncate": ((0.8, 1.28), (0.8, 1.28)),
    "unweighted": ((1.0, 1.0), (1.0, 1.0)),
    "taper": ((1.0, 1.0), (0.0, 1.0)),
    "log-box": ((0.0, 1.2), (0.8, INF)),
    "sigmoid": ((0.0, INF), (0.0, INF)),
}


def batch(rows=6, tokens=5):
    """Three policies, the last response without tokens, garbage under the mask."""
    rng = torch.Generator().manual_seed(0)
    logp, old, ref = -torch.rand(3, rows, tokens, generator=rng, dtype=torch.float64) * 2.5
    mask = torch.arange(tokens) < torch.tensor([5, 3, 1, 4, 2, 0])[:, None]
    a = torch.randn(rows, tokens, generator=rng, dtype=torch.float64)
    for x, garbage in ((logp, -7.0), (old, 3.0), (ref, 11.0), (a, 50.0)):
        x[~mask] = garbage
    return logp, old, ref, mask, a


def omega_of_kl(divergence, w, v, log_u):
    """What β multiplies in ω."""
    return {
        "none": 0.0,
        "fkl": v,
        "ufkl": v - w,
        "rkl": -w * (log_u + 1),
        "urkl": -w * log_u,
        "k1": -1.0,
        "abs": -math.copysign(1.0, log_u),
        "k2": -log_u,
        "k3": math.exp(-log_u) - 1,
    }[divergence]


def textbook(name, divergence, inside, printed, a, w, v, log_u):
    """d loss / d log π of one token."""
    kl = BETA * omega_of_kl(divergence, w, v, log_u)
    low, high = LIMITS[name][a < 0]
    if name in TRUNCATING:
        held = min(max(w, low), high)
        held_log_u = log_u + math.log(held / w)
        return -held * a - (BETA * omega_of_kl(divergence, held, v, held_log_u) if inside else kl)
    if not inside:
        gate = 1 / (1 + math.exp(-(1.0 if a > 0 else 1.5) * (w - 1)))
        weight = {"log-box": 1.0, "sigmoid": 4 * gate * (1 - gate) * w}.get(name, w)
        return -a * weight * (low < w < high) - kl
    regularised = a + kl / w
    low, high = LIMITS[name][regularised < 0]
    if not printed:  # the whole sample
        return -(w * a + kl) if low < w < high else 0.0
    # Algorithm 1: −bound·Â beyond a limit, −w·Â inside, and Â = A − β·log u (− β for rkl) has the derivative −β itself
    return BETA * min(max(w, low), high) - (w * regularised if low < w < high else 0.0)


def kl_is_inside(name, divergence, estimator):
    if name in OUTSIDE or divergence not in EXACT:
        return False
    return estimator == "reinforce" or divergence in ("rkl", "urkl") or name == "rpg"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", RULES)
def test_coefficients_are_the_textbook_ones(name, estimator):
    if estimator == "differentiable" and name in TRUNCATING:
        with pytest.raises(ValueError, match="reinforce"):
            PolicyLoss("none", 0.0, estimator, RULES[name])
        return
    logp, old, ref, mask, a = batch()
    for divergence in ("none", *EXACT, "k1", "abs", "k2", "k3"):
        published = kl_is_inside(name, divergence, estimator)
        possible = name not in OUTSIDE and divergence in EXACT
        printable = published and estimator == "differentiable" and divergence in ("rkl", "urkl")
        for kl_in_clip, printed in {(None, False), (False, False), (possible, False), (published, printable)}:
            options = {"kl_in_clip": kl_in_clip, "through_advantage": printed}
            loss = PolicyLoss(divergence, BETA, estimator, RULES[name], reduction="none", **options)
            assert loss.kl_inside == (published if kl_in_clip is None else kl_in_clip)
            got, expected = gradient(loss, logp, old, a, mask, ref), torch.zeros_like(logp)
            for i, t in mask.nonzero().tolist():
                log_w, log_v = float((logp - old)[i, t]), float((ref - old)[i, t])
                numbers = (float(a[i, t]), math.exp(log_w), math.exp(log_v), log_w - log_v)
                expected[i, t] = textbook(name, divergence, loss.kl_inside, printed, *numbers)
            torch.testing.assert_close(got, expected, rtol=1e-4 if name == "kl3" else 1e-11, atol=1e-11)
        if not possible:
            with pytest.raises(ValueError, match="kl_in_clip"):
                PolicyLoss(divergence, BETA, estimator, RULES[name], kl_in_clip=True)


@pytest.mark.parametrize("name", RULES)
def test_limits(name):
    if RULES[name] is not None:
        found = [x for limits in RULES[name].limits() for x in limits]
        assert found == pytest.approx([x for limits in LIMITS[name] for x in limits], abs=5e-5)
        assert RULES[name].bounds() == (found[2], found[1])
        assert 0.0 in found or name in ("truncate", "unweighted")
    assert clip.KL3().limits() == clip.KL3(0.05, "k3").limits()


# ---- exactly on a limit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [clip.DualClip(0.25, 0.5, 4.0), clip.RPGClip(0.25, 0.5, 4.0)])
def test_a_limit_itself_is_cut(rule):
    """RPG Algorithm 2: A ≥ 0 stops once w ≥ 1+ε₂, A < 0 once w ≤ 1−ε₁ and once w ≥ c."""
    w = tensor(0.5, 0.75, 0.76, 1.0, 1.49, 1.5, 3.9, 4.0, 5.0)
    positive = [True, True, True, True, True, False, False, False, False]
    negative = [False, False, True, True, True, True, True, False, False]
    for sign, kept in ((0.5, positive), (0.0, positive), (-0.5, negative)):
        a, leaf = torch.full_like(w, sign), w.clone().requires_grad_()
        assert rule.keep(w, a).tolist() == kept
        close(rule.weight(w, a), w * torch.tensor(kept))
        close(torch.autograd.grad(rule.surrogate(leaf, a).sum(), leaf)[0], torch.tensor(kept).double())
        below, above = rule.outside(w, a)
        assert below.tolist() == [sign < 0 and x <= 0.75 for x in w.tolist()]
        assert above.tolist() == [x >= (1.5 if sign >= 0 else 4.0) for x in w.tolist()]


def test_other_rules_on_their_limits():
    w, leaf = tensor(0.75, 1.5), tensor(0.75, 1.5).requires_grad_()
    for a, kept in ((tensor(1, 1), [1, 0]), (tensor(-1, -1), [0, 1])):
        close(clip.LogBox(0.25, 0.5).weight(w, a), tensor(*kept))
        slope = torch.autograd.grad(clip.LogBox(0.25, 0.5).surrogate(leaf, a).sum(), leaf)[0]
        close(slope, tensor(*kept) / w)
    held = tensor(0.7, 0.75, 1.0, 1.5, 1.6)
    for sign in (1.0, -1.0):  # a truncated ratio that is at its limit already has not been changed
        below, above = clip.Truncate(0.25, 0.5).outside(held, torch.full_like(held, sign))
        assert below.tolist() == [True, False, False, False, False]
        assert above.tolist() == [False, False, False, False, True]
    for a, low in ((0.5, True), (0.0, True), (-0.5, False)):  # Taper holds A ≥ 0 at 1 from below, A < 0 not
        assert clip.Taper().outside(tensor(0.5), tensor(a))[0].tolist() == [low]
        assert clip.Taper().outside(tensor(1.5), tensor(a))[1].tolist() == [True]
        close(clip.Taper().clamp(tensor(0.5), tensor(a)), tensor(1.0 if low else 0.5))
    at_most = float(torch.expm1(torch.tensor(0.3)) - torch.tensor(0.3))
    rule = clip.Adaptive(target_kl=at_most).fit(torch.tensor([0.3]), torch.ones(1))
    assert rule.high == pytest.approx(math.expm1(1.0))  # a target that is met exactly is met


def test_curvature_keep_is_strict_and_has_the_published_defaults():
    one = (torch.zeros(2, 3), torch.ones(2, 2), torch.tensor([0, 1]), torch.zeros(2), 0.1)  # no advantage, no move
    assert clip.curvature_keep(*one).tolist() == [True, True]
    assert clip.curvature_keep(*one, delta_fisher=0.0).tolist() == [False, False]
    assert clip.curvature_keep(*one, delta_hessian=0.0).tolist() == [False, False]
    defaults = {k: p.default for k, p in inspect.signature(clip.curvature_keep).parameters.items()}
    assert (defaults["delta_fisher"], defaults["delta_hessian"], defaults["top_k"]) == (1e-4, 1e-2, 50)


def test_off_policy_sequence_masking_on_its_limits():
    """Dropped if A < 0 and mean_t(log μ − log π) > δ."""
    mask = tensor([1, 1, 0], [1, 1, 1])
    drift = tensor([0.5, 0.5, 9.0], [0.75, 0.75, 0.0])  # means 0.5 and 0.5
    for delta, dropped in ((0.49, True), (0.5, False), (0.51, False)):
        rule = SequenceMask(delta=delta)
        assert rule.drop(drift, tensor(-0.5, -2.0), mask).tolist() == [dropped, dropped]
        assert rule.drop(drift, tensor(0.0, 0.5), mask).tolist() == [False, False]
        per_token = tensor([-1, 0.5, -9], [1, 1, -1])  # means −0.25 and 0.33
        assert rule.drop(drift, per_token, mask).tolist() == [dropped, False]


# ---- under the mask, beyond the exponents' bound, at the guards -----------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
def test_what_is_under_the_mask_is_nothing(level, estimator):
    logp, old, ref, mask, a = batch()
    a = a if level == "token" else a[:, 0]
    nothing = ~mask if level == "token" else ~mask.any(-1)
    for options in ({}, {"control_variate": True}, {"kl_to_go": True})[: 1 if level == "sequence-mean" else 3]:
        loss = PolicyLoss("urkl", BETA, estimator, level=level, reduction="none", **options)
        value, slope = loss(logp, old, a, mask, ref).loss, gradient(loss, logp, old, a, mask, ref)
        assert (value[nothing] == 0).all()
        assert (slope[~mask] == 0).all()
        for garbage in (0.0, -4.0, float("-inf"), float("nan")):
            x, y, z = (each.masked_fill(~mask, garbage) for each in (logp, old, ref))
            close(loss(x, y, a, mask, z).loss, value)
            close(gradient(loss, x, y, a, mask, z), slope)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bounded_exponents_keep_their_gradient(estimator):
    x = tensor(-3.0, -1.0, 2.0, 5.0).requires_grad_()
    for bounded_x in (bounded(x, 2.0), bounded(x.detach(), 2.0)):
        close(bounded_x.detach(), tensor(-2, -1, 2, 2))
    close(torch.autograd.grad(bounded(x, 2.0).sum(), x)[0], torch.ones_like(x))
    assert Ratios(x, x, x, None).limit == PolicyLoss().max_log_ratio == 20
    logp, old, ref = tensor([-1.0, -9.0, -2.0]), tensor([-5.0, -1.0, -2.5]), tensor([-9, -0.5, -1])
    given = (logp, old, tensor(2.0), torch.ones(1, 3), ref)
    loss = PolicyLoss("rkl", BETA, estimator, reduction="none", max_log_ratio=3.0)
    w, v, u = ((x - y).clamp(-3, 3).exp() for x, y in ((logp, old), (ref, old), (logp, ref)))
    close(gradient(loss, *given), -2 * w + BETA * w * (logp - ref + 1))
    close(gradient(loss.replace(divergence="fkl"), *given), -2 * w - BETA * v)
    close(gradient(loss.replace(divergence="k3"), *given), -2 * w + BETA * (1 - 1 / u))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_to_go_by_hand(estimator):
    """−sg(ω)·log π with ω_t = −β·Σ_{t'≥t} W_{≤t'}·log u_t', for rkl less β·W_{≤t}; W bounded, its gradient kept."""
    logp, old, ref, mask = tensor([-1.0, -2.0]), tensor([-1.5, -1.8]), tensor([-0.7, -2.4]), torch.ones(1, 2)
    for limit, exponents in ((20.0, (0.5, 0.3)), (0.4, (0.4, 0.3))):
        first, both = map(math.exp, exponents)
        to_go, prefix = tensor([first * -0.3 + both * 0.4, both * 0.4]), tensor([first, both])
        for divergence, slope in {"urkl": to_go, "rkl": to_go + prefix}.items():
            loss = PolicyLoss(divergence, BETA, estimator, reduction="none", kl_to_go=True, max_log_ratio=limit)
            close(gradient(loss, logp, old, tensor(0.0), mask, ref), BETA * slope)
            close(loss(logp, old, tensor(0.0), mask, ref).loss, BETA * slope * logp)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", [name for name in RULES if name not in TRUNCATING])
def test_the_control_variate_is_fitted_to_the_coefficients(name, estimator):
    """c = Σ w·ω / Σ w² over the other responses, where ω is what this very loss puts in front of ∇log π."""
    logp, old, ref, mask, a = batch()
    w = (logp - old).exp() * mask
    for divergence in ("none", *EXACT, "k3"):
        loss = PolicyLoss(divergence, BETA, estimator, RULES[name], reduction="none")
        plain = gradient(loss, logp, old, a, mask, ref)
        top, bottom = (-w * plain).sum(-1), w.square().sum(-1)
        c = (top.sum() - top) / (bottom.sum() - bottom)
        got = gradient(loss.replace(control_variate=True), logp, old, a, mask, ref)
        close(got, plain + c.unsqueeze(-1) * w)


def test_the_control_variate_of_a_sequence_depends_on_the_others_alone():
    """However light they are beside it: a guard that looks at its own weight would be a bias."""
    old, mask, a = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1), tensor(3e-3, 5e-3)
    loss = PolicyLoss("none", 0.0, reduction="none", control_variate=True)
    for log_w in ([0.0, 8.0], [0.0, -9.0], [-9.0, -9.5], [1.0, 18.0], [-18.0, 18.0]):
        got = gradient(loss, tensor(*log_w).unsqueeze(-1), old, a, mask).squeeze(-1)
        close(got, -tensor(*log_w).exp() * (a - a.flip(0)))  # of two responses each one's c is the other's advantage
    alone = gradient(loss, tensor([0.5]), old[:1], a[:1], mask[:1])
    close(alone, -tensor([0.5]).exp() * a[0])


def test_denominators_at_their_guards():
    logp, old, ref, mask, a = batch()
    for reduction in ("token-mean", "seq-mean-token-mean"):
        loss = PolicyLoss("urkl", BETA, reduction=reduction)
        own = loss(logp, old, a, mask, ref).loss * loss.count(mask)
        close(loss(logp, old, a, mask, ref, denominator=0.5).loss, own / 0.5)
    each = PolicyLoss("urkl", BETA, reduction="none")(logp, old, a, mask, ref).loss
    close(own, sum(each[i, :n].sum() / n for i, n in enumerate([5, 3, 1, 4, 2])))
    with (
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "all_reduce", side_effect=lambda x, group: x.mul_(4)),
        mock.patch.object(torch.distributed, "get_world_size", return_value=8),
    ):
        assert float(PolicyLoss().step_denominator(torch.ones(2, 3))) == 3.0
        assert float(PolicyLoss().step_denominator(torch.ones(2, 3), average_over_ranks=False)) == 24.0


@pytest.mark.parametrize("divergence", EXACT)
def test_a_token_removed_from_the_vocabulary_adds_nothing(divergence):
    logits, ref, removed = tensor([[1.0, 2.0, 0.5]]).requires_grad_(), tensor([[1.5, 2.0, 0.0]]), tensor([[-INF]])
    whole = vocabulary_kl(logits, ref, divergence)
    wider = vocabulary_kl(torch.cat([logits, removed], -1), torch.cat([ref, removed], -1), divergence)
    close(wider, whole)
    close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (wider, whole)))


def test_the_squared_score_of_the_logits():
    rng = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(2, 3, 5, generator=rng), torch.randint(5, (2, 3), generator=rng)
    leaf = logits.clone().requires_grad_()
    chosen = leaf.log_softmax(-1).gather(-1, tokens.unsqueeze(-1))
    expected = torch.autograd.grad(chosen.sum(), leaf)[0].square().sum(-1)
    torch.testing.assert_close(logit_score_sq(leaf, tokens), expected)  # a number: no gradient flows through it
    assert not logit_score_sq(leaf, tokens).requires_grad
