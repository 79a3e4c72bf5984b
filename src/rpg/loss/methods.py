# mypy: allow-untyped-defs, allow-untyped-calls
"""Every method: its row of the table, and below it the same loss in a few lines of plain torch.

A row is what runs; its plain form is there to be checked against the paper, and the tests hold that both have the same
gradient. A plain form takes logp, old, ref and a mask of ones and zeros, [B,T] each, and the advantage A, [B,1] or
[B,T]. Letters as in the papers: w = π/old (r where a paper calls it that), u = π/ref, v = ref/old, sg = stop-gradient,
c = d loss / d log π of one token. ``rpg algorithms NAME`` prints both.
"""

from __future__ import annotations

import math

import torch

from . import clip, gates
from .advantages import Advantage
from .policy_loss import PolicyLoss
from .registry import Algorithm, Method, algorithm, algorithms, plain, preset, row

__all__ = ["Algorithm", "Method", "algorithm", "algorithms"]

# ---- what the plain forms share --------------------------------------------------------------------------------------


def token_mean(x, mask):
    """Over all tokens of the optimiser step."""
    return (x * mask).sum() / mask.sum()


def response_mean(x, mask):
    """Over the tokens of each response, then over the responses: 1/|y|, 1/G."""
    return ((x * mask).sum(-1) / mask.sum(-1)).mean()


def ppo_clip(w, A, low, high):
    """−min(w·A, clip(w)·A)."""
    return -torch.min(w * A, w.clamp(low, high) * A)


def dual_clip(w, A, low=0.8, high=1.28, c=10.0):
    """ppo_clip, and for A < 0 no larger than −c·A."""
    loss = ppo_clip(w, A, low, high)
    return torch.where(A < 0, torch.min(loss, -c * A), loss)


def rpg_clip(w, A_hat, low=0.8, high=1.28, c=10.0):
    """RPG-Style Clip: which samples keep their gradient, by the sign of Â = ω/w."""
    return torch.where(A_hat >= 0, w < high, (w > low) & (w < c))


def k3(x):
    """x − 1 − log x."""
    return x - 1 - x.log()


# ---- RPG, section 5: β = 1e-4, (ε₁, ε₂) = (0.2, 0.28), ref = old; c = 10 as in its scripts -------------------------

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


# ---- the others ------------------------------------------------------------------------------------------------------


@preset("reinforce", "Williams 1992")
def reinforce() -> Algorithm:
    """−A·log π, A = R − group mean; c = −A. No importance weight: right on-policy only."""
    return row(PolicyLoss("none", 0, "reinforce", clip.Unweighted()), Advantage("group-mean"))


@plain("reinforce")
def reinforce_plain(logp, old, ref, A, mask):
    return token_mean(-A * logp, mask)


@preset("ppo", "arXiv 1707.06347")
def ppo() -> Algorithm:
    """PPO's clip without its critic: −min(r·A, clip(r, 1±0.2)·A), A = R whitened over the batch in place of GAE;
    c = −A·r where not clipped."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2))
    return row(loss, Advantage("batch-whitening"), note="there is no critic: its advantage is the whitened reward")


@plain("ppo")
def ppo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.2), mask)


@preset("grpo", "arXiv 2402.03300")
def grpo() -> Algorithm:
    """PPO-clip + β·k3(ref/π) without a weight, A = (R − mean)/std, 1/|y| then mean; c = −A·r·1{in} + β(1 − ref/π)."""
    rule = clip.Box(0.2, 0.2)
    loss = PolicyLoss("k3", 0.04, "differentiable", rule, reduction="seq-mean-token-mean", needs=("ref_logp",))
    return row(loss, Advantage("group-mean-std"), reference="initial")


@plain("grpo")
def grpo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return response_mean(ppo_clip(r, A, 0.8, 1.2) + 0.04 * k3((ref - logp).exp()), mask)


@preset("grpo-corrected", RPG)
def grpo_corrected() -> Algorithm:
    """GRPO with the missing importance weight on its KL term, w·k3(ref/π); c = −A·r·1{in} + β·w·log u."""
    loss = grpo().loss.replace(divergence="urkl", kl_in_clip=False)
    return row(loss, Advantage("group-mean-std"), reference="initial")


@plain("grpo-corrected")
def grpo_corrected_plain(logp, old, ref, A, mask):
    w = (logp - old).exp()
    return response_mean(ppo_clip(w, A, 0.8, 1.2) + 0.04 * w * k3((ref - logp).exp()), mask)


@preset("dr-grpo", "arXiv 2503.20783")
def dr_grpo() -> Algorithm:
    """PPO-clip, A = R − mean, no KL; the denominator is a constant a response, ``constant``: in a run the longest
    response it allows (rollout.max_new_tokens), 3000 elsewhere."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2), reduction="constant", constant=3000)
    return row(loss, Advantage("group-mean"))


@plain("dr-grpo")
def dr_grpo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return (ppo_clip(r, A, 0.8, 1.2) * mask).sum() / (len(mask) * 3000)


@preset("dapo", "arXiv 2503.14476")
def dapo() -> Algorithm:
    """PPO-clip with bounds (0.8, 1.28), A = (R − mean)/std, no KL, token mean, dynamic sampling, overlong penalty."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.28))
    return row(loss, Advantage("group-mean-std"), dynamic_sampling=True, overlong_penalty=True)


@plain("dapo")
def dapo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.28), mask)


@preset("reinforce++", "arXiv 2501.03262")
def reinforce_pp() -> Algorithm:
    """PPO-clip; r_t = 1{t = last}·R − β·log(old/ref), its reward-to-go whitened over all tokens of the batch."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2))
    return row(loss, Advantage("reward-to-go", whiten=True, beta=0.01), reference="initial")


@plain("reinforce++")
def reinforce_pp_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.2), mask)  # the KL is in A


@preset("reinforce++-baseline", "arXiv 2501.03262")
def reinforce_pp_baseline() -> Algorithm:
    """PPO-clip; A = R − group mean, whitened over all tokens of the batch; a k2 loss; c = −A·r·1{in} + β·log u."""
    loss = PolicyLoss("k2", 0.01, "differentiable", clip.Box(0.2, 0.2), needs=("ref_logp",))
    return row(loss, Advantage("batch-whitening", baseline=True, over="tokens"), reference="initial")


@plain("reinforce++-baseline")
def reinforce_pp_baseline_plain(logp, old, ref, A, mask):
    r, log_u = (logp - old).exp(), logp - ref
    return token_mean(ppo_clip(r, A, 0.8, 1.2) + 0.01 * log_u**2 / 2, mask)


@preset("rloo", "arXiv 2402.14740")
def rloo() -> Algorithm:
    """−A·log π(y), A = R − mean of the others; c = −A. ``advantage.beta`` puts a KL into R: − β·Σ log(old/ref)."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-sum")
    return row(loss, Advantage("leave-one-out"))


@plain("rloo")
def rloo_plain(logp, old, ref, A, mask):
    log_pi = (logp * mask).sum(-1, keepdim=True)  # of the whole response
    return (-A * log_pi).mean()


@preset("remax", "arXiv 2310.10505")
def remax() -> Algorithm:
    """−A·log π(y), A = R − R(greedy response); c = −A."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-sum")
    return row(loss, Advantage("greedy-baseline"))


@plain("remax")
def remax_plain(logp, old, ref, A, mask):
    log_pi = (logp * mask).sum(-1, keepdim=True)
    return (-A * log_pi).mean()


@preset("gpg", "arXiv 2504.02546")
def gpg() -> Algorithm:
    """−A·log π, A = α(R − mean), α = groups / groups with signal; c = −A, token mean. More is sampled while fewer than
    a share ``min_signal`` of the groups have signal: 0.6, its best row (0.4 in the authors' scripts)."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Unweighted())
    return row(loss, Advantage("group-mean", scale_by_signal=True), min_signal=0.6)


@plain("gpg")
def gpg_plain(logp, old, ref, A, mask):
    return token_mean(-A * logp, mask)


@preset("gspo", "arXiv 2507.18071")
def gspo() -> Algorithm:
    """−min(S·A, clip(S)·A) with S = exp(mean_t log r), bounds (1 − 3e-4, 1 + 4e-4); c = −A·S·1{in}/|y|."""
    rule = clip.Box(3e-4, 4e-4)
    loss = PolicyLoss("none", 0, "differentiable", rule, level="sequence-mean", reduction="seq-mean-token-sum")
    return row(loss, Advantage("group-mean-std"))


@plain("gspo")
def gspo_plain(logp, old, ref, A, mask):
    log_r = ((logp - old) * mask).sum(-1, keepdim=True)
    S = (log_r / mask.sum(-1, keepdim=True)).exp()  # one ratio a response: the geometric mean of its tokens'
    return ppo_clip(S, A, 1 - 3e-4, 1 + 4e-4).mean()


@preset("cispo", "arXiv 2506.13585")
def cispo() -> Algorithm:
    """−sg(min(r, 5))·A·log π; c = −A·min(r, 5), never zero. The cap is ScaleRL's (arXiv 2510.13786); ``low`` adds the
    lower bound 1 − low, which MiniMax left open."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Truncate(low=None, high=4.0))
    return row(loss, Advantage("group-mean-std"))


@plain("cispo")
def cispo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    return token_mean(-r.clamp(max=5).detach() * A * logp, mask)


@preset("cpgd", "arXiv 2505.12504")
def cpgd() -> Algorithm:
    """PPO-clip of the log-ratio + α·sg(min(r − 1, 2))·log π, A = (R − mean)/std (its STD weight);
    c = −A·1{in} + α·min(r − 1, 2)."""
    loss = PolicyLoss("ufkl", 1e-3, "reinforce", clip.LogBox(0.2, 0.2), kl_ratio_cap=3.0)
    return row(loss, Advantage("group-mean-std"))


@plain("cpgd")
def cpgd_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    clipped = torch.where(A >= 0, logp.min(old + math.log(1.2)), logp.max(old + math.log(0.8)))
    return token_mean(-A * clipped + 1e-3 * (r - 1).clamp(max=2).detach() * logp, mask)


@preset("pmd-mean", "arXiv 2602.05933")
def pmd_mean() -> Algorithm:
    """½τ(A/τ − l)²/|y|, l = Σ log π/old (Kimi k1.5), A leave-one-out; c = −(A − τ·l)/|y|: k2 at sequence level.
    τ is ``beta``, 0.01 in the authors' scripts (horizon-rl/OpenKimi)."""
    loss = PolicyLoss("k2", 0.01, "reinforce", clip.Unweighted(), level="sequence", reduction="seq-mean-token-mean")
    return row(loss, Advantage("leave-one-out"))


@plain("pmd-mean")
def pmd_mean_plain(logp, old, ref, A, mask):
    tau, length = 0.01, mask.sum(-1, keepdim=True)
    log_r = ((logp - old) * mask).sum(-1, keepdim=True)
    return (tau / 2 * (A / tau - log_r) ** 2 / length).mean()


@preset("pmd-partition", "arXiv 2602.05933")
def pmd_partition() -> Algorithm:
    """½τ(A/τ − l)²/|y| as pmd-mean, A = R − τ·log mean exp(R/τ) of the group's others; c = −(A − τ·l)/|y|.
    ``beta`` is τ in both, 0.01."""
    return row(pmd_mean().loss, Advantage("log-partition", tau=0.01))


@plain("pmd-partition")
def pmd_partition_plain(logp, old, ref, A, mask):
    return pmd_mean_plain(logp, old, ref, A, mask)


@preset("atr-grpo", "arXiv 2602.05494")
def atr_grpo() -> Algorithm:
    """GRPO whose clip is the level set k3(r) ≤ δ; c = −A·r·1{in}. δ = 0.05 allows (0.716, 1.350)."""
    loss = PolicyLoss("none", 0, "differentiable", clip.KL3(0.05, "k3"), reduction="seq-mean-token-mean")
    return row(loss, Advantage("group-mean-std"))


@plain("atr-grpo")
def atr_grpo_plain(logp, old, ref, A, mask):
    r = (logp - old).exp()
    away = (r > 1) == (A >= 0)  # a step along A would take r further from 1
    return response_mean(-r * A * ~((k3(r) > 0.05) & away), mask)


@preset("capo", "arXiv 2510.00819")
def capo() -> Algorithm:
    """GRPO times a token mask from last-layer curvature: ``clip.curvature_keep`` gives ``keep``."""
    rule = clip.Box(0.2, 0.2)
    loss = PolicyLoss("none", 0, "differentiable", rule, reduction="seq-mean-token-mean", needs=("keep",))
    return row(loss, Advantage("group-mean-std"), curvature_gate=True)


@plain("capo")
def capo_plain(logp, old, ref, A, mask, keep):
    r = (logp - old).exp()
    return response_mean(ppo_clip(r, A, 0.8, 1.2) * keep, mask)  # keep, [B,T]: see clip.curvature_keep


@preset("topr", "arXiv 2503.14286")
def topr() -> Algorithm:
    """A = R − c, R of −1 … 1 (a run maps 0 … 1 there), c = ``advantage.constant`` = 0; A > 0: −A·log π(y); A < 0:
    −sg(min(W, 1))·A·log π(y); a response's loss is divided by its length."""
    loss = PolicyLoss("none", 0, "reinforce", clip.Taper(), level="sequence", reduction="seq-mean-token-mean")
    return row(loss, Advantage("constant", mapped_to=(-1, 1)))


@plain("topr")
def topr_plain(logp, old, ref, A, mask):
    log_pi, log_old = ((x * mask).sum(-1, keepdim=True) for x in (logp, old))
    W = (log_pi - log_old).exp().detach()
    return (-torch.where(A > 0, 1.0, W.clamp(max=1)) * A * log_pi / mask.sum(-1, keepdim=True)).mean()


@preset("sapo", "arXiv 2511.20347")
def sapo() -> Algorithm:
    """−A·(4/τ)·sigmoid(τ(r − 1)), τ = 1 for A > 0 and 1.05 otherwise; 1/|y| then mean."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Sigmoid(1.0, 1.05), reduction="seq-mean-token-mean")
    return row(loss, Advantage("group-mean-std"))


@plain("sapo")
def sapo_plain(logp, old, ref, A, mask):
    r, tau = (logp - old).exp(), torch.where(A > 0, torch.ones_like(A), 1.05)
    return response_mean(-A * 4 / tau * torch.sigmoid(tau * (r - 1)), mask)


@preset("dppo-tv", "arXiv 2602.04879")
def dppo_tv() -> Algorithm:
    """−r·A unless |π − old| > 0.15 and a step along A widens it; A = R − mean, constant denominator; c = −A·r·1{in}."""
    rule = clip.TrustRegion(0.15, "tv")
    loss = PolicyLoss("none", 0, "differentiable", rule, reduction="constant", constant=3000)
    return row(loss, Advantage("group-mean"))


@plain("dppo-tv")
def dppo_tv_plain(logp, old, ref, A, mask):
    r, gain = (logp - old).exp(), logp.exp() - old.exp()
    cut = torch.where(A >= 0, gain > 0.15, gain < -0.15)
    return (-r * A * ~cut * mask).sum() / (len(mask) * 3000)


@preset("dppo-kl", "arXiv 2602.04879")
def dppo_kl() -> Algorithm:
    """dppo-tv with the KL of two coins, KL(old‖π) of the token against all others, at most 0.05."""
    return row(dppo_tv().loss.replace(clip=clip.TrustRegion(0.05, "kl")), Advantage("group-mean"))


@plain("dppo-kl")
def dppo_kl_plain(logp, old, ref, A, mask):
    r, p, q = (logp - old).exp(), old.exp(), logp.exp()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    cut = (kl > 0.05) & torch.where(A >= 0, q > p, q < p)
    return (-r * A * ~cut * mask).sum() / (len(mask) * 3000)


@preset("gmpo", "arXiv 2507.20673")
def gmpo() -> Algorithm:
    """−S·A, S = exp(mean_t log r) of token ratios clipped to e^±0.4 by the sign of A; c = −A·S·1{token in}/|y|."""
    rule = clip.Box(low=-math.expm1(-0.4), high=math.expm1(0.4))
    loss = PolicyLoss("none", 0, "differentiable", None, "sequence-mean", "seq-mean-token-sum", token_clip=rule)
    return row(loss, Advantage("group-mean-std"))


@plain("gmpo")
def gmpo_plain(logp, old, ref, A, mask):
    log_r = logp - old
    clipped = torch.where(A >= 0, log_r.clamp(max=0.4), log_r.clamp(min=-0.4))
    S = ((clipped * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
    return (-S * A).mean()


@preset("luspo", "arXiv 2602.05261")
def luspo() -> Algorithm:
    """GSPO's loss times |y|, so that a token counts the same in every response; bounds (1 − 2e-3, 1 + 2.5e-3)."""
    return row(gspo().loss.replace(clip=clip.Box(2e-3, 2.5e-3), length_weighted=True), Advantage("group-mean-std"))


@plain("luspo")
def luspo_plain(logp, old, ref, A, mask):
    length = mask.sum(-1, keepdim=True)
    S = (((logp - old) * mask).sum(-1, keepdim=True) / length).exp()
    return (length * ppo_clip(S, A, 1 - 2e-3, 1 + 2.5e-3)).mean()


@preset("vespo", "arXiv 2602.10693")
def vespo() -> Algorithm:
    """−sg(φ(W))·A·log π, φ = W^k·e^{λ(1−W)}, W = π/old of the response, (k, λ) = (2, 3) for A ≥ 0, else (3, 2)."""
    return row(PolicyLoss("none", 0, "reinforce", clip.SoftWeight(), level="sequence"), Advantage("group-mean-std"))


@plain("vespo")
def vespo_plain(logp, old, ref, A, mask):
    log_W = ((logp - old) * mask).sum(-1, keepdim=True).detach()
    k, rate = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    phi = (k * log_W + rate * (1 - log_W.exp())).exp()
    return token_mean(-phi * A * logp, mask)


@preset("clip-cov", "arXiv 2505.22617")
def clip_cov() -> Algorithm:
    """−min(r·A, clip(r, 0, 2)·A); a random 0.02 % of tokens with (A − mean)(log π − mean) in (1, 5) do not learn."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(None, 1.0), gate=gates.ClipCov(2e-4, 1.0, 5.0))
    return row(loss, Advantage("group-mean-std"))


@plain("clip-cov")
def clip_cov_plain(logp, old, ref, A, mask, chosen):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0, 2) * chosen, mask)  # chosen, [B,T]: see gates.ClipCov


@preset("kl-cov", "arXiv 2505.22617")
def kl_cov() -> Algorithm:
    """−r·A, and + |log r| on the 0.02 % of tokens with the largest (A − mean)(log π − mean); c = −A·r + sign(log r)."""
    loss = PolicyLoss("abs", 1.0, "differentiable", None, gate=gates.KLCov(2e-4))
    return row(loss, Advantage("group-mean-std"))


@plain("kl-cov")
def kl_cov_plain(logp, old, ref, A, mask, chosen):
    log_r = logp - old
    return token_mean(-log_r.exp() * A + chosen * log_r.abs(), mask)  # chosen, [B,T]: see gates.KLCov


@preset("high-entropy", "arXiv 2506.01939")
def high_entropy() -> Algorithm:
    """DAPO; only the fifth of the tokens with the highest entropy learns; the denominator counts all tokens."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.28), gate=gates.HighEntropy(0.2))
    return row(loss, Advantage("group-mean-std"), dynamic_sampling=True, overlong_penalty=True)


@plain("high-entropy")
def high_entropy_plain(logp, old, ref, A, mask, chosen):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.28) * chosen, mask)  # chosen, [B,T]: see gates.HighEntropy


@preset("skywork-or1", "arXiv 2505.22312")
def skywork_or1() -> Algorithm:
    """PPO-clip − α·entropy, no KL, token mean; α moves by 1e-4 a step, up to 0.005, to keep the entropy at 0.2."""
    loss = PolicyLoss("none", 0, "differentiable", clip.Box(0.2, 0.2))
    loss = loss.replace(entropy_target=0.2, entropy_step=1e-4, entropy_bonus_limit=0.005)
    return row(loss, Advantage("group-mean-std"), dynamic_sampling=True)


@plain("skywork-or1")
def skywork_or1_plain(logp, old, ref, A, mask, entropy=0.0, alpha=0.0):
    r = (logp - old).exp()
    return token_mean(ppo_clip(r, A, 0.8, 1.2) - alpha * entropy, mask)


# ---- baselines that have a name --------------------------------------------------------------------------------------


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
