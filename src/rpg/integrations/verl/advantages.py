"""The advantages of rpg as estimators of verl: ``algorithm.adv_estimator=rpg:leave-one-out``, or a preset's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...advantages import KINDS, Advantage, batch_whitening, reward_to_go
from ...algorithms import algorithm, algorithms

Estimator = Callable[..., tuple[Tensor, Tensor]]
GREEDY = "greedy-baseline"  # verl computes the greedy response's reward for its own "remax" alone


def estimators() -> dict[str, Advantage]:
    """By kind, and by preset: the advantage it was published with."""
    by_kind = {kind: Advantage(kind) for kind in KINDS}
    by_preset = {name: algorithm(name).advantage for name in algorithms()}
    return {name: rule for name, rule in (by_kind | by_preset).items() if rule.kind != GREEDY}


def estimator(rule: Advantage) -> Estimator:
    """A function for verl's register_adv_est. A KL in the reward is already in ``token_level_rewards``."""

    @torch.no_grad()
    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        mask_BT = response_mask.bool()
        used_B = mask_BT.any(-1)  # verl fills batches up with empty responses: they are in no group
        advantage_BT = torch.zeros_like(token_level_rewards)
        if not bool(used_B.any()):
            return advantage_BT, advantage_BT.clone()
        rewards_NT, mask_NT = token_level_rewards[used_B], mask_BT[used_B]
        if rule.kind == "reward-to-go":
            found = reward_to_go(rewards_NT.new_zeros(len(rewards_NT)), mask_NT, -rewards_NT, 1.0)
            found = batch_whitening(found, mask_NT) if rule.whiten else found
        else:
            if index is None:
                raise ValueError(f"adv_estimator={rule.kind} needs the batch's uid, the prompt of each response")
            group = np.unique(np.asarray(index).astype(str), return_inverse=True)[1]
            group_N = torch.as_tensor(group, device=rewards_NT.device)[used_B]
            found = rule(rewards_NT.sum(-1), group_N).unsqueeze(-1) * mask_NT
        advantage_BT[used_B] = found
        return advantage_BT, advantage_BT.clone()

    return estimate
