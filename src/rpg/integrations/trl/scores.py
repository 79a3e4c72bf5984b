"""Rewards of a generation batch, of all processes -> advantages, and the responses that are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...loss.advantages import Advantage

SAME = 1e-6  # rewards of a group no further apart are equal: a sum of several is no more exact in float32


@dataclass(frozen=True)
class GenerationScores:
    """N responses in groups of one size, in order."""

    reward_N: Tensor  # nan where no reward function had a value
    penalty_N: Tensor  # of overlong responses, at most 0
    group_N: Tensor
    correct_N: Tensor | None = None  # what says which groups have signal; None: the reward

    def advantages(
        self,
        rule: Advantage,
        dynamic: bool,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[N] or [N,T], and [N]: true for what is trained on. What is not has no part in any baseline or mean.

        Left out are responses without a reward, without a token in ``mask`` and, if ``dynamic``, groups whose responses
        are all as correct, or where nothing says that, whose rewards are all equal: a penalty on length alone is
        nothing to learn.
        """
        keep_N = ~self.reward_N.isnan()
        if mask is not None:
            keep_N = keep_N & mask.any(-1)
        if dynamic:
            keep_N = keep_N & self._informative(keep_N)
        if rule.kind in ("leave-one-out", "log-partition"):
            keep_N = keep_N & (self._count(keep_N) > 1)
        if int(keep_N.sum()) < 2:  # nothing to compare
            keep_N = torch.zeros_like(keep_N)
        shape = self.reward_N.shape if not rule.per_token or mask is None else mask.shape
        out = self.reward_N.new_zeros(shape)
        if bool(keep_N.any()):
            mask, old_logp, ref_logp = (None if x is None else x[keep_N] for x in (mask, old_logp, ref_logp))
            total_N, group_N = (self.reward_N + self.penalty_N)[keep_N], self.group_N[keep_N]
            out[keep_N] = rule(total_N, group_N, mask=mask, old_logp=old_logp, ref_logp=ref_logp).to(out.dtype)
        return out, keep_N

    def _count(self, keep_N: Tensor) -> Tensor:
        """Of each response's group, how many are kept."""
        return torch.zeros_like(self.group_N).index_add_(0, self.group_N, keep_N.to(self.group_N.dtype))[self.group_N]

    def _informative(self, keep_N: Tensor) -> Tensor:
        """Whether a response's group has responses that differ."""
        told_N = self.reward_N if self.correct_N is None else self.correct_N
        keep_N = keep_N & ~told_N.isnan()

        def end(how: str, without: float) -> Tensor:
            kept_N = told_N.masked_fill(~keep_N, without)
            return kept_N.new_full(kept_N.shape, without).scatter_reduce_(0, self.group_N, kept_N, how)[self.group_N]

        return end("amax", -torch.inf) - end("amin", torch.inf) > SAME


def total_reward(rewards_NF: Tensor, weight_F: Tensor, samples: int, normalised: bool) -> Tensor:
    """[N]: the weighted sum of the reward functions; nan where none had a value.

    ``normalised``: each function's rewards are first standardised within their group (TRL's normalize_then_sum).
    """
    nothing_N = rewards_NF.isnan().all(-1)
    if normalised:
        grouped = rewards_NF.view(-1, samples, rewards_NF.shape[-1])
        apart = grouped - grouped.nanmean(1, keepdim=True)
        values = (~apart.isnan()).sum(1, keepdim=True)
        std = (apart.square().nansum(1, keepdim=True) / (values - 1).clamp(min=1)).sqrt()
        rewards_NF = (apart / (std + 1e-4)).view_as(rewards_NF)
    return (rewards_NF * weight_F.to(rewards_NF)).nansum(-1).masked_fill(nothing_N, torch.nan)
