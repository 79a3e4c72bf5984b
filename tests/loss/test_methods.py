"""Every preset: the coefficient on each ∇log π as its paper has it, written out here with its numbers."""

import math
import statistics

import pytest
import torch

import rpg
from rpg import Advantage, PolicyLoss, clip
from rpg.loss import registry

RPG = [f"rpg-{style}{kind}" for style in ("", "reinforce-") for kind in ("fkl", "rkl", "ufkl", "urkl")]
RPG += ["rpg-rkl-printed", "rpg-urkl-printed"]
NAMES = [*RPG, "reinforce", "ppo", "grpo", "grpo-corrected", "dr-grpo", "dapo", "reinforce++", "reinforce++-baseline"]
NAMES += ["rloo", "remax", "gpg", "gspo", "cispo", "cpgd", "pmd-mean", "atr-grpo", "capo", "topr", "sapo"]
NAMES += ["dppo-tv", "dppo-kl", "gmpo", "luspo", "vespo", "clip-cov", "kl-cov", "high-entropy", "skywork-or1"]
NAMES += ["pmd-partition", "maxrl", "opo", "otb"]
NAMES += ["warp", "distill"]
GATED = {"clip-cov", "kl-cov", "high-entropy"}
DRIFTS = (0.0, 1e-4, 0.1, 0.4, 1.5, 2.5)  # from on-policy to far beyond every bound


class Batch:
    """float64, uneven lengths, an empty row, three policies; every sixth row has each drift."""

    def __init__(self, seed=0, rows=60, columns=7):
        g = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        drift = torch.tensor(DRIFTS, dtype=torch.float64).repeat(rows // len(DRIFTS))[:, None]
        self.logp = -2 * randn(rows, columns).abs() - 0.05
        self.old = (self.logp - drift * randn(rows, columns)).clamp(max=-0.01)
        self.ref = self.logp - 0.3 * randn(rows, columns)
        self.a = randn(rows)
        self.mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=g)
        self.mask[5] = False

    def args(self):
        return self.logp, self.old, self.a, self.mask


def gradient(loss, logp, *args, **kwargs):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *args, **kwargs).loss, logp)[0]


def expected(name, b):
    """d loss / d log π of every token, from the published formulas."""
    mask, a = b.mask.double(), b.a[:, None]
    log_w, log_u = (b.logp - b.old) * mask, (b.logp - b.ref) * mask
    w, u, v = log_w.exp(), log_u.exp(), (log_w - log_u).exp()
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    all_tokens, sequences = mask.sum(), b.mask.any(-1).sum()
    log_sequence = log_w.sum(-1, keepdim=True)
    token_mean, per_response = mask / all_tokens, mask / length / sequences

    def within(ratio, advantage, low, high, dual=math.inf):
        """1 where PPO's clip to (low, high) lets the gradient through, else 0."""
        return torch.where(advantage >= 0, ratio < high, (ratio > low) & (ratio < dual)).double()

    ppo = -a * w * within(w, a, 0.8, 1.2)
    if name.startswith("rpg-"):
        kind, beta = name.removesuffix("-printed").rpartition("-")[2], 1e-4
        if "reinforce" in name:  # Algorithm 2: ω, cut on the sign of ω/w
            omega = w * a + beta * {"fkl": v, "ufkl": v - w, "rkl": -w * (log_u + 1), "urkl": -w * log_u}[kind]
            return -omega * within(w, omega / w, 0.8, 1.28, 10.0) * token_mean
        if kind in ("fkl", "ufkl"):  # dual clip of the reward term, the KL term beside it
            return (-a * w * within(w, a, 0.8, 1.28, 10.0) + beta * (w - v if kind == "ufkl" else -v)) * token_mean
        a_hat = a - beta * (log_u + (kind == "rkl"))
        c = -a_hat * w * within(w, a_hat, 0.8, 1.28, 10.0)
        if name.endswith("printed"):  # Algorithm 1: −f·Â, differentiated through f and Â
            c = c + beta * torch.where(a_hat >= 0, w.clamp(max=1.28), w.clamp(0.8, 10.0))
        return c * token_mean
    return {
        "reinforce": lambda: -a * token_mean,
        "ppo": lambda: ppo * token_mean,
        "grpo": lambda: (ppo + 0.04 * (1 - 1 / u)) * per_response,
        "grpo-corrected": lambda: (ppo + 0.04 * w * log_u) * per_response,
        "dr-grpo": lambda: ppo * mask / (sequences * 3000),
        "dapo": lambda: -a * w * within(w, a, 0.8, 1.28) * token_mean,
        "reinforce++": lambda: ppo * token_mean,
        "reinforce++-baseline": lambda: (ppo + 0.01 * log_u) * token_mean,
        "rloo": lambda: -a * mask / sequences,
        "warp": lambda: -a * mask / sequences,
        "distill": lambda: -w * (a - log_u) * token_mean,
        "remax": lambda: -a * mask / sequences,
        "gpg": lambda: -a * token_mean,
        "gspo": lambda: (
            -a * (s := (log_sequence / length).exp()) * within(s, a, 1 - 3e-4, 1 + 4e-4) * mask / length / sequences
        ),
        "cispo": lambda: -a * w.clamp(max=5.0) * token_mean,
        "cpgd": lambda: (-a * within(w, a, 0.8, 1.2) + 1e-3 * (w - 1).clamp(max=2.0)) * token_mean,
        "pmd-mean": lambda: -(a - 0.01 * log_sequence) * per_response,
        "pmd-partition": lambda: -(a - 0.01 * log_sequence) * per_response,
        "maxrl": lambda: ppo * token_mean,
        "opo": lambda: -a * mask / sequences,
        "otb": lambda: -a * mask / sequences,
        "atr-grpo": lambda: -a * w * within(w, a, *level_set(0.05)) * per_response,
        "capo": lambda: ppo * per_response,
        "topr": lambda: -a * torch.where(a >= 0, 1.0, log_sequence.exp().clamp(max=1.0)) * per_response,
        "dppo-tv": lambda: -a * w * near(w, b, a, "tv") * mask / (sequences * 3000),
        "dppo-kl": lambda: -a * w * near(w, b, a, "kl") * mask / (sequences * 3000),
        "gmpo": lambda: -a * (gm := geometric(log_w, a, length))[0] * gm[1] * mask / length / sequences,
        "luspo": lambda: (
            -a * (s := (log_sequence / length).exp()) * within(s, a, 1 - 2e-3, 1 + 2.5e-3) * mask / sequences
        ),
        "vespo": lambda: -a * soft(log_sequence.exp(), a) * token_mean,
        "clip-cov": lambda: -a * w * within(w, a, 0.0, 2.0) * chosen(b) * token_mean,
        "kl-cov": lambda: (-a * w + chosen(b) * log_w.sign()) * token_mean,
        "high-entropy": lambda: -a * w * within(w, a, 0.8, 1.28) * chosen(b) * token_mean,
        "skywork-or1": lambda: ppo * token_mean,
        "sapo": lambda: -a * sapo_slope(w, 1.0 + 0.05 * (a <= 0).double()) * per_response,
    }[name]()


def level_set(delta):
    """Where r − 1 − log r = delta, by bisection."""

    def solve(inside, outside):
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if middle - 1 - math.log(middle) <= delta else (inside, middle)
        return inside

    return solve(1.0, 1e-9), solve(1.0, 50.0)


def near(w, b, a, measure):
    """1 unless the coin of the token has moved too far, and moves on."""
    p, q = b.old.exp(), b.logp.exp()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    far = (p - q).abs() > 0.15 if measure == "tv" else kl > 0.05
    return 1 - (far & torch.where(a >= 0, w > 1, w < 1)).double()


def geometric(log_w, a, length):
    """GMPO: the geometric mean of the bounded ratios, and which tokens are within their bound."""
    inside = torch.where(a >= 0, log_w < 0.4, log_w > -0.4)
    held = torch.where(a >= 0, log_w.clamp(max=0.4), log_w.clamp(min=-0.4))
    return (held.sum(-1, keepdim=True) / length).exp(), inside.double()


def soft(w, a):
    return torch.where(a >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())


def chosen(b):
    """A choice of tokens, such as a gate would make."""
    return (torch.arange(7) % 3 > 0).expand_as(b.mask)


def sapo_slope(w, tau):
    """d/d log w of (4/τ)·sigmoid(τ(w − 1))."""
    e = torch.exp(-tau * (w - 1))
    return 4 * w * e / (1 + e) ** 2


OLD_ONLY = ("cpgd", "pmd-mean", "pmd-partition", "kl-cov")  # published with the sampling policy as the anchor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_coefficients(name, seed):
    b = Batch(seed)
    if name in OLD_ONLY:
        b.ref = b.old
    want = expected(name, b)
    keep = {"keep": torch.ones_like(b.mask)} if name == "capo" else {}
    keep |= {"chosen": chosen(b)} if name in GATED else {}
    got = gradient(rpg.algorithm(name).loss, *b.args(), ref_logp=None if name in OLD_ONLY else b.ref, **keep)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-13)
    assert (got[~b.mask] == 0).all()
    assert (got[b.mask] != 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_form_has_the_gradient_of_the_row(name):
    for seed in range(3):
        b = Batch(seed)
        rows = b.mask.any(-1)
        if name in OLD_ONLY:
            b.ref = b.old
        keep = {"keep": chosen(b)} if name == "capo" else {"chosen": chosen(b)} if name in GATED else {}
        want = gradient(rpg.algorithm(name).loss, *b.args(), ref_logp=None if name in OLD_ONLY else b.ref, **keep)
        logp = b.logp[rows].requires_grad_()
        gates = {key: value[rows] for key, value in keep.items()}
        plain = registry.plain_form(name)(
            logp, b.old[rows], b.ref[rows], b.a[rows, None], b.mask[rows].double(), **gates
        )
        torch.testing.assert_close(torch.autograd.grad(plain, logp)[0], want[rows], rtol=1e-9, atol=1e-14)


def test_plain_forms_fit_on_a_glance_and_take_advantages_of_tokens():
    b = Batch(3)
    for name in NAMES:
        row, plain = registry.sources(name)
        assert row.startswith("def ")
        assert 1 <= len(plain.split("\n\n")[-1].splitlines()) - 1 <= 7, name
    a_NT = torch.randn(b.mask.shape, dtype=torch.float64)
    want = gradient(rpg.algorithm("reinforce++").loss, b.logp, b.old, a_NT, b.mask)
    logp = b.logp.clone().requires_grad_()
    plain = registry.plain_form("reinforce++")(logp, b.old, b.ref, a_NT, b.mask.double())
    torch.testing.assert_close(torch.autograd.grad(plain, logp)[0], want)


@pytest.mark.parametrize("name", RPG)
def test_the_rpg_presets_anchor_to_old_by_default(name):
    b = Batch(7)
    b.ref = b.old
    torch.testing.assert_close(gradient(rpg.algorithm(name).loss, *b.args()), expected(name, b), rtol=1e-8, atol=1e-13)


def test_the_batches_reach_every_bound():
    b = Batch(0)
    w = (b.logp - b.old).exp()[b.mask]
    a = b.a[:, None].expand_as(b.mask)[b.mask]
    for reached in (w > 10, w > 5, w < 0.2, (w > 1) & (w < 1 + 3e-4), w == 1):
        assert (reached & (a < 0)).any()
        assert (reached & (a > 0)).any()


# ---- advantages ------------------------------------------------------------------------------------------------------

REWARDS = [1.0, 0.0, 0.5, 0.25, 0.25, 0.25, 1.0, -1.0]
GROUPS = [3, 3, 3, 0, 0, 0, 8, 8]
LENGTHS = [1, 5, 2, 3, 3, 1, 4, 2]
GREEDY = [0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0]


def advantage_by_hand(name):
    of = {g: [r for r, h in zip(REWARDS, GROUPS, strict=True) if h == g] for g in GROUPS}
    mean = [statistics.fmean(of[g]) for g in GROUPS]
    centred = [r - m for r, m in zip(REWARDS, mean, strict=True)]
    by_std = [x / (statistics.stdev(of[g]) + 1e-6) for x, g in zip(centred, GROUPS, strict=True)]

    def white(x):
        return [(y - statistics.fmean(x)) / (statistics.stdev(x) + 1e-8) for y in x]

    by_group = ("grpo", "grpo-corrected", "dapo", "gspo", "cispo", "atr-grpo", "capo", "sapo", "gmpo", "luspo", "vespo")
    if name in by_group or name in {*GATED, "skywork-or1", "cpgd"}:
        return by_std
    if name in ("rloo", "pmd-mean"):
        return [x * len(of[g]) / (len(of[g]) - 1) for x, g in zip(centred, GROUPS, strict=True)]

    def white_over_tokens(x):
        tokens = white([y for y, length in zip(x, LENGTHS, strict=True) for _ in range(length)])
        return [tokens[sum(LENGTHS[:i])] for i in range(len(x))]

    return {
        "ppo": white(REWARDS),
        "reinforce++-baseline": white_over_tokens(centred),
        "remax": [r - g for r, g in zip(REWARDS, GREEDY, strict=True)],
        "gpg": [x * 3 / 2 for x in centred],  # three groups, two with signal
        "topr": REWARDS,
        "distill": [0.0] * len(REWARDS),
    }.get(name, centred)  # rpg-*, reinforce, dr-grpo


ELSEWHERE = ("reinforce++", "pmd-partition", "maxrl", "opo", "otb", "warp")  # below, and in test_baselines.py


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ELSEWHERE])
def test_advantages(name):
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    greedy = torch.tensor(GREEDY, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    got = rpg.algorithm(name).advantage(rewards, torch.tensor(GROUPS), greedy_rewards=greedy, mask=mask)
    assert got.tolist() == pytest.approx(advantage_by_hand(name), abs=1e-9)


def test_reinforce_pp_advantage():
    """r_t = 1{t = last}·R − 0.01·log(old/ref), summed from t on, whitened over the tokens of the batch."""
    b = Batch(1, rows=12)
    rewards = torch.linspace(-1, 1, 12, dtype=torch.float64)
    preset = rpg.algorithm("reinforce++")
    got = preset.advantage(rewards, torch.zeros(12), mask=b.mask, old_logp=b.old, ref_logp=b.ref)
    to_go = {}
    for i in range(12):
        tokens = [t for t in range(7) if b.mask[i, t]]
        for t in tokens:
            penalty = sum(float(b.old[i, s] - b.ref[i, s]) for s in tokens if s >= t)
            to_go[i, t] = float(rewards[i]) - 0.01 * penalty
    mean, std = statistics.fmean(to_go.values()), statistics.stdev(to_go.values())
    assert (got[~b.mask] == 0).all()
    for (i, t), x in to_go.items():
        assert float(got[i, t]) == pytest.approx((x - mean) / (std + 1e-8), abs=1e-9)
    w = (b.logp - b.old).exp()
    inside = torch.where(got >= 0, w < 1.2, w > 0.8)
    torch.testing.assert_close(
        gradient(preset.loss, b.logp, b.old, got, b.mask), -got * w * inside * b.mask / b.mask.sum()
    )


def test_warp_advantage():
    """R − 0.1·Σ log(old/ref) of the response, less the mean of its group's others; an option changes the 0.1."""
    b = Batch(1, rows=12)
    rewards, groups = torch.linspace(-1, 1, 12, dtype=torch.float64), torch.arange(12) // 4
    for beta, preset in ((0.1, rpg.algorithm("warp")), (0.3, rpg.algorithm("warp", beta=0.3))):
        got = preset.advantage(rewards, groups, mask=b.mask, old_logp=b.old, ref_logp=b.ref)
        total = [
            float(rewards[i]) - beta * sum(float(b.old[i, t] - b.ref[i, t]) for t in range(7) if b.mask[i, t])
            for i in range(12)
        ]
        for i in range(12):
            others = [total[j] for j in range(12) if groups[j] == groups[i] and j != i]
            assert float(got[i]) == pytest.approx(total[i] - statistics.fmean(others), abs=1e-12)


# ---- the table itself ------------------------------------------------------------------------------------------------


def test_every_preset_of_the_design_exists_and_says_what_it_is():
    assert sorted(rpg.algorithms()) == sorted(NAMES)
    for name in NAMES:
        made = rpg.algorithm(name)
        assert made.name == name
        assert made.paper
        assert made.formula
        assert "\n" not in made.formula
        assert made == rpg.algorithm(name)
        assert made.loss.mismatch is None
        assert (made.loss.divergence == "none") == (made.loss.beta == 0)
    for name in RPG:
        assert ("−sg(ω)·log π" in rpg.algorithm(name).formula) == ("reinforce" in name)


def test_what_the_loop_must_do_around_them():
    def having(**wanted):
        made = (rpg.algorithm(n) for n in NAMES)
        return {m.name for m in made if all(getattr(m, k) == v for k, v in wanted.items())}

    assert having(overlong_penalty=True) == {*RPG, "dapo", "high-entropy"}
    assert having(dynamic_sampling=True) == {*RPG, "dapo", "high-entropy", "skywork-or1"}
    assert having(curvature_gate=True) == {"capo"}
    assert having(min_signal=0.6) == set(NAMES) - having(min_signal=0.0) == {"gpg"}
    ranges = {n: rpg.algorithm(n).advantage.mapped_to for n in NAMES}
    assert {n: r for n, r in ranges.items() if r} == {"topr": (-1.0, 1.0), "maxrl": (0.0, 1.0)}
    assert {n for n in NAMES if rpg.algorithm(n).advantage.tau == 0.01} == {"pmd-partition"}
    assert having(reference="initial") == {"grpo", "grpo-corrected", "reinforce++", "reinforce++-baseline"}
    assert having(reference="average") | having(reference="teacher") == {"warp", "distill"}
    assert having(reference="old") == set(NAMES) - having(reference="initial") - {"warp", "distill"}


def test_what_the_coefficients_do_not_show():
    """The numbers of gates and bonuses, and what a method is nothing without."""
    assert rpg.algorithm("clip-cov").loss.gate == rpg.gates.ClipCov(2e-4, 1.0, 5.0)
    bonus = rpg.algorithm("skywork-or1").loss
    assert (bonus.entropy_target, bonus.entropy_step, bonus.entropy_bonus_limit) == (0.2, 1e-4, 0.005)
    assert rpg.algorithm("pmd-partition").advantage.tau == 0.01
    assert rpg.algorithm("topr").advantage.mapped_to == (-1, 1)
    assert rpg.algorithm("maxrl").advantage.mapped_to == (0, 1)
    b = Batch(0)
    given = (b.logp, b.old, b.ref, b.a[:, None], b.mask.double())
    plain, entropy = registry.plain_form("skywork-or1"), b.logp.abs()
    assert plain(*given) == plain(*given, entropy=entropy) == plain(*given, alpha=0.5)
    with_bonus = plain(*given, entropy=entropy, alpha=0.5)
    torch.testing.assert_close(plain(*given) - with_bonus, 0.5 * (entropy * b.mask).sum() / b.mask.sum())
    with pytest.raises(ValueError, match="needs keep=: "):
        rpg.algorithm("capo").loss(*b.args(), ref_logp=b.ref)


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_overrides():
    make = rpg.algorithm
    assert make("rpg-urkl", beta=0.5).loss.beta == 0.5
    assert make("grpo", beta=0.0).loss.beta == 0.0
    assert make("dapo", low=0.1, high=0.3).loss.clip == clip.Box(0.1, 0.3)
    assert make("rpg-reinforce-urkl", c=3.0).loss.clip == clip.RPGClip(0.2, 0.28, 3.0)
    assert make("atr-grpo", delta=0.1, form="k2").loss.clip == clip.KL3(0.1, "k2")
    assert make("sapo", tau_negative=2.0).loss.clip == clip.Sigmoid(1.0, 2.0)
    assert make("grpo", clip=clip.KL3(), delta=0.2).loss.clip == clip.KL3(0.2)
    assert make("grpo", clip=None).loss.clip is None
    assert make("grpo", loss=PolicyLoss(clip=clip.DualClip()), c=5.0).loss.clip == clip.DualClip(c=5.0)
    assert make("grpo", advantage="leave-one-out").advantage == Advantage("leave-one-out")
    assert make("grpo", advantage=Advantage("group-mean", whiten=True)).advantage.whiten
    assert make("grpo", advantage={"kind": "group-mean", "whiten": True}).advantage == Advantage(
        "group-mean", whiten=True
    )
    assert make("rloo", advantage={"beta": 0.05}).advantage == Advantage("leave-one-out", beta=0.05)
    assert make("rloo", **{"advantage.beta": 0.05}).advantage == Advantage("leave-one-out", beta=0.05)
    assert make("grpo", advantage="none", **{"advantage.whiten": True}).advantage == Advantage("none", whiten=True)
    own = Advantage("leave-one-out", scale_by_signal=True)
    assert make("grpo", advantage=own, **{"advantage.whiten": True}).advantage == own.replace(whiten=True)
    assert make("cispo", low=0.2).loss.clip == clip.Truncate(0.2, 4.0)
    assert make("dr-grpo", constant=1024).loss.constant == 1024
    assert make("grpo", reduction="constant", constant=64).loss.reduction == "constant"
    assert make("dr-grpo", reduction="token-mean", constant=None).loss.reduction == "token-mean"
    assert make("rpg-urkl", mismatch=rpg.mismatch.TIS(cap=3)).loss.mismatch == rpg.mismatch.TIS(cap=3)
    assert make("dapo", divergence="urkl", beta=0.2).loss.beta == 0.2
    assert make("dapo", dynamic_sampling=False).dynamic_sampling is False
    assert make("rpg-urkl", reference="initial").reference == "initial"
    changed = make("dapo", high=0.5, beta=0.0, level="sequence", dynamic_sampling=False)
    assert (changed.loss.clip.high, changed.loss.level, changed.dynamic_sampling) == (0.5, "sequence", False)
    assert changed.name == "dapo"
    assert make("dapo").loss.clip.high == 0.28  # presets are not shared state


def test_a_repr_shows_what_is_not_the_default():
    assert repr(rpg.algorithm("gspo")) == (
        "Algorithm(name='gspo', loss=PolicyLoss(divergence='none', beta=0, estimator='differentiable', "
        "clip=Box(low=0.0003, high=0.0004), level='sequence-mean', reduction='seq-mean-token-sum'), "
        "advantage=Advantage(kind='group-mean-std'))"
    )
    assert repr(PolicyLoss()) == "PolicyLoss()"


def test_the_formula_says_what_was_changed():
    published = rpg.algorithm("grpo").formula
    assert "Changed" not in published
    assert rpg.algorithm("grpo", beta=0.04, high=0.2).formula == published  # the published values
    assert rpg.algorithm("grpo", beta=0.5, high=0.3).formula == f"{published} Changed: beta, high."


def test_beta_never_falls_on_deaf_ears():
    """reinforce++ has its β in the reward; a method without a KL term has none to set."""
    assert rpg.algorithm("reinforce++").advantage.beta == 0.01
    changed = rpg.algorithm("reinforce++", beta=0.5)
    assert changed.advantage.beta == 0.5
    assert changed.loss.beta == 0.0
    for name in ("dapo", "rloo", "sapo"):
        with pytest.raises(ValueError, match=r"beta.*divergence"):
            rpg.algorithm(name, beta=0.5)
        assert rpg.algorithm(name, beta=0.0).loss.beta == 0.0
        with_kl = rpg.algorithm(name, advantage={"beta": 0.5})
        assert with_kl.resolve().anchor == "frozen"  # from the sampling policy itself it would be 0
        assert with_kl.resolve(update="every").anchor == "every"
        assert with_kl.resolve().needs_reference
    assert rpg.algorithm("reinforce++", beta=0.5, divergence="urkl").loss.beta == 0.5


@pytest.mark.parametrize(
    ("name", "options", "suggestion"),
    [
        ("gropo", {}, "'grpo'"),
        ("DAPO", {}, "Did you mean 'dapo'?"),
        ("grpo", {"epsilon": 0.1}, "Did you mean 'low'?"),
        ("grpo", {"epsilon_high": 0.1}, "Did you mean 'high'?"),
        ("rpg-reinforce-ukl", {}, "'rpg-reinforce-urkl'"),
        ("grpo", {"betta": 1}, "'beta'"),
        ("grpo", {"hihg": 1}, "'high'"),
        ("rpg-urkl", {"advantages": "none"}, "'advantage'"),
        ("grpo", {"advantage": "group-men"}, "'group-mean'"),
        ("grpo", {"divergence": "urlk"}, "'urkl'"),
        ("grpo", {"reduction": "token_mean"}, "'token-mean'"),
        ("grpo", {"level": "sequences"}, "'sequence'"),
        ("grpo", {"paper": "mine"}, ""),
        ("rloo", {"low": 0.1}, ""),
    ],
)
def test_unknown_overrides_name_the_nearest(name, options, suggestion):
    with pytest.raises(ValueError, match="unknown") as error:
        rpg.algorithm(name, **options)
    assert suggestion in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": 3},
        {"constant": "longest"},
        {"clip": "box"},
        {"mismatch": "tis"},
        {"low": 1.5},
        {"reduction": "constant"},
    ],
)
def test_impossible_overrides(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options)).replace("reduction", "constant")) as error:
        rpg.algorithm("grpo", **options)
    assert "\n" not in str(error.value)
