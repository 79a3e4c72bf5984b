"""Rewards of a group -> advantages.

Every function takes rewards_N and group_N (the prompt each response answers; groups may differ in size) and returns one
advantage per response, [N]; ``reward_to_go`` returns one per token, [N,T].
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..console import choose, one_of

KINDS = ("group-mean", "group-mean-std", "leave-one-out", "batch-whitening", "greedy-baseline", "reward-to-go", "none")


class Groups:
    """Sums, means and deviations within groups of any sizes."""

    def __init__(self, group_N: Tensor):
        unique = group_N.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        self.index_N: Tensor = unique[1]
        self.size_K: Tensor = unique[2]

    def mean(self, x_N: Tensor) -> Tensor:
        """Each element's group mean, [N], summed from the least element on: equal rewards give exactly 0."""
        least_N = x_N.new_zeros(len(self.size_K)).scatter_reduce_(0, self.index_N, x_N, "amin", include_self=False)
        least_N = least_N[self.index_N]
        sums_K = x_N.new_zeros(len(self.size_K)).index_add_(0, self.index_N, x_N - least_N)
        return least_N + (sums_K / self.size_K)[self.index_N]

    def std(self, x_N: Tensor) -> Tensor:
        """Each element's group standard deviation (n−1, as in TRL and verl; 0 for a group of one), [N]."""
        n_N = self.size_K[self.index_N]
        return (self.mean((x_N - self.mean(x_N)).square()) * n_N / (n_N - 1).clamp(min=1)).sqrt()


def group_mean(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """R − mean of the group. It shrinks the expected reward gradient by 1 − 1/G; leave-one-out does not."""
    return rewards_N - Groups(group_N).mean(rewards_N)


def group_mean_std(rewards_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """(R − mean)/(std + eps) of the group (GRPO). A prompt's effective β is then β·std."""
    groups = Groups(group_N)
    return (rewards_N - groups.mean(rewards_N)) / (groups.std(rewards_N) + eps)


def leave_one_out(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """R − mean of the group's others = G/(G−1)·(R − mean) (RLOO)."""
    groups = Groups(group_N)
    if int(groups.size_K.min()) < 2:
        raise ValueError("leave-one-out needs at least 2 responses to every prompt; a group has 1")
    size_N = groups.size_K[groups.index_N]
    return (rewards_N - groups.mean(rewards_N)) * size_N / (size_N - 1)


def batch_whitening(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(x − mean)/(std + eps) over the whole batch, or over the masked elements."""
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    chosen = x[mask]
    if chosen.numel() < 2:
        raise ValueError(f"batch-whitening needs at least 2 elements; got {chosen.numel()}")
    return ((x - chosen.mean()) / (chosen.std() + eps)).masked_fill(~mask, 0)


def signal_scale(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """GPG's α: all groups over those whose rewards differ (1 if none do)."""
    groups = Groups(group_N)
    with_signal = (groups.std(rewards_N) > 0).float()
    share = (with_signal / groups.size_K[groups.index_N]).sum() / len(groups.size_K)
    return torch.where(share > 0, 1 / share.clamp(min=1e-12), torch.ones_like(share))


def reward_to_go(rewards_N: Tensor, mask_NT: Tensor, kl_NT: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """[N,T]: what is still to come at each token of r_t = 1{t = last}·R − β·kl_t."""
    mask_NT = mask_NT.bool()
    last_NT = mask_NT & (mask_NT.flip(-1).cumsum(-1).flip(-1) == 1)
    token_NT = last_NT * rewards_N.unsqueeze(-1)
    if kl_NT is not None:
        token_NT = token_NT - beta * kl_NT.masked_fill(~mask_NT, 0)
    return token_NT.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask_NT, 0)


def soft_overlong_penalty(lengths_N: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO: 0 up to max_length − cache, then falling linearly, −1 past max_length. Add it to the rewards."""
    if not 0 < cache < max_length:
        raise ValueError(f"cache must be between 0 and max_length={max_length}; got {cache}")
    return ((max_length - cache - lengths_N.float()) / cache).clamp(-1, 0)


@dataclass(frozen=True)
class Advantage:
    """One row of the advantage axis, ready to call.

    kind: group-mean, group-mean-std, leave-one-out, batch-whitening, greedy-baseline, reward-to-go or none.
    baseline: subtract the group mean first (batch-whitening: REINFORCE++-baseline).
    whiten: whiten the result over the batch (reward-to-go: REINFORCE++).
    scale_by_signal: multiply by GPG's α.          beta: KL in the reward (reward-to-go).
    """

    kind: str = "group-mean"
    baseline: bool = False
    whiten: bool = False
    scale_by_signal: bool = False
    beta: float = 0.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        if not self.beta >= 0:
            raise ValueError(f"beta must be at least 0; got {self.beta}")
        if self.beta and self.kind != "reward-to-go":
            raise ValueError("beta puts the KL into the reward: it goes with kind='reward-to-go'")
        if self.baseline and self.kind != "batch-whitening":
            raise ValueError("baseline goes with kind='batch-whitening'; the other kinds have their own")

    def replace(self, **changes: object) -> Advantage:
        names = {f.name for f in fields(self)}
        for name in changes:
            if name not in names:
                raise ValueError(choose("advantage option", name, names))
        return replace(self, **changes)  # type: ignore[arg-type]

    def __call__(
        self,
        rewards: Tensor,
        groups: Tensor,
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
    ) -> Tensor:
        """rewards [N], groups [N] -> [N]; reward-to-go gives [N,T] and needs mask, with β also both log-probs."""
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards and groups must both be [N]; got {list(rewards.shape)} and {list(groups.shape)}")
        rewards = rewards.float() if rewards.element_size() < 4 or not rewards.is_floating_point() else rewards
        if not bool(torch.isfinite(rewards).all()):
            raise ValueError("rewards must be finite; score failed samples before computing advantages")
        out = self._baselined(rewards, groups, mask, old_logp, ref_logp, greedy_rewards)
        if self.whiten:
            out = batch_whitening(out, mask if out.dim() == 2 else None)
        return out * signal_scale(rewards, groups) if self.scale_by_signal else out

    def _baselined(
        self,
        rewards: Tensor,
        groups: Tensor,
        mask: Tensor | None,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        greedy_rewards: Tensor | None,
    ) -> Tensor:
        if self.kind == "group-mean":
            return group_mean(rewards, groups)
        if self.kind == "group-mean-std":
            return group_mean_std(rewards, groups)
        if self.kind == "leave-one-out":
            return leave_one_out(rewards, groups)
        if self.kind == "batch-whitening":
            return batch_whitening(group_mean(rewards, groups) if self.baseline else rewards)
        if self.kind == "greedy-baseline":
            if greedy_rewards is None or greedy_rewards.shape != rewards.shape:
                raise ValueError(
                    "greedy-baseline needs greedy_rewards [N], the greedy response's reward for each prompt"
                )
            return rewards - greedy_rewards.to(rewards.dtype)
        if self.kind == "reward-to-go":
            if mask is None or mask.dim() != 2 or len(mask) != len(rewards):
                raise ValueError(f"mask must be [N,T] with N={len(rewards)} for reward-to-go")
            if not self.beta:
                return reward_to_go(rewards, mask)
            for name, logp in {"old_logp": old_logp, "ref_logp": ref_logp}.items():
                if logp is None or logp.shape != mask.shape or not logp.is_floating_point():
                    raise ValueError(f"{name} must be log-probabilities {list(mask.shape)} for a KL in the reward")
            assert old_logp is not None
            assert ref_logp is not None
            return reward_to_go(rewards, mask, old_logp - ref_logp, self.beta)
        return rewards
