# mypy: allow-untyped-defs, allow-untyped-calls
"""Methods that are a baseline, an anchor or a teacher around a plain loss."""

from __future__ import annotations

from .. import clip
from ..advantages import Advantage
from ..policy_loss import PolicyLoss
from ..registry import Algorithm, plain, preset, row
from .policy_gradients import rloo, rloo_plain
from .shared import ppo_clip, token_mean


@preset("maxrl", "arXiv 2602.02710")
def maxrl() -> Algorithm:
    """PPO-clip, token mean; A = (R − mean)/mean, 0 where nothing is solved, R of 0 … 1: towards log p of a prompt
    instead of p; c = −A·r·1{in}."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2))
    return row(loss, Advantage("success-rate", mapped_to=(0, 1)))


@plain("maxrl")
def maxrl_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.2), mask)


@preset("opo", "arXiv 2505.23585")
def opo() -> Algorithm:
    """−A·log π(y), A = R − Σ|y|·R/Σ|y| of the group; c = −A. No importance weight: it is for one step on a batch."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-sum")
    return row(loss, Advantage("length-weighted"))


@plain("opo")
def opo_plain(logp, old, ref, A, mask):
    log_pi = (logp * mask).sum(-1, keepdim=True)
    return (-A * log_pi).mean()


@preset("otb", "arXiv 2602.07078")
def otb() -> Algorithm:
    """−A_t·log π, A_t = R − Σ W_t·R/Σ W_t over the group's responses that reach t, W_t = Σ_{j≤t} (1 − 2π_j + Σπ²), the
    optimal token baseline; c = −A_t, summed over tokens."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), reduction="seq-mean-token-sum")
    return row(loss, Advantage("optimal-token"))


@plain("otb")
def otb_plain(logp, old, ref, A, mask):
    return (-A * logp * mask).sum(-1).mean()


# ---- anchors of other kinds ------------------------------------------------------------------------------------------


@preset("warp", "arXiv 2406.16768")
def warp() -> Algorithm:
    """−A·log π(y), A = R_β − mean of the others, R_β = R − β·Σ log(old/ref), β = 0.1; c = −A. ref is the moving average
    of π; ``rpg merge`` joins runs."""
    return row(rloo().loss, Advantage("leave-one-out", beta=0.1), reference="average")


@plain("warp")
def warp_plain(logp, old, ref, A, mask):
    return rloo_plain(logp, old, ref, A, mask)  # the KL is in A


@preset("distill", "arXiv 2306.13649")
def distill() -> Algorithm:
    """−sg(ω)·log π, ω = w(A − β·log u), A = 0, β = 1: KL(π‖teacher) at each token of π's own responses; c = w·log u.
    ref is the teacher, ``reference.model``."""
    loss = PolicyLoss("urkl", 1.0, "reinforce", None, needs=("ref_logp",))
    return row(loss, Advantage("zero"), reference="teacher")


@plain("distill")
def distill_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref  # ref: the teacher; A is 0
    return token_mean(-(w * (A - log_u)).detach() * logp, mask)
