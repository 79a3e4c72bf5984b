# mypy: allow-untyped-defs, allow-untyped-calls
"""REINFORCE, PPO, GRPO and their kin."""

from __future__ import annotations

import math

import torch

from .. import clip
from ..advantages import Advantage
from ..policy_loss import PolicyLoss
from ..registry import Algorithm, plain, preset, row
from .rpg_paper import RPG
from .shared import k3, ppo_clip, response_mean, token_mean


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
