"""What groups are worth to the policy as it is now: what it has left too far is dropped, and sampling is paced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...loss.objective import at_level, bounded, k3
from ...run.config import OffPolicyConfig
from ..batch import Batch
from ..progress import SamplingPosition

TOO_MANY, SLOWER, FASTER, SLOWEST = 0.1, 0.5, 1.25, 0.125  # share dropped; factors of the pace; its least


@dataclass(frozen=True)
class Worth:
    """Of each group, from the weights w = π/behaviour of its samples."""

    ess_K: Tensor  # effective sample size, as a share of its samples
    kl_K: Tensor  # KL(behaviour‖π) per token

    def enough(self, settings: OffPolicyConfig) -> Tensor:
        """[K] bool: within the budget."""
        inside = self.ess_K >= settings.min_ess
        return inside if settings.max_kl is None else inside & (self.kl_K <= settings.max_kl)


def worth_of(batch: Batch, behaviour_BT: Tensor, logp_BT: Tensor, level: str, limit: float) -> Worth:
    """``logp_BT``: of the policy as it is now. Samples are tokens or responses, as the loss's ``level`` has it."""
    groups = int(batch.group_B.max()) + 1
    log_w_BT = (logp_BT - behaviour_BT).masked_fill(~batch.mask_BT, 0).double()
    log_w = bounded(at_level(log_w_BT, batch.mask_BT, level), limit)
    valid = (batch.mask_BT if level == "token" else batch.mask_BT.any(-1)).double()

    def by_group(x: Tensor) -> Tensor:
        x_B = x if x.dim() == 1 else x.sum(-1)
        return torch.zeros(groups, dtype=torch.float64, device=x.device).index_add_(0, batch.group_B, x_B.double())

    w = log_w.exp() * valid
    ess_K = by_group(w).square() / (by_group(valid) * by_group(w.square())).clamp(min=1e-300)
    kl_BT = k3(bounded(log_w_BT, limit)) * batch.mask_BT
    return Worth(ess_K, by_group(kl_BT) / by_group(batch.mask_BT))


def budgeted(settings: OffPolicyConfig) -> bool:
    return settings.min_ess > 0 or settings.max_kl is not None


def without(batch: Batch, extra: Sequence[Tensor | None], keep_K: Tensor) -> tuple[Batch, list[Tensor | None]]:
    """The batch of the groups that stay, numbered anew, and the same rows of ``extra``."""
    rows = keep_K[batch.group_B].nonzero()[:, 0]
    kept = batch.rows(rows)
    number_K = keep_K.cumsum(0) - 1
    kept = replace(kept, group_B=number_K[kept.group_B])
    width = kept.mask_BT.shape[1]
    return kept, [None if x is None else x[rows, :width] for x in extra]


def keep_pace(position: SamplingPosition, dropped: int, of: int) -> None:
    """After a step: where too much had to be dropped, fewer groups are under way from here on."""
    if of and dropped / of > TOO_MANY:
        position.pace = max(SLOWEST, position.pace * SLOWER)
    elif not dropped:
        position.pace = min(1.0, position.pace * FASTER)
