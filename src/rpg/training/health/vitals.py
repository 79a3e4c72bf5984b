"""What a batch's optimiser steps did to the policy: read off what they compute anyway, and off a few kept responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from ...distributed.ranks import ALONE, World
from ...loss.objective import k3
from ...models.policy import Policy
from ..batch import Batch
from ..reference import batch_logp

CERTAIN = math.log(0.99)
LIMIT = 20.0  # of a log-ratio, before exp
PROBES, SHARE = 8, 32  # responses kept from the start: one of 32 in a batch, but so many at least


class Vitals:
    """Of one batch. Sums stay on the device until all of its optimiser steps are done."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # of each minibatch

    @torch.no_grad()
    def see(self, batch: Batch, logp_BT: Tensor) -> None:
        """A minibatch, and how the policy scored its tokens just before it was trained on them."""
        assert batch.advantage is not None
        mask_BT, advantage = batch.mask_BT, batch.advantage
        advantage_BT = (advantage[:, None] if advantage.dim() == 1 else advantage).expand_as(mask_BT)
        shift_BT = (logp_BT - batch.old_logp_BT).masked_fill(~mask_BT, 0).clamp(-LIMIT, LIMIT)
        good_BT = mask_BT & (advantage_BT > 0)
        kl_BT = shift_BT.exp() * k3(-shift_BT)
        certain_BT = mask_BT & (logp_BT > CERTAIN)
        parts = (mask_BT, kl_BT, certain_BT, good_BT, shift_BT * good_BT)
        self._sums.append(torch.stack([part.sum(dtype=torch.float32) for part in parts]))

    def metrics(self) -> dict[str, float]:
        """``certain``: share of tokens with a probability above 0.99. ``kl/old_last``: KL(π‖old) in the last minibatch,
        after all optimiser steps but one. ``shift/good``: mean log π/old of the tokens with a positive advantage, in
        the minibatches after the first.
        """
        if not self._sums:
            return {}
        sums = torch.stack(self._sums).double()
        found = {"certain": _ratio(sums[:, 2].sum(), sums[:, 0].sum())}
        if len(sums) > 1:  # the first minibatch is scored by the policy that sampled it
            found["kl/old_last"] = _ratio(sums[-1, 1], sums[-1, 0])
            found["shift/good"] = _ratio(sums[1:, 4].sum(), sums[1:, 3].sum())
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _ratio(total: Tensor, count: Tensor) -> float:
    return float(total / count) if count else math.nan


class Probe:
    """A few responses of the policy that the run began with, and their log-probabilities then: how far it has gone,
    without a second model."""

    def __init__(self) -> None:
        self.batch: Batch | None = None

    def take(self, batch: Batch) -> None:
        """Evenly from the first batch, which the policy sampled before its first optimiser step."""
        number = min(len(batch), max(PROBES, len(batch) // SHARE))
        rows = batch.rows(torch.arange(number, device=batch.ids_BL.device) * (len(batch) // number))
        kept = ("ids_BL", "start_B", "mask_BT", "old_logp_BT", "reward_B", "group_B", "kept_count_BT", "kept_ids_K")
        self.batch = Batch(**{name: getattr(rows, name) for name in kept})

    @torch.no_grad()
    def kl(self, policy: Policy, micro_tokens: int, world: World = ALONE) -> float:
        """KL(start‖π) per token, of these responses."""
        assert self.batch is not None
        shift_BT = batch_logp(policy, self.batch, micro_tokens, world) - self.batch.old_logp_BT
        return float(k3(shift_BT[self.batch.mask_BT].clamp(-LIMIT, LIMIT)).mean())

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else {k: x for k, x in vars(self.batch).items() if isinstance(x, Tensor)}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """What tensors() gave. Kept sets stay on the host."""
        names = [f.name for f in fields(Batch) if f.name in tensors]
        self.batch = Batch(**{k: tensors[k] if k.startswith("kept_") else tensors[k].to(device) for k in names})
