"""Named presets: every method is a row of one table, a few lines each. ``rpg.algorithm("dapo")``.

c is d loss / d log π of one token. "old" is the sampling policy; ``reference`` says which policy anchors the KL term:
"old" (updated every iteration, no second model is held) or "initial" (the model training began from).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace

from ..console import choose
from . import clip
from .advantages import Advantage
from .policy_loss import PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """A loss, the advantage it was published with, and what the training loop must do around them."""

    name: str
    loss: PolicyLoss
    advantage: Advantage
    paper: str = ""
    formula: str = ""
    reference: str = "old"
    dynamic_sampling: bool = False  # groups whose rewards are all equal are dropped and sampled again
    overlong_penalty: bool = False  # advantages.soft_overlong_penalty is added to the reward
    curvature_gate: bool = False  # clip.curvature_keep is passed to the loss as ``keep``

    @property
    def has_kl(self) -> bool:
        """In the loss, or in the reward."""
        return self.loss.has_kl or self.advantage.beta > 0

    def resolve(self, dynamic: bool | None = None, overlong: bool | None = None, update: str = "auto") -> Method:
        """With a run's own choices; None and "auto" are as published. Without a KL there is nothing to anchor: old."""
        anchor = {"old": "old", "initial": "frozen"}[self.reference] if update == "auto" else update
        return Method(
            name=self.name,
            loss=self.loss,
            advantage=self.advantage,
            dynamic=self.dynamic_sampling if dynamic is None else dynamic,
            overlong=self.overlong_penalty if overlong is None else overlong,
            anchor=anchor if self.has_kl else "old",
            curvature_gate=self.curvature_gate,
        )


@dataclass(frozen=True)
class Method:
    """An algorithm as one run has it. What is decided here is read everywhere, and decided nowhere else."""

    name: str
    loss: PolicyLoss
    advantage: Advantage
    dynamic: bool  # groups whose rewards are all equal are dropped and sampled again
    overlong: bool  # advantages.soft_overlong_penalty is added to the reward
    anchor: str  # of the KL: old (no second model is held), or a copy: every, kl, ema, frozen (loss/anchor.py)
    curvature_gate: bool = False  # clip.curvature_keep is passed to the loss as ``keep``

    @property
    def has_kl(self) -> bool:
        """In the loss, or in the reward."""
        return self.loss.has_kl or self.advantage.beta > 0

    @property
    def needs_reference(self) -> bool:
        """Whether it is another method without the log-probabilities of a reference."""
        return "ref_logp" in self.loss.needs or self.advantage.beta > 0

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt needs its most probable response too."""
        return self.advantage.kind == "greedy-baseline"


_PRESETS: dict[str, Callable[[], Algorithm]] = {}


def preset(name: str, paper: str) -> Callable[[Callable[[], Algorithm]], Callable[[], Algorithm]]:
    """Register a function whose docstring is the method's formula."""

    def register(make: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
        def build() -> Algorithm:
            formula = " ".join((make.__doc__ or "").split())
            return replace(make(), name=name, paper=paper, formula=formula)

        _PRESETS[name] = build
        return make

    return register


def algorithms() -> list[str]:
    """The names of all presets."""
    return list(_PRESETS)


def algorithm(name: str, **overrides: object) -> Algorithm:
    """A preset by name. Keywords override its loss (``beta=…``), its clip (``high=…``) or the algorithm itself
    (``advantage=Advantage(…)`` or ``advantage="leave-one-out"``)."""
    if name not in _PRESETS:
        raise ValueError(choose("algorithm", str(name), _PRESETS))
    made = _PRESETS[name]()
    if isinstance(overrides.get("advantage"), str):
        overrides["advantage"] = Advantage(str(overrides["advantage"]))
    own = {f.name for f in fields(Algorithm)} - {"name", "paper", "formula"}
    of_loss = {f.name for f in fields(PolicyLoss)}
    given = overrides.get("loss", made.loss)
    rule = overrides.get("clip", given.clip if isinstance(given, PolicyLoss) else None)
    of_clip = {f.name for f in fields(rule)} if is_dataclass(rule) else set()
    for key in overrides:
        if key not in own | of_loss | of_clip:
            raise ValueError(choose(f"option of {name!r}", key, own | of_loss | of_clip))
    made = replace(made, **{k: v for k, v in overrides.items() if k in own})  # type: ignore[arg-type]
    changes = {k: v for k, v in overrides.items() if k in of_loss}
    if "beta" in changes and changes.get("divergence", made.loss.divergence) == "none":
        if made.advantage.kind == "reward-to-go":  # its KL is in the reward
            made = replace(made, advantage=made.advantage.replace(beta=changes.pop("beta")))
        elif changes["beta"]:
            raise ValueError(f"beta has no effect on {name!r}, which has no KL term; give divergence='urkl' too")
    if changes.get("divergence", "none") != "none" and not changes.get("beta", made.loss.beta):
        raise ValueError(f"divergence={changes['divergence']!r} needs a beta: {name!r} has none of its own")
    if changes.get("reduction", "constant") != "constant":
        changes.setdefault("constant", None)
    inner = {k: v for k, v in overrides.items() if k in of_clip - of_loss}
    if inner:
        changes["clip"] = replace(rule, **inner)  # type: ignore[type-var]
    loss = made.loss.replace(**changes)
    formula = made.formula if loss == made.loss else f"{made.formula} Changed: {', '.join(overrides)}."
    return replace(made, formula=formula, loss=loss)


def _preset(loss: PolicyLoss, advantage: Advantage, **around: object) -> Algorithm:
    return Algorithm("", loss, advantage, **around)  # type: ignore[arg-type]


# ---- RPG: arXiv 2505.17508, section 5: β = 1e-4, (ε₁, ε₂) = (0.2, 0.28), ref = old; c = 10 as in its scripts ---------

_OMEGA = {"fkl": "w·A + β·v", "rkl": "w(A − β(log u + 1))", "ufkl": "w·A − β(w − v)", "urkl": "w(A − β·log u)"}
_VALUE = {"fkl": "−v·log π", "rkl": "w·log u", "ufkl": "v·k3(u)", "urkl": "w·log u − w"}


def _rpg(divergence: str, estimator: str) -> Callable[[], Algorithm]:
    def make() -> Algorithm:
        rule = clip.RPGClip() if estimator == "reinforce" else clip.DualClip()
        loss = PolicyLoss(divergence=divergence, beta=1e-4, estimator=estimator, clip=rule)
        return _preset(loss, Advantage("group-mean"), dynamic_sampling=True, overlong_penalty=True)

    if estimator == "reinforce":
        make.__doc__ = f"−sg(ω)·log π, ω = {_OMEGA[divergence]}, cut by RPG-Style Clip on the sign of ω/w."
    elif divergence in ("rkl", "urkl"):
        make.__doc__ = f"−w·A + β({_VALUE[divergence]}), dual-clipped with Â = ω/w = {_OMEGA[divergence][1:]}."
    else:
        make.__doc__ = f"Dual-clipped −w·A, plus β({_VALUE[divergence]}) outside the clip (w does not factor out)."
    return make


for _divergence in ("fkl", "rkl", "ufkl", "urkl"):
    preset(f"rpg-{_divergence}", "arXiv 2505.17508")(_rpg(_divergence, "differentiable"))
for _divergence in ("fkl", "rkl", "ufkl", "urkl"):
    preset(f"rpg-reinforce-{_divergence}", "arXiv 2505.17508")(_rpg(_divergence, "reinforce"))


# ---- the others ------------------------------------------------------------------------------------------------------


@preset("reinforce", "Williams 1992")
def reinforce() -> Algorithm:
    """−A·log π, A = R − group mean; c = −A. No importance weight: right on-policy only."""
    return _preset(PolicyLoss("none", 0, "reinforce", clip.Unweighted()), Advantage("group-mean"))


@preset("ppo", "arXiv 1707.06347")
def ppo() -> Algorithm:
    """−min(r·A, clip(r, 1±0.2)·A), A whitened over the batch (no critic); c = −A·r where not clipped."""
    return _preset(PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2)), Advantage("batch-whitening"))


@preset("grpo", "arXiv 2402.03300")
def grpo() -> Algorithm:
    """PPO-clip + β·k3(ref/π) without a weight, A = (R − mean)/std, 1/|y| then mean; c = −A·r·1{in} + β(1 − ref/π)."""
    rule = clip.Box(0.2, 0.2)
    loss = PolicyLoss("k3", 0.04, "differentiable", rule, reduction="seq-mean-token-mean", needs=("ref_logp",))
    return _preset(loss, Advantage("group-mean-std"), reference="initial")


@preset("grpo-corrected", "arXiv 2505.17508")
def grpo_corrected() -> Algorithm:
    """GRPO with the missing importance weight on its KL term, w·k3(ref/π); c = −A·r·1{in} + β·w·log u."""
    loss = grpo().loss.replace(divergence="urkl", kl_in_clip=False)
    return _preset(loss, Advantage("group-mean-std"), reference="initial")


@preset("dr-grpo", "arXiv 2503.20783")
def dr_grpo() -> Algorithm:
    """PPO-clip, A = R − mean, no KL, a constant denominator: override ``constant`` with your longest response."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2), reduction="constant", constant=3000)
    return _preset(loss, Advantage("group-mean"))


@preset("dapo", "arXiv 2503.14476")
def dapo() -> Algorithm:
    """PPO-clip with bounds (0.8, 1.28), A = (R − mean)/std, no KL, token mean, dynamic sampling, overlong penalty."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.28))
    return _preset(loss, Advantage("group-mean-std"), dynamic_sampling=True, overlong_penalty=True)


@preset("reinforce++", "arXiv 2501.03262")
def reinforce_pp() -> Algorithm:
    """PPO-clip; r_t = 1{t = last}·R − β·log(old/ref), its reward-to-go whitened over all tokens of the batch."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2))
    return _preset(loss, Advantage("reward-to-go", whiten=True, beta=0.01), reference="initial")


@preset("reinforce++-baseline", "arXiv 2501.03262")
def reinforce_pp_baseline() -> Algorithm:
    """PPO-clip; A = R − group mean, whitened over the batch; a k2 loss; c = −A·r·1{in} + β·log u."""
    loss = PolicyLoss("k2", 0.01, "differentiable", clip.Box(0.2, 0.2), needs=("ref_logp",))
    return _preset(loss, Advantage("batch-whitening", baseline=True), reference="initial")


@preset("rloo", "arXiv 2402.14740")
def rloo() -> Algorithm:
    """−A·log π(y), A = R − mean of the others; c = −A."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-sum")
    return _preset(loss, Advantage("leave-one-out"))


@preset("remax", "arXiv 2310.10505")
def remax() -> Algorithm:
    """−A·log π(y), A = R − R(greedy response); c = −A."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-sum")
    return _preset(loss, Advantage("greedy-baseline"))


@preset("gpg", "arXiv 2504.02546")
def gpg() -> Algorithm:
    """−A·log π, A = α(R − mean), α = groups / groups with signal; c = −A, token mean."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted())
    return _preset(loss, Advantage("group-mean", scale_by_signal=True))


@preset("gspo", "arXiv 2507.18071")
def gspo() -> Algorithm:
    """−min(S·A, clip(S)·A) with S = exp(mean_t log r), bounds (1 − 3e-4, 1 + 4e-4); c = −A·S·1{in}/|y|."""
    rule = clip.Box(3e-4, 4e-4)
    loss = PolicyLoss("none", 0, "differentiable", rule, level="sequence-mean", reduction="seq-mean-token-sum")
    return _preset(loss, Advantage("group-mean-std"))


@preset("cispo", "arXiv 2506.13585")
def cispo() -> Algorithm:
    """−sg(min(r, 5))·A·log π; c = −A·min(r, 5), never zero. The cap is ScaleRL's (arXiv 2510.13786)."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Truncate(low=None, high=4.0))
    return _preset(loss, Advantage("group-mean-std"))


@preset("cpgd", "arXiv 2505.12504")
def cpgd() -> Algorithm:
    """PPO-clip of the log-ratio + α·sg(min(r − 1, 2))·log π; c = −A·1{in} + α·min(r − 1, 2)."""
    loss = PolicyLoss("ufkl", 1e-3, "reinforce", clip.LogBox(0.2, 0.2), kl_ratio_cap=3.0)
    return _preset(loss, Advantage("group-mean"))


@preset("pmd-mean", "arXiv 2602.05933")
def pmd_mean() -> Algorithm:
    """½τ(A/τ − l)²/|y|, l = Σ log π/old (Kimi k1.5), A leave-one-out; c = −(A − τ·l)/|y|: k2 at sequence level."""
    loss = PolicyLoss("k2", 0.05, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-mean")
    return _preset(loss, Advantage("leave-one-out"))


@preset("atr-grpo", "arXiv 2602.05494")
def atr_grpo() -> Algorithm:
    """GRPO whose clip is the level set k3(r) ≤ δ; c = −A·r·1{in}. δ = 0.05 allows (0.716, 1.350)."""
    loss = PolicyLoss("none", 0, "differentiable", clip.KL3(0.05, "k3"), reduction="seq-mean-token-mean")
    return _preset(loss, Advantage("group-mean-std"))


@preset("capo", "arXiv 2510.00819")
def capo() -> Algorithm:
    """GRPO times a token mask from last-layer curvature: ``clip.curvature_keep`` gives ``keep``."""
    rule = clip.Box(0.2, 0.2)
    loss = PolicyLoss("none", 0, "differentiable", rule, reduction="seq-mean-token-mean", needs=("keep",))
    return _preset(loss, Advantage("group-mean-std"), curvature_gate=True)


@preset("topr", "arXiv 2503.14286")
def topr() -> Algorithm:
    """R > 0: −R·log π(y); R < 0: −sg(min(W, 1))·R·log π(y). Rewards are signed, there is no baseline."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Taper(), level="sequence", reduction="seq-mean-token-sum")
    return _preset(loss, Advantage("none"))


@preset("sapo", "arXiv 2511.20347")
def sapo() -> Algorithm:
    """−A·(4/τ)·sigmoid(τ(r − 1)), τ = 1 for A > 0 and 1.05 otherwise; 1/|y| then mean."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Sigmoid(1.0, 1.05), reduction="seq-mean-token-mean")
    return _preset(loss, Advantage("group-mean-std"))
