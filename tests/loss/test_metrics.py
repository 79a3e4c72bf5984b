"""Each metric against a naive computation, and the KL estimates against exact KLs by enumeration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rpg
from rpg import PolicyLoss, clip
from rpg.loss.mismatch import TIS

LEVELS = ("token", "sequence", "sequence-mean")
some = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10**6)


class Batch:
    """float64, three policies and a sampler, an empty row, rubbish under the mask."""

    def __init__(self, seed, rows=6, columns=5, drift=0.6, rubbish=math.nan):
        g = torch.Generator().manual_seed(seed)

        def randn():
            return torch.randn(rows, columns, generator=g, dtype=torch.float64)

        self.mask = torch.rand(rows, columns, generator=g) < 0.7
        self.mask[1], self.mask[0] = False, True
        self.logp = -randn().abs() - 0.1
        self.old, self.ref = self.logp - drift * randn(), self.logp - drift * randn()
        self.rollout = self.old - 0.2 * randn()
        self.a = torch.randn(rows, generator=g, dtype=torch.float64)
        self.entropy = randn().abs()
        for x in (self.logp, self.old, self.ref, self.rollout, self.entropy):
            x[~self.mask] = rubbish

    def metrics(self, loss, **kwargs):
        given = {"ref_logp": self.ref, "rollout_logp": self.rollout, "entropy": self.entropy} | kwargs
        return {k: float(v) for k, v in loss(self.logp, self.old, self.a, self.mask, **given).metrics.items()}

    def samples(self, level):
        """(w, u, A) of each sample as the level sees it, in plain floats."""
        out = []
        for i in range(len(self.a)):
            here = self.mask[i]
            lw, lu = (self.logp - self.old)[i, here].tolist(), (self.logp - self.ref)[i, here].tolist()
            if level != "token" and lw:
                n = len(lw) if level == "sequence-mean" else 1
                lw, lu = [sum(lw) / n], [sum(lu) / n]
            out += [(math.exp(x), math.exp(y), float(self.a[i])) for x, y in zip(lw, lu, strict=True)]
        return out

    def tokens(self):
        """(log π, log old, log ref, log rollout, entropy) of each token."""
        stacked = torch.stack([self.logp, self.old, self.ref, self.rollout, self.entropy], -1)
        return stacked[self.mask].tolist()


def test_a_printed_output_is_one_short_line():
    b = Batch(0)
    out = PolicyLoss("urkl", 0.1, clip=clip.RPGClip())(b.logp, b.old, b.a, b.mask, b.ref)
    values = {name: f"{float(out.metrics[name]):.3g}" for name in ("ess", "kl/old", "clip/low", "clip/high")}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    assert repr(out) == f"LossOutput(loss={float(out.loss):.4g}, {len(out.metrics)} metrics: {shown}, …)"
    each = PolicyLoss("none", reduction="none")(b.logp, b.old, b.a, b.mask)
    assert repr(each).startswith("LossOutput(loss=[6, 5], ")


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def k3(x):
    return x - 1 - math.log(x)


@pytest.mark.parametrize("level", LEVELS)
@given(seed=seeds)
@some
def test_ratio_statistics(level, seed):
    b = Batch(seed)
    got = b.metrics(PolicyLoss("urkl", level=level))
    w = sorted(x for x, _, _ in b.samples(level))
    assert got["ess"] == pytest.approx(sum(w) ** 2 / (len(w) * sum(x * x for x in w)), rel=1e-5)
    assert got["ratio/max"] == pytest.approx(w[-1], rel=1e-6)
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):  # the nearest rank
        assert got[f"ratio/{name}"] == pytest.approx(w[round(q * (len(w) - 1))], rel=1e-6)
    assert got["tokens"] == b.mask.sum()
    assert got["sequences"] == b.mask.any(-1).sum()
    assert got["bounded"] == got["bounded_ref"] == 0.0


def test_quantiles_of_a_large_batch_are_close():
    g = torch.Generator().manual_seed(0)
    logp = torch.randn(300, 1000, generator=g)
    mask = torch.arange(1000) < torch.randint(1, 1001, (300, 1), generator=g)
    metrics = PolicyLoss()(logp, torch.zeros_like(logp), torch.ones(300), mask).metrics
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        assert float(metrics[f"ratio/{name}"].log()) == pytest.approx(float(logp[mask].quantile(q)), abs=0.1)


@pytest.mark.parametrize("level", LEVELS)
@given(seed=seeds)
@some
def test_token_averages(level, seed):
    b = Batch(seed)
    got = b.metrics(PolicyLoss("urkl", level=level))
    rows = b.tokens()
    expected = {
        "kl/old": mean(math.exp(p - o) * k3(math.exp(o - p)) for p, o, *_ in rows),
        "kl/old_forward": mean(k3(math.exp(p - o)) for p, o, *_ in rows),
        "kl/ref": mean(math.exp(p - o) * k3(math.exp(r - p)) for p, o, r, *_ in rows),
        "kl/ref_forward": mean(math.exp(r - o) * k3(math.exp(p - r)) for p, o, r, *_ in rows),
        "entropy_sampled": mean(-math.exp(p - o) * p for p, o, *_ in rows),
        "entropy": mean(h for *_, h in rows),
        "mismatch/kl": mean(k3(math.exp(o - s)) for _, o, _, s, _ in rows),
        "mismatch/max_log_ratio": max(abs(o - s) for _, o, _, s, _ in rows),
    }
    rho = [math.exp(o - s) for _, o, _, s, _ in rows]
    expected["mismatch/ess"] = sum(rho) ** 2 / (len(rho) * sum(x * x for x in rho))
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def test_what_was_not_given_is_not_reported():
    b = Batch(0)
    names = set(b.metrics(PolicyLoss(), ref_logp=None, rollout_logp=None, entropy=None))
    assert names == {
        *("tokens", "sequences", "ess", "ratio/p01", "ratio/p50", "ratio/p99", "ratio/max", "bounded"),
        *("kl/old", "kl/old_forward", "entropy_sampled", "kl/gradient_share"),
    }
    assert "kl/gradient_share" not in b.metrics(PolicyLoss("none"))
    assert "kl/gradient_share" not in b.metrics(PolicyLoss("urkl", beta=0.0))
    assert "mismatch/dropped" in b.metrics(PolicyLoss(mismatch=TIS()))


# ---- what is cut -----------------------------------------------------------------------------------------------------

BOUNDS = {  # (low, high) for A ≥ 0 and for A < 0
    clip.Box(): ((0, 1.2), (0.8, math.inf)),
    clip.RPGClip(0.2, 0.28, 2.0): ((0, 1.28), (0.8, 2.0)),
    clip.DualClip(0.2, 0.28, 2.0): ((0, 1.28), (0.8, 2.0)),
    clip.Truncate(): ((0.8, 1.28), (0.8, 1.28)),
    clip.Unweighted(): ((1, 1), (1, 1)),
    clip.Taper(): ((1, 1), (0, 1)),
    clip.LogBox(): ((0, 1.2), (0.8, math.inf)),
    clip.Sigmoid(): ((0, math.inf), (0, math.inf)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", BOUNDS, ids=str)
@given(seed=seeds)
@some
def test_clip_fractions(rule, level, seed):
    """By the sign of A, or of A − β·log u where the KL term is inside a rule that cuts."""
    b = Batch(seed)
    beta = 0.8
    for divergence, regularised in (("none", False), ("k2", False), ("urkl", rule.holds_kl and rule.action == "cut")):
        got = b.metrics(PolicyLoss(divergence, beta, "reinforce", rule, level=level))
        low, high, dual = [], [], []
        for w, u, a in b.samples(level):
            sign = a - beta * math.log(u) if regularised else a
            below, above = BOUNDS[rule][0 if sign >= 0 else 1]
            low.append(w < below)
            is_dual = w > above and sign < 0 and rule.action == "cut"
            dual.append(is_dual)
            high.append(w > above and not is_dual)
        assert got["clip/low"] == pytest.approx(mean(low))
        assert got["clip/high"] == pytest.approx(mean(high))
        assert got["clip/dual"] == pytest.approx(mean(dual))
        assert got["clip/bound_low"] == pytest.approx(rule.bounds()[0])
        assert got.get("clip/bound_high", math.inf) == pytest.approx(rule.bounds()[1])


def test_on_policy_nothing_is_cut():
    """Exactly at w = 1 no rule changes a sample, the unweighted ones included."""
    logp = -torch.ones(2, 3)
    for rule in BOUNDS:
        metrics = PolicyLoss("none", clip=rule)(logp, logp, torch.tensor([1.0, -1.0]), torch.ones(2, 3)).metrics
        assert [float(metrics[f"clip/{x}"]) for x in ("low", "high", "dual")] == [0.0, 0.0, 0.0]
        assert all(math.isfinite(x) for x in metrics.values())


def test_a_zero_advantage_counts_as_positive():
    logp = -torch.ones(1, 1)
    loss = PolicyLoss("none", clip=clip.DualClip(c=1.5))
    metrics = loss(logp, logp - 1, torch.zeros(1), torch.ones(1, 1)).metrics
    assert [float(metrics[f"clip/{x}"]) for x in ("low", "high", "dual")] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", ["fkl", "ufkl", "rkl", "urkl", "k1", "k2", "k3"])
@given(seed=seeds)
@some
def test_gradient_share(divergence, level, seed):
    """|β·KL's part of ω| over that plus |the reward's part|, after the clip."""
    b, beta = Batch(seed), 0.8
    for rule, inside in (
        (None, None),
        (clip.RPGClip(0.2, 0.28, 2.0), None),
        (clip.Box(), False),
        (clip.Truncate(), None),
    ):
        loss = PolicyLoss(divergence, beta, "reinforce", rule, level=level, kl_in_clip=inside)
        kl = reward = 0.0
        for w, u, a in b.samples(level):

            def part(w, v=w / u):
                log_u = math.log(w / v)
                u = w / v
                exact = {"fkl": v, "ufkl": v - w, "rkl": -w * (log_u + 1), "urkl": -w * log_u}
                return (exact | {"k1": -1, "k2": -log_u, "k3": 1 / u - 1})[divergence]

            held = min(max(w, 0.8), 1.28)
            if rule is None:
                r, k = w * a, part(w)
            elif isinstance(rule, clip.Truncate):
                r, k = held * a, part(held if loss.kl_inside else w)
            else:
                sign = a + beta * part(w) / w if loss.kl_inside else a
                below, above = BOUNDS[rule][0 if sign >= 0 else 1]
                kept = below < w < above
                r, k = w * a * kept, part(w) * (kept or not loss.kl_inside)
            kl, reward = kl + abs(beta * k), reward + abs(r)
        got = b.metrics(loss)["kl/gradient_share"]
        assert got == pytest.approx(kl / (kl + reward) if kl + reward else 0.0, rel=1e-5)


def test_gradient_share_of_a_small_beta_in_float32():
    """β = 1e-4 and ratios within a percent of 1, as in training: a share of 1e-6 is no rounding error."""
    b = Batch(0, rows=200, columns=50, drift=0.01, rubbish=0.0)
    for name in ("rpg-reinforce-urkl", "rpg-reinforce-ufkl"):
        loss = rpg.algorithm(name).loss
        want = b.metrics(loss)["kl/gradient_share"]
        assert 0 < want < 1e-5
        out = loss(b.logp.float(), b.old.float(), b.a.float(), b.mask, ref_logp=b.ref.float())
        assert float(out.metrics["kl/gradient_share"]) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("divergence", ["rkl", "urkl"])
def test_gradient_share_of_algorithm_1_counts_what_flows_through_the_advantage(divergence):
    b = Batch(1, rubbish=0.0)
    rule = clip.DualClip()
    loss = PolicyLoss(divergence, 0.3, "differentiable", rule, reduction="none", through_advantage=True)
    logp = b.logp.clone().requires_grad_()
    out = loss(logp, b.old, b.a, b.mask, ref_logp=b.ref)
    (c,) = torch.autograd.grad(out.loss.sum(), logp)
    w, shift = (b.logp - b.old).exp(), {"rkl": 1.0, "urkl": 0.0}[divergence]
    regularised = b.a[:, None] - 0.3 * (b.logp - b.ref + shift)
    reward = -loss.clip.weight(w, regularised) * b.a[:, None]
    kl_size, reward_size = (c - reward)[b.mask].abs().sum(), reward[b.mask].abs().sum()
    assert float(out.metrics["kl/gradient_share"]) == pytest.approx(float(kl_size / (kl_size + reward_size)), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_share_of_a_kl_to_go(level):
    b = Batch(2, rubbish=0.0)
    loss = PolicyLoss("urkl", 0.3, level=level, reduction="none", kl_to_go=True)
    parts = []
    for part in (loss.replace(divergence="none", kl_to_go=False), loss):
        logp = b.logp.clone().requires_grad_()
        part(logp, b.old, b.a if part is not loss else 0 * b.a, b.mask, ref_logp=b.ref).loss.sum().backward()
        parts.append(float(logp.grad[b.mask].abs().sum()))
    share = float(loss(b.logp, b.old, b.a, b.mask, ref_logp=b.ref).metrics["kl/gradient_share"])
    assert share == pytest.approx(parts[1] / sum(parts), rel=1e-5)


def test_bounded_mismatch_is_counted():
    logp, mask = torch.full((4, 3), -1.0), torch.ones(4, 3)
    rollout = logp - torch.tensor([[9.0, 9.0, 9.0], [1.0, -25.0, 1.0], [20.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
    mask[2, 1:], mask[3] = 0, 0
    for level, share in {"token": 1 / 7, "sequence": 2 / 3}.items():
        loss = PolicyLoss("none", 0, mismatch=rpg.mismatch.Mismatch(level))
        metrics = loss(logp, logp, torch.ones(4), mask, rollout_logp=rollout).metrics
        assert float(metrics["mismatch/bounded"]) == pytest.approx(share)


# ---- exact expectations ----------------------------------------------------------------------------------------------


def drawn_from(tenths):
    """A batch in which each token appears as often as a policy of these tenths has it: a mean is an expectation."""
    return torch.tensor([[token] for token, n in enumerate(tenths) for _ in range(n)])


def test_kl_estimates_are_unbiased_under_samples_from_old():
    old, pi, ref = (torch.tensor(x, dtype=torch.float64) for x in ([1, 2, 3, 4], [4, 3, 2, 1], [1, 6, 1, 2]))
    old, pi, ref = (x / x.sum() for x in (old, pi, ref))
    token = drawn_from([1, 2, 3, 4])
    logp, old_logp, ref_logp = (x.log()[token] for x in (pi, old, ref))
    out = PolicyLoss()(logp, old_logp, torch.ones(10), torch.ones(10, 1), ref_logp=ref_logp)

    def kl(p, q):
        return float((p * (p / q).log()).sum())

    assert float(out.metrics["kl/old"]) == pytest.approx(kl(pi, old), rel=1e-6)
    assert float(out.metrics["kl/old_forward"]) == pytest.approx(kl(old, pi), rel=1e-6)
    assert float(out.metrics["kl/ref"]) == pytest.approx(kl(pi, ref), rel=1e-6)
    assert float(out.metrics["kl/ref_forward"]) == pytest.approx(kl(ref, pi), rel=1e-6)
    assert float(out.metrics["entropy_sampled"]) == pytest.approx(float(-(pi * pi.log()).sum()), rel=1e-6)


def test_mismatch_kl_is_unbiased_under_samples_from_the_sampler():
    sampler, old = (torch.tensor(x, dtype=torch.float64) / 10 for x in ([1, 2, 3, 4], [2, 2, 2, 4]))
    token = drawn_from([1, 2, 3, 4])
    logp, rollout = old.log()[token], sampler.log()[token]
    out = PolicyLoss()(logp, logp, torch.ones(10), torch.ones(10, 1), rollout_logp=rollout)
    assert float(out.metrics["mismatch/kl"]) == pytest.approx(float((sampler * (sampler / old).log()).sum()), rel=1e-6)


# ---- form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rpg.algorithms())
@pytest.mark.parametrize("rubbish", [math.nan, 1e30])
def test_metrics_are_detached_scalars(name, rubbish):
    b = Batch(3, rubbish=rubbish)
    logp = b.logp.clone().requires_grad_()
    loss = rpg.algorithm(name, needs=()).loss
    out = loss(logp, b.old, b.a, b.mask, ref_logp=b.ref, rollout_logp=b.rollout, entropy=b.entropy)
    for key, value in out.metrics.items():
        assert isinstance(value, torch.Tensor), key
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert math.isfinite(value), key
    assert out.metrics is out.metrics  # computed once
    out.loss.backward()  # reading the metrics first leaves the graph alone
    assert torch.isfinite(logp.grad).all()


def test_bounded_to_go():
    """The running products of kl_to_go are bounded too, and counted: ±15, ±30, ±45, then 10, 20, 30, against 20."""
    logp = torch.full((3, 3), -1.0)
    log_w = torch.tensor([[15.0], [-15.0], [10.0]])
    loss = PolicyLoss("urkl", kl_to_go=True)
    metrics = loss(logp, logp - log_w, torch.ones(3), torch.ones(3, 3)).metrics
    assert float(metrics["bounded"]) == 0.0
    assert float(metrics["bounded_to_go"]) == pytest.approx(5 / 9)
    assert "bounded_to_go" not in PolicyLoss("urkl")(logp, logp, torch.ones(3), torch.ones(3, 3)).metrics
