# mypy: allow-untyped-defs, allow-untyped-calls
"""RPG, section 5: β = 1e-4, (ε₁, ε₂) = (0.2, 0.28), ref = old; c = 10 as in its scripts."""

from __future__ import annotations

from .. import clip
from ..advantages import Advantage
from ..policy_loss import PolicyLoss
from ..registry import Algorithm, plain, preset, row
from .shared import dual_clip, k3, rpg_clip, token_mean

RPG = "arXiv 2505.17508"


def rpg(loss: PolicyLoss) -> Algorithm:
    """A = R − group mean, dynamic sampling, overlong penalty: the same for all of them."""
    return row(loss, Advantage("group-mean"), dynamic_sampling=True, overlong_penalty=True)


@preset("rpg-fkl", RPG)
def rpg_fkl() -> Algorithm:
    """Dual-clipped −w·A, plus β(−v·log π) outside the clip (w does not factor out)."""
    return rpg(PolicyLoss("fkl", 1e-4, "differentiable", clip.DualClip(0.2, 0.28, c=10.0)))


@plain("rpg-fkl")
def rpg_fkl_plain(logp, old, ref, A, mask):
    w, v = (logp - old).exp(), (ref - old).exp()
    return token_mean(dual_clip(w, A) - 1e-4 * v * logp, mask)


@preset("rpg-rkl", RPG)
def rpg_rkl() -> Algorithm:
    """−clip(w)·sg(Â), dual-clipped, Â = A − β(log u + 1); c = −w·Â = −ω inside the clip, 0 where it cuts."""
    return rpg(PolicyLoss("rkl", 1e-4, "differentiable", clip.DualClip(0.2, 0.28, c=10.0)))


@plain("rpg-rkl")
def rpg_rkl_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    A_hat = A - 1e-4 * (log_u + 1)
    return token_mean(dual_clip(w, A_hat.detach()), mask)


@preset("rpg-rkl-printed", RPG)
def rpg_rkl_printed() -> Algorithm:
    """Algorithm 1 to the letter: rpg-rkl differentiated through Â too; c = −w·Â + β·w inside the clip."""
    loss = rpg_rkl().loss
    return rpg(loss.replace(through_advantage=True))


@plain("rpg-rkl-printed")
def rpg_rkl_printed_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    A_hat = A - 1e-4 * (log_u + 1)  # the gradient flows through it too
    return token_mean(dual_clip(w, A_hat), mask)


@preset("rpg-ufkl", RPG)
def rpg_ufkl() -> Algorithm:
    """Dual-clipped −w·A, plus β(v·k3(u)) outside the clip (w does not factor out)."""
    return rpg(PolicyLoss("ufkl", 1e-4, "differentiable", clip.DualClip(0.2, 0.28, c=10.0)))


@plain("rpg-ufkl")
def rpg_ufkl_plain(logp, old, ref, A, mask):
    w, u, v = (logp - old).exp(), (logp - ref).exp(), (ref - old).exp()
    return token_mean(dual_clip(w, A) + 1e-4 * v * k3(u), mask)


@preset("rpg-urkl", RPG)
def rpg_urkl() -> Algorithm:
    """−clip(w)·sg(Â), dual-clipped, Â = A − β·log u; c = −w·Â = −ω inside the clip, 0 where it cuts."""
    return rpg(PolicyLoss("urkl", 1e-4, "differentiable", clip.DualClip(0.2, 0.28, c=10.0)))


@plain("rpg-urkl")
def rpg_urkl_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    A_hat = A - 1e-4 * log_u
    return token_mean(dual_clip(w, A_hat.detach()), mask)


@preset("rpg-urkl-printed", RPG)
def rpg_urkl_printed() -> Algorithm:
    """Algorithm 1 to the letter: rpg-urkl differentiated through Â too; c = −w·Â + β·w inside the clip."""
    loss = rpg_urkl().loss
    return rpg(loss.replace(through_advantage=True))


@plain("rpg-urkl-printed")
def rpg_urkl_printed_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    A_hat = A - 1e-4 * log_u  # the gradient flows through it too
    return token_mean(dual_clip(w, A_hat), mask)


@preset("rpg-reinforce-fkl", RPG)
def rpg_reinforce_fkl() -> Algorithm:
    """−sg(ω)·log π, ω = w·A + β·v, cut by RPG-Style Clip on the sign of ω/w."""
    return rpg(PolicyLoss("fkl", 1e-4, "reinforce", clip.RPGClip(0.2, 0.28, c=10.0)))


@plain("rpg-reinforce-fkl")
def rpg_reinforce_fkl_plain(logp, old, ref, A, mask):
    w, v = (logp - old).exp(), (ref - old).exp()
    omega = w * A + 1e-4 * v
    return token_mean(-(omega * rpg_clip(w, omega / w)).detach() * logp, mask)


@preset("rpg-reinforce-rkl", RPG)
def rpg_reinforce_rkl() -> Algorithm:
    """−sg(ω)·log π, ω = w(A − β(log u + 1)), cut by RPG-Style Clip on the sign of ω/w."""
    return rpg(PolicyLoss("rkl", 1e-4, "reinforce", clip.RPGClip(0.2, 0.28, c=10.0)))


@plain("rpg-reinforce-rkl")
def rpg_reinforce_rkl_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    omega = w * (A - 1e-4 * (log_u + 1))
    return token_mean(-(omega * rpg_clip(w, omega / w)).detach() * logp, mask)


@preset("rpg-reinforce-ufkl", RPG)
def rpg_reinforce_ufkl() -> Algorithm:
    """−sg(ω)·log π, ω = w·A − β(w − v), cut by RPG-Style Clip on the sign of ω/w."""
    return rpg(PolicyLoss("ufkl", 1e-4, "reinforce", clip.RPGClip(0.2, 0.28, c=10.0)))


@plain("rpg-reinforce-ufkl")
def rpg_reinforce_ufkl_plain(logp, old, ref, A, mask):
    w, v = (logp - old).exp(), (ref - old).exp()
    omega = w * A - 1e-4 * (w - v)
    return token_mean(-(omega * rpg_clip(w, omega / w)).detach() * logp, mask)


@preset("rpg-reinforce-urkl", RPG)
def rpg_reinforce_urkl() -> Algorithm:
    """−sg(ω)·log π, ω = w(A − β·log u), cut by RPG-Style Clip on the sign of ω/w."""
    return rpg(PolicyLoss("urkl", 1e-4, "reinforce", clip.RPGClip(0.2, 0.28, c=10.0)))


@plain("rpg-reinforce-urkl")
def rpg_reinforce_urkl_plain(logp, old, ref, A, mask):
    w, log_u = (logp - old).exp(), logp - ref
    omega = w * (A - 1e-4 * log_u)
    return token_mean(-(omega * rpg_clip(w, omega / w)).detach() * logp, mask)
