"""Where the head and the loss go together, in blocks smaller than a micro-batch: kernels/head_with_loss.py.

They can where the loss of a micro-batch is a sum over its responses, or over its tokens, and each summand needs no more
than the log-probabilities of its own. What compares more than that has been decided before (a gate, a clip's bounds).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.head_with_loss import rows_at_once, saves_time
from ..kernels.packed import Packing
from ..loss.methods import Method
from ..loss.mismatch import SequenceMask
from ..loss.policy_loss import PolicyLoss
from ..models.blocks import Block, cut
from ..models.policy import Policy, Scored
from .batch import Batch
from .optim import MixedOptimizer


def goes_together(method: Method, policy: Policy, ranks: int) -> bool:
    """Whether head and loss may. Not under torchrun, where the head's gradient is shared out; not where something asks
    for all states (the curvature gate) or for all responses at once (the control variate)."""
    alone = method.loss.control_variate or method.curvature_gate or method.loss.reduction == "none"
    return policy.linear and ranks == 1 and not alone


def worth_it(policy: Policy) -> bool:
    head = policy.head()
    return saves_time(head.device, head.dtype)


def needs_whole_responses(loss: PolicyLoss) -> bool:
    """Whether what a token adds to the loss depends on the others of its response."""
    mismatch = loss.mismatch
    of_responses = mismatch is not None and (
        isinstance(mismatch, SequenceMask) or mismatch.level_for(loss.level) != "token"
    )
    return loss.level != "token" or loss.reduction == "seq-mean-token-mean" or loss.kl_to_go or of_responses


def blocks_of(part: Batch, loss: PolicyLoss, head_VH: Tensor) -> list[Block] | None:
    """None: the head goes first, the loss after it. Sampling was truncated, or a response that has to be whole is
    longer than a block."""
    if part.kept is not None:
        return None
    most = rows_at_once(len(head_VH), head_VH.element_size())
    return cut(part.mask_BT.sum(-1).tolist(), most, needs_whole_responses(loss))


def learn_together(
    policy: Policy,
    optimizer: MixedOptimizer,
    part: Batch,
    blocks: list[Block],
    loss: PolicyLoss,
    denominator: float,
    chosen_BT: Tensor | None,
    recompute: bool,
    packing: Packing | None,
) -> tuple[Scored, Tensor]:
    """A micro-batch's gradients, into the sums; its log-probabilities and its loss."""
    losses = []

    def loss_of(block: Block, logp_BT: Tensor, entropy_BT: Tensor, mask_BT: Tensor) -> Tensor:
        given: dict[str, Any] = {name: x if x is None else x[block.rows] for name, x in part.loss_inputs.items()}
        given["mask"] = mask_BT
        chosen = None if chosen_BT is None else chosen_BT[block.rows]
        out = loss(logp_BT, **given, denominator=denominator, entropy=entropy_BT, chosen=chosen)
        losses.append(out.loss.detach())
        return out.loss

    where = part.ids_BL, part.start_B, part.mask_BT, part.group_B
    total = optimizer.sum_of(policy.head_parameter())
    scored = policy.learn(*where, recompute, packing, blocks=blocks, loss_of=loss_of, sum_VH=total)
    optimizer.accumulate()
    return scored, torch.stack(losses).sum()
