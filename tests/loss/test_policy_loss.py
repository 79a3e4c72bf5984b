"""PolicyLoss: the coefficient on every ∇log π, the denominators, and each option, against formulas written out here."""

import dataclasses
import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg import PolicyLoss, clip, logit_score_sq, vocabulary_kl

DIVERGENCES = ("none", "fkl", "ufkl", "rkl", "urkl", "k1", "k2", "k3")
LEVELS = ("token", "sequence", "sequence-mean")
SUMS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
BETA = 0.3
some = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10**6)


@dataclasses.dataclass
class Batch:
    """Off-policy, with three different policies, uneven lengths and holes in the mask. float64."""

    logp: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    a: torch.Tensor
    mask: torch.Tensor

    def args(self, rows=slice(None)):
        return self.logp[rows], self.old[rows], self.a[rows], self.mask[rows]


def batch(seed=0, rows=5, columns=6, drift=0.5):
    g = torch.Generator().manual_seed(seed)

    def randn():
        return torch.randn(rows, columns, generator=g, dtype=torch.float64)

    logp = -randn().abs() - 0.1
    mask = torch.rand(rows, columns, generator=g) < 0.7
    mask[:, 0] = True
    advantage = torch.randn(rows, generator=g, dtype=torch.float64)
    return Batch(logp, logp - drift * randn(), logp - drift * randn(), advantage, mask)


def float64(x):
    return torch.tensor(x, dtype=torch.float64)


def gradient(loss, logp, *args, **kwargs):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss.sum(), logp)[0]


def coefficient(divergence, w, u, v, advantage, beta):
    """−ω of section 2's table, and of the penalties that others use, for one sample."""
    log_u = math.log(u)
    return (
        -w * advantage
        + beta
        * {
            "none": 0.0,
            "fkl": -v,
            "ufkl": w - v,
            "rkl": w * (log_u + 1),
            "urkl": w * log_u,
            "k1": 1.0,
            "k2": log_u,
            "k3": 1 - 1 / u,
        }[divergence]
    )


def coefficients(divergence, level, b, beta=BETA, same_ref=False):
    """Loops over rows and tokens: what each ∇log π_t is multiplied by, before any denominator."""
    out = torch.zeros_like(b.logp)
    for i in range(len(out)):
        tokens = [t for t in range(out.shape[1]) if b.mask[i, t]]
        lw = [float(b.logp[i, t] - b.old[i, t]) for t in tokens]
        lu = lw if same_ref else [float(b.logp[i, t] - b.ref[i, t]) for t in tokens]
        if level != "token":
            n = 1 if level == "sequence" else max(len(tokens), 1)
            lw, lu = [sum(lw) / n] * len(tokens), [sum(lu) / n] * len(tokens)
        for t, x, y in zip(tokens, lw, lu, strict=True):
            c = coefficient(divergence, math.exp(x), math.exp(y), math.exp(x - y), float(b.a[i]), beta)
            out[i, t] = c / (len(tokens) if level == "sequence-mean" else 1)  # d mean / d log π_t
    return out


@pytest.mark.parametrize("same_ref", [True, False], ids=["ref=old", "ref≠old"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(seed=seeds)
@some
def test_both_estimators_have_the_coefficients_of_the_table(divergence, level, same_ref, seed):
    b = batch(seed)
    expected = coefficients(divergence, level, b, same_ref=same_ref)
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss(divergence, BETA, estimator, level=level, reduction="none")
        got = gradient(loss, *b.args(), ref_logp=None if same_ref else b.ref)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_differentiable_values():
    """The differentiable loss is the table's expression, not only its derivative."""
    b = batch(1)
    w, u, v = (b.logp - b.old).exp(), (b.logp - b.ref).exp(), (b.ref - b.old).exp()
    k3 = 1 / u - 1 + u.log()
    values = {"fkl": -v * b.logp, "ufkl": v * (u - 1 - u.log()), "rkl": w * u.log(), "urkl": w * u.log() - w}
    values |= {"none": 0 * w, "k1": u.log(), "k2": u.log() ** 2 / 2, "k3": k3}
    for divergence, value in values.items():
        loss = PolicyLoss(divergence, BETA, "differentiable", reduction="none")
        expected = ((BETA * value if divergence != "none" else 0) - w * b.a[:, None]) * b.mask
        torch.testing.assert_close(loss(*b.args(), ref_logp=b.ref).loss, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_reinforce_value_is_omega_times_log_pi(level):
    b = batch(2)
    out = PolicyLoss("urkl", BETA, level=level, reduction="none")(*b.args(), ref_logp=b.ref).loss
    c = coefficients("urkl", level, b)
    assert out.shape == (b.logp.shape if level == "token" else b.a.shape)
    torch.testing.assert_close(out if level != "token" else out.sum(-1), (c * b.logp * b.mask).sum(-1))


# ---- denominators ----------------------------------------------------------------------------------------------------


def denominators(reduction, mask, constant):
    """What each token's coefficient is divided by."""
    lengths, rows = mask.sum(-1, keepdim=True), mask.any(-1).sum()
    return {
        "token-mean": mask.sum() * torch.ones_like(lengths),
        "seq-mean-token-mean": rows * lengths.clamp(min=1),
        "seq-mean-token-sum": rows * torch.ones_like(lengths),
        "constant": rows * (constant or 1) * torch.ones_like(lengths),
    }[reduction]


@pytest.mark.parametrize("empty_row", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", SUMS)
def test_reductions(reduction, level, empty_row):
    b = batch(3)
    b.mask[3, 1:] = False  # one token
    if empty_row:
        b.mask[2] = False
    constant = 7.5 if reduction == "constant" else None
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss("ufkl", BETA, estimator, level=level, reduction=reduction, constant=constant)
        expected = coefficients("ufkl", level, b) / denominators(reduction, b.mask, constant)
        torch.testing.assert_close(gradient(loss, *b.args(), ref_logp=b.ref), expected)
    assert float(loss.count(b.mask)) == {"token-mean": b.mask.sum(), "constant": (5 - empty_row) * 7.5}.get(
        reduction, 5 - empty_row
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", SUMS)
@given(seed=seeds, cut=st.integers(1, 4))
@some
def test_micro_batches_sum_to_the_whole(reduction, level, seed, cut):
    b = batch(seed)
    loss = PolicyLoss("urkl", BETA, level=level, reduction=reduction, constant=9 if reduction == "constant" else None)
    loss = loss.replace(clip=clip.RPGClip())
    whole = loss(*b.args(), ref_logp=b.ref).loss
    parts = [slice(0, cut), slice(cut, None)]
    total = loss.step_denominator(*(b.mask[i] for i in parts))
    for denominator in (total, float(total)):
        pieces = [loss(*b.args(i), ref_logp=b.ref[i], denominator=denominator).loss for i in parts]
        torch.testing.assert_close(sum(pieces), whole)


def test_a_denominator_replaces_the_batch_s_own():
    b = batch(4)
    for reduction in SUMS[:3]:
        loss = PolicyLoss("none", 0, reduction=reduction)
        own = loss(*b.args()).loss * loss.count(b.mask)
        for denominator in (13, 0.5, torch.tensor(2.5), torch.tensor([4])):
            got = loss(*b.args(), denominator=denominator).loss
            assert got.shape == ()
            torch.testing.assert_close(got, own / float(denominator))
    assert PolicyLoss("none", reduction="none")(*b.args()).loss.shape == b.logp.shape
    assert float(PolicyLoss(reduction="none").count(b.mask)) == 1.0


# ---- options ---------------------------------------------------------------------------------------------------------


def test_advantages_per_token():
    b = batch(5)
    a_BT = torch.randn(b.logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss("none", 0, estimator, reduction="none")
        got = gradient(loss, b.logp, b.old, a_BT, b.mask)
        torch.testing.assert_close(got, -(b.logp - b.old).exp() * a_BT * b.mask)


def test_no_gradient_reaches_anything_but_logp():
    b = batch(6)
    others = [x.clone().requires_grad_() for x in (b.old, b.a, b.ref, b.old - 0.1)]
    old, a, ref, rollout = others
    for estimator in ("reinforce", "differentiable"):
        for loss in (PolicyLoss("ufkl", 0.1, estimator), PolicyLoss("rkl", 0.1, estimator, clip.RPGClip())):
            logp = b.logp.clone().requires_grad_()
            loss(logp, old, a, b.mask, ref_logp=ref, rollout_logp=rollout).loss.backward()
            assert logp.grad is not None
    assert all(x.grad is None for x in others)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divergence", ["rkl", "urkl"])
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_kl_to_go(estimator, divergence, level):
    """Section 2, Levels: the coefficient on s_t is β·Σ_{t'≥t} W_{≤t'}·log u_t' (rkl: + W_{≤t})."""
    b = batch(7)
    loss = PolicyLoss(divergence, BETA, estimator, level=level, reduction="none", kl_to_go=True, clip=clip.Box())
    plain = loss.replace(kl_to_go=False, divergence="none")
    got = gradient(loss, *b.args(), ref_logp=b.ref) - gradient(plain, *b.args())
    expected = torch.zeros_like(b.logp)
    for i in range(len(b.a)):
        for t in range(b.logp.shape[1]):
            for later in range(t, b.logp.shape[1]):
                if b.mask[i, t] and b.mask[i, later]:
                    upto = [s for s in range(later + 1) if b.mask[i, s]]
                    weight = torch.exp((b.logp - b.old)[i, upto].sum())
                    expected[i, t] += weight * (b.logp - b.ref)[i, later]
                    if later == t and divergence == "rkl":
                        expected[i, t] += weight
    torch.testing.assert_close(got, BETA * expected)


def test_exact_kl_replaces_the_sampled_term():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, generator=g, dtype=torch.float64).requires_grad_()
    ref_logits = torch.randn(3, 4, 6, generator=g, dtype=torch.float64)
    token = torch.randint(6, (3, 4, 1), generator=g)
    old = torch.log_softmax(torch.randn(3, 4, 6, generator=g, dtype=torch.float64), -1).gather(-1, token).squeeze(-1)
    a, mask = torch.randn(3, generator=g, dtype=torch.float64), torch.rand(3, 4, generator=g) < 0.7
    logp = torch.log_softmax(logits, -1).gather(-1, token).squeeze(-1)
    for divergence in ("rkl", "ufkl"):
        kl = vocabulary_kl(logits, ref_logits, divergence)
        for estimator in ("reinforce", "differentiable"):
            loss = PolicyLoss(divergence, BETA, estimator, clip=clip.RPGClip())
            plain = loss.replace(divergence="none")(logp, old, a, mask).loss
            nan_under_mask = kl.masked_fill(~mask, torch.nan)
            got = loss(logp, old, a, mask, ref_logp=old - 1, exact_kl=nan_under_mask).loss
            torch.testing.assert_close(got, plain + BETA * kl[mask].sum() / mask.sum())


def test_old_mass_multiplies_everything():
    b = batch(8)
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss("urkl", BETA, estimator, clip=clip.RPGClip())
        for mass in (0.5, 1.0, 2.0):
            got = gradient(loss, *b.args(), ref_logp=b.ref, old_mass=mass)
            torch.testing.assert_close(got, mass * gradient(loss, *b.args(), ref_logp=b.ref))


def test_kl_ratio_cap():
    """CPGD: β(v − min(w, 3)) in place of β(v − w); the reward's ratio stays as it is."""
    b = batch(9, drift=1.5)
    w, v = (b.logp - b.old).exp(), (b.ref - b.old).exp()
    assert (w > 3).any()
    loss = PolicyLoss("ufkl", BETA, "reinforce", clip.LogBox(), reduction="none", kl_ratio_cap=3.0)
    keep = torch.where(b.a[:, None] >= 0, w < 1.2, w > 0.8)
    expected = (-b.a[:, None] * keep + BETA * (w.clamp(max=3.0) - v)) * b.mask
    torch.testing.assert_close(gradient(loss, *b.args(), ref_logp=b.ref), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
@pytest.mark.parametrize("rule", [None, clip.DualClip(), clip.RPGClip()], ids=str)  # Algorithm 1's ω has a leak in it
def test_control_variate(rule, estimator, grouped, level):
    """c* = Σ w·ω·|s|² / Σ w²·|s|² over the sequences outside one's own group, subtracted as c*·w."""
    b = batch(10, rows=6)
    b.mask[4] = False
    groups = torch.tensor([7, 7, 3, 3, 5, 5]) if grouped else None
    score = batch(99, rows=6).logp.abs() + 0.5 if level == "token" else b.a.abs() + 0.5
    loss = PolicyLoss("urkl", BETA, estimator, rule, level=level, reduction="none")
    plain = gradient(loss, *b.args(), ref_logp=b.ref)
    log_w = (b.logp - b.old) * b.mask
    w = log_w.exp() if level == "token" else log_w.sum(-1).exp()
    valid = b.mask if level == "token" else b.mask.any(-1)
    omega = -plain if level == "token" else -plain[:, 0]
    top, bottom = ((x * score * valid).reshape(6, -1).sum(-1) for x in (w * omega, w * w))
    expected = plain.clone()
    for i in range(6):
        others = [j for j in range(6) if (groups[j] != groups[i] if grouped else j != i)]
        c = float(top[others].sum() / bottom[others].sum())
        expected[i] += c * (w[i] * b.mask[i])
    improved = loss.replace(control_variate=True)
    got = gradient(improved, *b.args(), ref_logp=b.ref, groups=groups, score_sq=score)
    torch.testing.assert_close(got, expected)
    score[~valid] = torch.nan  # nothing under the mask is read
    torch.testing.assert_close(gradient(improved, *b.args(), ref_logp=b.ref, groups=groups, score_sq=score), expected)
    value = improved(*b.args(), ref_logp=b.ref, groups=groups).loss
    assert (value[~valid] == 0).all()


def test_control_variate_without_anyone_else_does_nothing():
    b = batch(11, rows=1)
    loss = PolicyLoss("urkl", BETA, reduction="none")
    got = gradient(loss.replace(control_variate=True), *b.args())
    torch.testing.assert_close(got, gradient(loss, *b.args()))


def test_replace_and_defaults():
    loss = PolicyLoss()
    assert (loss.divergence, loss.beta, loss.estimator, loss.clip) == ("urkl", 1e-4, "reinforce", None)
    assert (loss.level, loss.reduction, loss.max_log_ratio) == ("token", "token-mean", 20.0)
    assert loss.replace(beta=2.0).beta == 2.0
    assert loss.beta == 1e-4
    b = batch(12)
    assert torch.equal(PolicyLoss("rkl", 0.0)(*b.args()).loss, PolicyLoss("none", 0.5)(*b.args()).loss)


@pytest.mark.parametrize(
    ("loss", "inside"),
    [
        (PolicyLoss("urkl"), False),
        (PolicyLoss("urkl", clip=clip.RPGClip()), True),
        (PolicyLoss("fkl", clip=clip.Box()), True),
        (PolicyLoss("fkl", 0.1, "differentiable", clip.DualClip()), False),  # w does not factor out
        (PolicyLoss("fkl", 0.1, "differentiable", clip.DualClip(), kl_in_clip=True), True),  # RPG, section 3.3
        (PolicyLoss("fkl", 0.1, "differentiable", clip.RPGClip()), True),  # the whole sample is cut
        (PolicyLoss("rkl", 0.1, "differentiable", clip.DualClip()), True),
        (PolicyLoss("k3", 0.1, "differentiable", clip.Box()), False),  # GRPO: its penalty stands outside
        (PolicyLoss("k2", 0.1, "reinforce", clip.RPGClip()), False),
        (PolicyLoss("ufkl", 0.1, "reinforce", clip.LogBox()), False),
        (PolicyLoss("urkl", 0.1, "differentiable", clip.Sigmoid()), False),
        (PolicyLoss("urkl", 0.1, "reinforce", clip.RPGClip(), kl_to_go=True), False),
        (PolicyLoss("none", 0.1, "reinforce", clip.RPGClip()), False),
        (PolicyLoss("urkl", 0.1, "reinforce", clip.RPGClip(), kl_in_clip=False), False),
    ],
    ids=str,
)
def test_where_the_kl_term_stands(loss, inside):
    assert loss.kl_inside is inside


@pytest.mark.parametrize(
    "rule", [clip.Box(), clip.DualClip(c=2.0), clip.KL3(0.05), clip.LogBox(), clip.Sigmoid()], ids=str
)
@pytest.mark.parametrize("divergence", ["fkl", "ufkl", "rkl", "urkl", "k1", "k2", "k3"])
def test_a_kl_term_outside_the_clip_is_whole(rule, divergence):
    b = batch(13)
    w = (b.logp - b.old).exp()
    for estimator in ("reinforce", "differentiable"):
        loss = PolicyLoss(divergence, BETA, estimator, rule, reduction="none", kl_in_clip=False)
        kl = coefficients(divergence, "token", b) - coefficients("none", "token", b)
        expected = -rule.weight(w, b.a[:, None].expand_as(w)) * b.a[:, None] * b.mask + kl
        torch.testing.assert_close(gradient(loss, *b.args(), ref_logp=b.ref), expected)


@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
@pytest.mark.parametrize("kind", ["fkl", "ufkl", "rkl", "urkl"])
@pytest.mark.parametrize("rule", [clip.RPGClip(0.2, 0.28, 3.0), clip.Adaptive(target_kl=1e-4, c=9.0)], ids=str)
def test_kl_in_clip(kind, estimator, rule):
    """Three samples that every rule cuts, on each side: True drops their KL gradient, False preserves it whole."""
    log_w, log_u, beta = float64([[0.6, -0.6, 2.5]]), float64([[0.5, 0.4, -0.3]]), 0.05
    logp, a = float64([[-1.0, -2.0, -1.5]]), float64([[1.0, -1.0, -1.0]])
    args = (logp, logp - log_w, a, torch.ones(1, 3))
    w, v = log_w.exp(), (log_w - log_u).exp()
    kl = beta * {"fkl": -v, "ufkl": w - v, "rkl": w * (log_u + 1), "urkl": w * log_u}[kind]
    loss = PolicyLoss(kind, beta, estimator, rule, reduction="none")
    for inside in (None, True):
        c = gradient(loss.replace(kl_in_clip=inside), *args, ref_logp=logp - log_u)
        torch.testing.assert_close(c, torch.zeros_like(c))
    c = gradient(loss.replace(kl_in_clip=False), *args, ref_logp=logp - log_u)
    torch.testing.assert_close(c, kl)


def test_a_zero_advantage_counts_as_positive():
    """As in both algorithms: "if Â ≥ 0"."""
    w, zero = float64([0.5, 1.5]), float64([0.0, 0.0])
    rule = clip.DualClip(0.2, 0.28, 1.4)
    assert rule.keep(w, zero).tolist() == [True, False]
    assert [x.tolist() for x in rule.outside(w, zero)] == [[False, False], [False, True]]
    assert rule.clamp(w, zero).tolist() == [0.5, 1.28]
    assert clip.Taper().weight(w, zero).tolist() == [1.0, 1.0]


def test_a_truncated_ratio_is_outside_once_it_has_passed_its_limit():
    w, a = float64([0.7, 0.75, 1.0, 1.5, 1.6]), torch.ones(5)
    for sign in (1, -1):
        below, above = clip.Truncate(0.25, 0.5).outside(w, sign * a)
        assert below.tolist() == [True, False, False, False, False]
        assert above.tolist() == [False, False, False, False, True]
    below, above = clip.Taper().outside(w, -a)
    assert (below.tolist(), above.tolist()) == ([False] * 5, [False, False, False, True, True])


# ---- CAPO's gate -----------------------------------------------------------------------------------------------------


def curvature_by_matrices(logits, hidden, action, advantage, lr, scale, kept):
    """m_F and m_H of one token from the explicit v, g, d, q and Fisher matrix, over the ``kept`` tokens."""
    pi = torch.softmax(logits, -1)[kept]
    v = (torch.tensor(kept) == action).double() - pi
    g = advantage * torch.outer(v, hidden)
    d = g if scale is None else g * scale[kept]
    q = d @ hidden
    fisher = torch.diag(pi) - torch.outer(pi, pi)
    m_f = 0.5 * lr**2 * float(v @ q) ** 2
    m_h = lr * float((g * d).sum()) + 0.5 * lr**2 * advantage * (float(v @ q) ** 2 - float(q @ fisher @ q))
    return m_f, m_h


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("top_k", [3, 11, 50])
def test_curvature_keep_by_matrices(top_k, adam):
    """Each threshold put just above and just below each token's own value: the gate must open and shut there."""
    g = torch.Generator().manual_seed(1)
    n, vocabulary, width, lr = 12, 11, 4, 0.3
    logits = 2 * torch.randn(n, vocabulary, generator=g, dtype=torch.float64)
    hidden = torch.randn(n, width, generator=g, dtype=torch.float64)
    action = torch.randint(vocabulary, (n,), generator=g)
    advantage = torch.randn(n, generator=g, dtype=torch.float64)
    scale = torch.rand(vocabulary, width, generator=g, dtype=torch.float64) * 3 if adam else None
    in_top = 0
    for i in range(n):
        top = logits[i].topk(min(top_k, vocabulary)).indices.tolist()
        in_top += int(action[i]) in top
        kept = top if int(action[i]) in top else [*top, int(action[i])]
        m_f, m_h = curvature_by_matrices(logits[i], hidden[i], action[i], float(advantage[i]), lr, scale, kept)
        one = (logits[i : i + 1], hidden[i : i + 1], action[i : i + 1], advantage[i : i + 1], lr, scale)
        for wide, shut in ((1.0001, False), (0.9999, True)):
            assert clip.curvature_keep(*one, m_f * wide, 1e9, top_k).tolist() == [not shut]
            assert clip.curvature_keep(*one, 1e9, abs(m_h) * wide, top_k).tolist() == [not shut]
    assert in_top == n if top_k >= vocabulary else 0 < in_top < n


def test_curvature_keep_cuts_through_the_loss():
    logp, old, a = float64([[-1.0, -2.0]]), float64([[-1.1, -2.1]]), float64([1.0])
    loss = PolicyLoss("k3", 0.1, "differentiable", clip.Box(), reduction="none")
    free = gradient(loss, logp, old, a, torch.ones(1, 2), ref_logp=old - 0.2)
    gated = gradient(loss, logp, old, a, torch.ones(1, 2), ref_logp=old - 0.2, keep=torch.tensor([[True, False]]))
    torch.testing.assert_close(gated, free * float64([[1.0, 0.0]]))
    keep = clip.curvature_keep(torch.zeros(3, 5), torch.ones(3, 2), torch.tensor([0, 1, 2]), torch.zeros(3), 1.0)
    assert keep.tolist() == [True, True, True]  # no advantage, no step
    still = (torch.zeros(1, 5), torch.ones(1, 2), torch.tensor([0]), torch.zeros(1), 1.0)
    assert clip.curvature_keep(*still, delta_fisher=0.0).tolist() == [False]  # strictly below
    assert clip.curvature_keep(*still, delta_hessian=0.0).tolist() == [False]
    defaults = {k: p.default for k, p in inspect.signature(clip.curvature_keep).parameters.items()}
    assert (defaults["delta_fisher"], defaults["delta_hessian"], defaults["top_k"]) == (1e-4, 1e-2, 50)


def test_logit_score_sq_is_the_squared_gradient_of_the_log_probability():
    g = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(2, 3, 5, generator=g), torch.randint(5, (2, 3), generator=g)
    got = logit_score_sq(logits, tokens)
    for i, j in itertools.product(range(2), range(3)):
        x = logits[i, j].clone().requires_grad_()
        (score,) = torch.autograd.grad(x.log_softmax(-1)[tokens[i, j]], x)
        assert float(got[i, j]) == pytest.approx(float(score.square().sum()), rel=1e-5)


def test_the_cap_of_the_kl_terms_ratio_holds_without_a_clip_too():
    """ω = w·A − β(min(w, cap) − v) for ufkl."""
    logp, old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True), torch.tensor([[-1.1, -2.0, -3.0]])
    mask, a = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0.5])
    loss = PolicyLoss("ufkl", 0.1, "reinforce", kl_ratio_cap=2.0, reduction="seq-mean-token-sum")
    (gradient,) = torch.autograd.grad(loss(logp, old, a, mask).loss, logp)
    w = (logp - old).detach().exp()
    torch.testing.assert_close(gradient, -(w * 0.5 - 0.1 * (w.clamp(max=2.0) - 1)))


@pytest.mark.parametrize(
    ("rule", "divergence", "has"),
    [
        (clip.Unweighted(), "none", False),
        (clip.Unweighted(), "k3", False),
        (clip.Unweighted(), "k2", True),  # mirror descent's square: its target is old
        (clip.Box(), "k2", True),
        (None, "none", True),
    ],
)
def test_a_loss_that_has_a_ratio_has_another_gradient_for_another_old(rule, divergence, has):
    loss = PolicyLoss(divergence, 0.1 if divergence != "none" else 0.0, "reinforce", clip=rule)
    assert loss.has_ratio == has
    logp = torch.tensor([[-1.0, -1.2, -0.7]], dtype=torch.float64, requires_grad=True)
    mask, a, ref = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0.5], dtype=torch.float64), logp.detach() - 0.3
    given = None if divergence == "k2" else ref
    found = [torch.autograd.grad(loss(logp, logp.detach() - d, a, mask, given).loss, logp)[0] for d in (0.0, 0.1)]
    assert torch.equal(*found) != has
