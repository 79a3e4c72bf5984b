# mypy: allow-untyped-defs, allow-untyped-calls
"""Which tokens and responses count, and how much: trust regions, weights of responses, gates, entropy."""

from __future__ import annotations

import math

import torch

from .. import clip, gates
from ..advantages import Advantage
from ..policy_loss import PolicyLoss
from ..registry import Algorithm, plain, preset, row
from .policy_gradients import gspo
from .shared import ppo_clip, token_mean


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
