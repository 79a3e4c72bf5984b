"""AdamW whose learning rate is that of ``rpg train``, for trainers that move it less often than at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW

from ..run.config import OptimConfig
from ..training.optim import learning_rate


class ScheduledAdamW(AdamW):
    """Each optimiser step has the rate of train/optim.py: ``warmup`` and ``schedule`` as there, of ``total`` steps.

    How many steps are done is read from the moments, so it survives a checkpoint; ``begin`` were done before, by the
    run whose checkpoint this one starts from. verl's own scheduler must be constant: it logs ``lr``, the peak.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        schedule: str,
        warmup: int,
        total: int,
        begin: int = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay)
        self._rate = OptimConfig(lr=lr, warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
        self._total, self._begin = total, begin

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        done = next((int(state["step"]) for state in self.state.values() if "step" in state), 0)
        rate = learning_rate(self._rate, self._begin + done, self._total)
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)  # type: ignore[no-any-return]
