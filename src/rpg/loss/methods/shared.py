# mypy: allow-untyped-defs, allow-untyped-calls
"""What the plain forms of several methods share."""

from __future__ import annotations

import torch


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
