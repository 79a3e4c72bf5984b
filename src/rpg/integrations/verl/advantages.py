"""The advantages of rpg as estimators of verl: ``algorithm.adv_estimator=rpg:leave-one-out``, or a preset's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...loss.advantages import GROUP_KINDS, KINDS, NEVER_NEGATIVE, Advantage, Groups, batch_whitening
from ...loss.methods import algorithm, algorithms

logger = logging.getLogger("rpg.integrations.verl")

Estimator = Callable[..., tuple[Tensor, Tensor]]
FILLER = "pad"  # verl's V1 fills batches up with empty responses: no prompt's, each with this before its uid
OPTIONS_KEY = "rpg_advantage"  # in verl's algorithm section: options of the preset's advantage, put there by the check
NEED_TWO = ("leave-one-out", "log-partition")
NOT_HERE = {  # what verl computes for estimators of its own names alone
    "greedy-baseline": "the greedy response's reward",
    "optimal-token": "Σπ² of every token",
}
NEEDS_OPTIONS = ("log-partition",)  # has no meaning by its kind alone


def estimators() -> dict[str, Advantage]:
    """By kind, and by preset: the advantage it was published with."""
    by_kind = {kind: Advantage(kind) for kind in KINDS if kind not in NEEDS_OPTIONS}
    by_preset = {name: algorithm(name).advantage for name in algorithms()}
    return {name: rule for name, rule in (by_kind | by_preset).items() if rule.kind not in NOT_HERE}


def estimator(rule: Advantage) -> Estimator:
    """A function for verl's register_adv_est. A KL in the reward is already in ``token_level_rewards``.

    A response that rollout correction rejects has lost its mask, not its reward: it stays in its group.
    """
    published, first = rule, True

    @torch.no_grad()
    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        nonlocal first
        rule = _with_options(published, config).replace(beta=0.0)  # verl has put the KL into the rewards
        if first and rule.never_negative(token_level_rewards.sum(-1).tolist()):
            logger.warning("rpg: %s", NEVER_NEGATIVE)
        first = False
        mask_BT = response_mask.bool()
        advantage_BT = torch.zeros_like(token_level_rewards)
        if rule.kind == "reward-to-go":
            advantage_BT = _to_go(rule, token_level_rewards, mask_BT)
        elif index is None:
            raise ValueError(f"adv_estimator={rule.kind} needs the batch's uid, the prompt of each response")
        else:
            uids = np.asarray(index).astype(str)
            group_B = torch.as_tensor(np.unique(uids, return_inverse=True)[1], device=mask_BT.device)
            used_B = ~(torch.as_tensor(np.char.startswith(uids, FILLER), device=mask_BT.device) & ~mask_BT.any(-1))
            if bool(used_B.any()):
                rewards_N, mask_NT = token_level_rewards[used_B].sum(-1), mask_BT[used_B]
                advantage_N = _of_groups(rule, rewards_N, group_B[used_B], mask_NT)
                advantage_BT[used_B] = advantage_N.unsqueeze(-1) * mask_NT
        return advantage_BT, advantage_BT.clone()

    return estimate


def _with_options(published: Advantage, config: Any) -> Advantage:
    """As this run has it: ``policy_loss.rpg.advantage`` changes the estimator that the preset names."""
    options = None if config is None else config.get(OPTIONS_KEY, None)
    return Advantage(**options) if options else published


def _to_go(rule: Advantage, rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """What is still to come at each token, the rewards of rejected tokens included."""
    to_go_BT = rewards_BT.flip(-1).cumsum(-1).flip(-1) * mask_BT
    return batch_whitening(to_go_BT, mask_BT) if rule.whiten and int(mask_BT.sum()) > 1 else to_go_BT


def _of_groups(rule: Advantage, reward_N: Tensor, group_N: Tensor, mask_NT: Tensor) -> Tensor:
    """0 for a response alone in its group, which nothing can be compared with (an agent loop that gave up)."""
    groups = Groups(group_N)
    alone_N = groups.size_K[groups.index_N] == 1
    if rule.kind not in GROUP_KINDS or not bool(alone_N.any()):
        return rule(reward_N, group_N, mask=mask_NT)
    logger.warning("rpg: %d prompts have one response only: its advantage is 0 (%s)", int(alone_N.sum()), rule.kind)
    if rule.kind not in NEED_TWO:
        return rule(reward_N, group_N, mask=mask_NT)
    advantage_N = torch.zeros_like(reward_N)
    if not bool(alone_N.all()):
        advantage_N[~alone_N] = rule(reward_N[~alone_N], group_N[~alone_N], mask=mask_NT[~alone_N])
    return advantage_N
