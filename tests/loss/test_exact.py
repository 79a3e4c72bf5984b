"""Proofs by exact enumeration, in float64: the expected gradient of a loss is the gradient of its objective.

Every response of a small problem is enumerated, so expectations are sums. The objectives come from rpg.audit.problem or
are summed here; none of them knows the formulas under test. tests/mutations.py runs this file with SEEDS cut to one.
"""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from rpg import PolicyLoss, vocabulary_kl
from rpg.audit.measure import expected_gradient
from rpg.audit.problem import SCENARIOS, EnumeratedProblem
from rpg.loss.mismatch import Mismatch
from rpg.loss.objective import DIVERGENCES, Ratios, k3

SEEDS = range(4)
BETA = 0.1
EXACT = ("fkl", "rkl", "ufkl", "urkl")
BIASED = ("k1", "k2", "k3")
ESTIMATORS = ("reinforce", "differentiable")
OBJECTIVE = {"token": "token", "sequence": "sequence", "sequence-mean": "geometric"}  # what each level is exact for
SHAPES = {
    "variable": {"variable": True},
    "fixed": {"variable": False},
    "4 tokens, 2 long": {"variable": False, "vocabulary": 4, "length": 2},
    "2 tokens, 4 long, variable": {"variable": True, "vocabulary": 2, "length": 4},
}
SINGLE = {"scenario": "three policies", "shape": "variable"}  # the hardest setting, for what need not run in all

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
every_scenario = pytest.mark.parametrize(
    "scenario", ["three policies", *(s for s in SCENARIOS if s != "three policies")]
)
every_shape = pytest.mark.parametrize("shape", SHAPES)


@functools.cache
def problem(scenario, shape, seed):
    return EnumeratedProblem(scenario, seed=seed, beta=BETA, **SHAPES[shape])


def problems(scenario=SINGLE["scenario"], shape=SINGLE["shape"]):
    return [problem(scenario, shape, seed) for seed in SEEDS]


def summed(divergence="urkl", estimator="reinforce", **options):
    """An unclipped loss whose every token counts one."""
    return PolicyLoss(divergence, BETA, estimator, reduction="none", **options)


def coefficients(loss, b, rows=slice(None), **inputs):
    """d loss / d log π of every token of the responses in ``rows``."""
    logp_NT = b.logp_NT[rows].clone().requires_grad_()
    given = {"old_logp": b.old_logp_NT, "ref_logp": b.ref_logp_NT, "advantages": b.advantages_N, "mask": b.mask_NT}
    given = {name: x[rows] for name, x in given.items()} | inputs
    return torch.autograd.grad(loss(logp_NT, **given).loss.sum(), logp_NT)[0]


def error(p, c_NT, ascent_P):
    """|E[g] + ∇J| / |∇J|: a loss descends where its objective ascends."""
    return float((expected_gradient(p, c_NT) + ascent_P).norm() / ascent_P.norm())


def variance(p, c_NT):
    g_NP = torch.einsum("nt,ntp->np", c_NT, p.score_NTP)
    return float(p.probability_N @ (g_NP - p.probability_N @ g_NP).square().sum(-1))


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def elsewhere(p, seed=0, drift=0.4):
    """A policy that is none of the problem's own."""
    noise = torch.randn(p.theta.shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    return p.logp_NT(p.theta + drift * noise)


# ---- the gradient is exact ------------------------------------------------------------------------------------------


@every_shape
@every_scenario
@every_estimator
@pytest.mark.parametrize("level", OBJECTIVE)
@pytest.mark.parametrize("divergence", ["none", *EXACT])
def test_the_expected_gradient_is_that_of_the_objective(divergence, level, estimator, scenario, shape):
    for p in problems(scenario, shape):
        c_NT = coefficients(summed(divergence, estimator, level=level), p.batch)
        assert error(p, c_NT, p.objective_gradient(OBJECTIVE[level], divergence)) < 1e-10


@every_shape
@every_scenario
@every_estimator
@pytest.mark.parametrize("divergence", ["rkl", "urkl"])
def test_kl_to_go_is_exact_for_the_sequence_objective(divergence, estimator, scenario, shape):
    for p in problems(scenario, shape):
        c_NT = coefficients(summed(divergence, estimator, level="sequence", kl_to_go=True), p.batch)
        assert error(p, c_NT, p.objective_gradient("sequence", divergence)) < 1e-10
        unrewarded = torch.zeros_like(p.rewards_N)
        c_NT = coefficients(summed(divergence, estimator, kl_to_go=True), p.batch, advantages=unrewarded)
        assert error(p, c_NT, p.objective_gradient("sequence", divergence, rewarded=False)) < 1e-10


def test_without_kl_to_go_token_level_misses_the_sequence_objective():
    for p in problems():
        c_NT = coefficients(summed("urkl"), p.batch, advantages=torch.zeros_like(p.rewards_N))
        assert error(p, c_NT, p.objective_gradient("sequence", "urkl", rewarded=False)) > 0.05


@every_shape
@every_scenario
@pytest.mark.parametrize("level", OBJECTIVE)
@pytest.mark.parametrize("divergence", ["none", *EXACT, *BIASED])
def test_the_two_estimators_agree_sample_by_sample(divergence, level, scenario, shape):
    for p in problems(scenario, shape):
        same(*(coefficients(summed(divergence, e, level=level), p.batch) for e in ESTIMATORS))


@every_shape
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divergence", ["rkl", "urkl"])
def test_the_two_estimators_agree_on_kl_to_go(divergence, level, shape):
    for p in problems(shape=shape):
        same(*(coefficients(summed(divergence, e, level=level, kl_to_go=True), p.batch) for e in ESTIMATORS))


@every_estimator
@pytest.mark.parametrize("level", OBJECTIVE)
@pytest.mark.parametrize("divergence", EXACT)
def test_no_reference_means_the_sampling_policy(divergence, level, estimator):
    for p in problems("off-policy, ref = old"):
        loss = summed(divergence, estimator, level=level)
        same(coefficients(loss, p.batch, ref_logp=None), coefficients(loss, p.batch))


def test_token_level_fkl_is_exact_for_the_sequence_objective_where_ref_is_old():
    for divergence in ("fkl", "ufkl"):
        for p in problems("off-policy, ref = old"):
            c_NT = coefficients(summed(divergence), p.batch, advantages=torch.zeros_like(p.rewards_N))
            assert error(p, c_NT, p.objective_gradient("sequence", divergence, rewarded=False)) < 1e-10


# ---- the table ------------------------------------------------------------------------------------------------------


def ratios(seed=0, num=50):
    """Random three-policy samples with log π as the leaf, and the leaf."""
    rng = torch.Generator().manual_seed(seed)
    logp, old, ref = -torch.rand(3, num, generator=rng, dtype=torch.float64) * 3
    logp.requires_grad_()
    return Ratios(w=(logp - old).exp(), log_u=logp - ref, logp=logp, log_v=lambda: ref - old, limit=20.0), logp


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_weight_is_minus_the_derivative_of_the_value(name):
    r, logp = ratios()
    row = DIVERGENCES[name]
    same(torch.autograd.grad(row.value(r).sum(), logp)[0], -row.weight(r))
    assert row.exact == (name in EXACT)
    assert (row.per_ratio is not None) == (name in ("rkl", "urkl"))
    if row.per_ratio is not None:
        same(row.per_ratio(r), row.weight(r) / r.w)


def test_k3_in_three_places_is_an_exact_row():
    """v·k3(π/ref) is ufkl itself; w·k3(ref/π) through w, and sg(w)·k2, have the coefficient of urkl."""
    r, logp = ratios()
    same(DIVERGENCES["ufkl"].value(r), r.v * k3(r.log_u))
    same(torch.autograd.grad((r.w * k3(-r.log_u)).sum(), logp, retain_graph=True)[0], -DIVERGENCES["urkl"].weight(r))
    k2 = r.w.detach() * DIVERGENCES["k2"].value(r)
    same(torch.autograd.grad(k2.sum(), logp, retain_graph=True)[0], -DIVERGENCES["urkl"].weight(r))
    same(DIVERGENCES["k3"].value(r), k3(-r.log_u))
    x = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    same(k3(x.log()), x - 1 - x.log())


def kl_error(p, loss):
    """Of the KL term alone, against ∇KL(π‖ref) at token level."""
    c_NT = coefficients(loss, p.batch, advantages=torch.zeros_like(p.rewards_N))
    return error(p, c_NT, p.objective_gradient("token", "rkl", rewarded=False))


@every_estimator
def test_what_the_unweighted_penalties_miss(estimator):
    for on, off in zip(problems("on-policy"), problems("three policies"), strict=True):
        assert kl_error(on, summed("k2", estimator)) < 1e-10
        assert kl_error(off, summed("k2", estimator)) > 0.05
        assert kl_error(on, summed("k3", estimator)) > 0.05
        assert kl_error(off, summed("k3", estimator)) > 0.05
        assert kl_error(on, summed("k1", estimator)) == pytest.approx(1, abs=1e-10)  # no signal at all
        assert kl_error(off, summed("k1", estimator)) > 0.5


def test_a_differentiable_ratio_times_k2_is_biased_even_on_policy():
    for p in problems("on-policy"):
        logp_NT = p.batch.logp_NT.clone().requires_grad_()
        w_NT, log_u_NT = (logp_NT - p.batch.old_logp_NT).exp(), logp_NT - p.batch.ref_logp_NT
        (c_NT,) = torch.autograd.grad(BETA * (w_NT * log_u_NT.square() / 2).sum(), logp_NT)
        assert error(p, c_NT, p.objective_gradient("token", "rkl", rewarded=False)) > 0.05


# ---- unnormalised measures ------------------------------------------------------------------------------------------


def ascent_to(p, divergence, log_q_N):
    """∇{E_π[R] − β·D(π, q)} over responses, for any measure q, summed here and differentiated by autograd."""
    theta = p.theta.clone().requires_grad_()
    log_p_N = p.logp_NT(theta).sum(-1)
    forward = (log_q_N.exp() * (log_q_N - log_p_N)).sum()
    reverse = (log_p_N.exp() * (log_p_N - log_q_N)).sum()
    mass = log_q_N.exp().sum() - log_p_N.exp().sum()
    distance = {"fkl": forward, "ufkl": forward - mass, "rkl": reverse, "urkl": reverse + mass}[divergence]
    value = (log_p_N.exp() * p.rewards_N).sum() - BETA * distance
    return torch.autograd.grad(value, theta)[0].flatten()


def scaled(logp_NT, mass):
    """Responses of the given total mass: log Z on the first token of each."""
    return torch.cat([logp_NT[:, :1] + math.log(mass), logp_NT[:, 1:]], dim=1)


@every_shape
@every_scenario
@every_estimator
@pytest.mark.parametrize("divergence", EXACT)
@pytest.mark.parametrize("mass", [2.0, 0.4])
def test_an_unnormalised_old_policy_as_the_reference(mass, divergence, estimator, scenario, shape):
    for p in problems(scenario, shape):
        old_NT, loss = scaled(p.batch.old_logp_NT, mass), summed(divergence, estimator, level="sequence")
        old_N = (old_NT * p.mask_NT).sum(-1)
        assert float(old_N.exp().sum()) == pytest.approx(mass)
        exact_P = ascent_to(p, divergence, old_N)
        c_NT = coefficients(loss, p.batch, old_logp=old_NT, ref_logp=None, old_mass=mass)
        assert error(p, c_NT, exact_P) < 1e-10
        assert error(p, coefficients(loss, p.batch, old_logp=old_NT, ref_logp=None), exact_P) > 0.01


@every_shape
@every_scenario
@every_estimator
@pytest.mark.parametrize("divergence", EXACT)
@pytest.mark.parametrize("mass", [3.0, 0.4])
def test_an_unnormalised_reference_needs_nothing(mass, divergence, estimator, scenario, shape):
    for p in problems(scenario, shape):
        ref_NT = scaled(p.batch.ref_logp_NT, mass)
        c_NT = coefficients(summed(divergence, estimator, level="sequence"), p.batch, ref_logp=ref_NT)
        assert error(p, c_NT, ascent_to(p, divergence, (ref_NT * p.mask_NT).sum(-1))) < 1e-10


# ---- samplers that are not the trainer ------------------------------------------------------------------------------


@every_shape
@every_estimator
@pytest.mark.parametrize("divergence", ["none", *EXACT])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_samples_of_a_fourth_policy_are_corrected_exactly(level, divergence, estimator, shape):
    """The problem's μ is the engine; the trainer's old policy is another. At token level states stay the engine's."""
    for p in problems(shape=shape):
        given = {"old_logp": elsewhere(p), "rollout_logp": p.batch.old_logp_NT}
        loss = summed(divergence, estimator, level=level, mismatch=Mismatch(level=level))
        exact_P = p.objective_gradient(level, divergence)
        assert error(p, coefficients(loss, p.batch, **given), exact_P) < 1e-10
        assert error(p, coefficients(loss.replace(mismatch=None), p.batch, **given), exact_P) > 0.01


# ---- the exact KL over the vocabulary -------------------------------------------------------------------------------


def sample_gradients(p, loss, divergence, advantages_N):
    """∇θ of each response's loss, [N,P], with the vocabulary KL differentiated through the logits."""
    ref_logits_NTV = p.logits_SV(p._draws[3])[p.state_NT]

    def losses_N(theta):
        exact_kl_NT = vocabulary_kl(p.logits_SV(theta)[p.state_NT], ref_logits_NTV, divergence)
        b = p.batch
        out = loss(p.logp_NT(theta), b.old_logp_NT, advantages_N, b.mask_NT, b.ref_logp_NT, exact_kl=exact_kl_NT)
        return out.loss.sum(-1)

    return torch.autograd.functional.jacobian(losses_N, p.theta).flatten(1)


@every_scenario
@every_estimator
@pytest.mark.parametrize("divergence", EXACT)
def test_the_vocabulary_kl_is_exact_and_quieter_than_a_sampled_one(divergence, estimator, scenario):
    for p in problems(scenario):
        loss = summed(divergence, estimator)
        g_NP = sample_gradients(p, loss, divergence, p.rewards_N)
        exact_P = p.objective_gradient("token", divergence)
        assert float((p.probability_N @ g_NP + exact_P).norm() / exact_P.norm()) < 1e-10

        unrewarded = torch.zeros_like(p.rewards_N)
        g_NP = sample_gradients(p, loss, divergence, unrewarded)
        spread = float(p.probability_N @ (g_NP - p.probability_N @ g_NP).square().sum(-1))
        sampled = {"fkl": "ufkl", "rkl": "urkl"}.get(divergence, divergence)  # the quieter of the two
        assert spread < variance(p, coefficients(summed(sampled), p.batch, advantages=unrewarded))


# ---- the control variate --------------------------------------------------------------------------------------------


@functools.cache
def small(seed, offset=0.0, variable=True):
    p = EnumeratedProblem("three policies", variable, seed, beta=BETA, vocabulary=2, length=3)
    return p, replace(p.batch, advantages_N=p.batch.advantages_N + offset)


def moments(loss, p, b, size):
    """Mean gradient and total variance of the sum over ``size`` responses drawn i.i.d. from μ, over all batches."""
    means, seconds = 0.0, 0.0
    for rows in itertools.product(range(len(p.probability_N)), repeat=size):
        rows = list(rows)
        g_P = torch.einsum("nt,ntp->p", coefficients(loss, b, rows), p.score_NTP[rows])
        chance = p.probability_N[rows].prod()
        means, seconds = means + chance * g_P, seconds + chance * g_P.square().sum()
    return means, float(seconds - means.square().sum())


@every_estimator
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divergence", ["none", "ufkl", "rkl"])
def test_the_control_variate_is_free_of_bias(divergence, level, estimator):
    for seed in SEEDS:
        p, b = small(seed)
        loss = summed(divergence, estimator, level=level, control_variate=True)
        with_P, _ = moments(loss, p, b, 2)
        same(with_P, -2 * p.objective_gradient(level, divergence), 1e-10)


@every_estimator
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_control_variate_removes_a_constant_from_the_advantage(size, level, estimator):
    for seed in SEEDS[:2]:
        p, b = small(seed, offset=5.0, variable=False) if size == 2 else small(seed, offset=5.0)
        plain = summed("urkl", estimator, level=level)
        (mean_P, before), (also_P, after) = (
            moments(plain.replace(control_variate=c), p, b, size) for c in (False, True)
        )
        same(mean_P, also_P, 1e-10)
        assert after < before / 2


@every_estimator
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("groups", [None, [7, 7, 3, 3, 5]])
@pytest.mark.parametrize("scored", [False, True])
def test_the_control_variate_is_fitted_outside_the_group(scored, groups, level, estimator):
    p, b = problem("three policies", "variable", 0), problem("three policies", "variable", 0).batch
    rows = [0, 4, 9, 12, 3]
    score_sq = 0.5 + p.score_NTP[rows].square().sum(-1) if scored else torch.ones(5, 3, dtype=torch.float64)
    score_sq = score_sq if level == "token" else score_sq.sum(-1)
    given = {"groups": None if groups is None else torch.tensor(groups), "score_sq": score_sq if scored else None}
    plain = summed("urkl", estimator, level=level)
    log_w = ((b.logp_NT - b.old_logp_NT) * b.mask_NT)[rows]
    w = (log_w if level == "token" else log_w.sum(-1)).exp()
    omega = -coefficients(plain, b, rows)
    omega = omega if level == "token" else omega[:, 0]
    counted = score_sq * b.mask_NT[rows] if level == "token" else score_sq
    top, bottom = w * omega * counted, w.square() * counted
    expected = -omega.clone()
    for i in range(5):
        others = [j for j in range(5) if (j != i if groups is None else groups[j] != groups[i])]
        expected[i] += top[others].sum() / bottom[others].sum() * w[i]
    got = coefficients(plain.replace(control_variate=True), b, rows, **given)
    expected = expected if level == "token" else expected.unsqueeze(-1).expand_as(got)
    same(got, expected * b.mask_NT[rows])


# ---- denominators ---------------------------------------------------------------------------------------------------


@every_estimator
@pytest.mark.parametrize("level", OBJECTIVE)
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "none"])
def test_micro_batches_sum_to_the_batch(reduction, level, estimator):
    constant = 5.0 if reduction == "constant" else None
    loss = PolicyLoss("rkl", BETA, estimator, level=level, reduction=reduction, constant=constant)
    for p in problems():
        parts = [slice(0, 2), slice(2, 7), slice(7, None)]
        total = loss.step_denominator(*(p.mask_NT[rows] for rows in parts))
        whole_NT = coefficients(loss, p.batch)
        same(torch.cat([coefficients(loss, p.batch, rows, denominator=total) for rows in parts]), whole_NT)
        if reduction != "none":  # the trap: each micro-batch's own mean, averaged over the micro-batches
            trap_NT = torch.cat([coefficients(loss, p.batch, rows) / len(parts) for rows in parts])
            assert (trap_NT - whole_NT).norm() > 0.1 * whole_NT.norm()


def test_the_mean_over_micro_batches_of_equal_size_is_still_not_the_token_mean():
    """With responses of different lengths, equal numbers of responses do not help: token-mean needs the denominator."""
    for p in problems():
        parts = [slice(0, 3), slice(3, 6), slice(6, 9)]
        for reduction, agrees in {"token-mean": False, "seq-mean-token-sum": True}.items():
            loss = PolicyLoss("rkl", BETA, reduction=reduction)
            whole_NT = coefficients(loss, p.batch, slice(0, 9))
            trap_NT = torch.cat([coefficients(loss, p.batch, rows) / 3 for rows in parts])
            assert ((trap_NT - whole_NT).norm() < 1e-12 * whole_NT.norm()) == agrees


@every_estimator
def test_a_mean_within_each_response_breaks_zero_mean_terms(estimator):
    """fkl and ufkl differ by β·w·s, whose mean is zero unless it is divided by a length that is still to come."""
    for p in problems():
        for reduction, agrees in {"seq-mean-token-mean": False, "seq-mean-token-sum": True, "token-mean": True}.items():
            losses = [PolicyLoss(d, BETA, estimator, reduction=reduction) for d in ("fkl", "ufkl")]
            fkl_P, ufkl_P = (expected_gradient(p, coefficients(loss, p.batch)) for loss in losses)
            apart = float((fkl_P - ufkl_P).norm() / fkl_P.norm())
            assert apart < 1e-12 if agrees else apart > 0.01
