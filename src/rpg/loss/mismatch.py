"""The engine that generated is not, numerically, the trainer: corrections for ρ = π_old(trainer)/μ(engine).

Each rule is a weight on a sample's whole loss, KL term included, since the samples came from the engine and every
expectation is over them. With no cap and no mask the weight is ρ itself and the gradient is exact again. All compose
with every method: ``PolicyLoss(..., mismatch=TIS())`` and ``loss(..., rollout_logp=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import at_level

INF = float("inf")


def _check_level(level: str | None) -> None:
    if level not in (None, "token", "sequence"):
        raise ValueError(f"level must be 'token', 'sequence' or None (as the loss); got {level!r}")


@dataclass(frozen=True)
class Mismatch:
    """The exact weight ρ, per token or as a product over the response; ``level`` None: as the loss has it."""

    level: str | None = None

    def __post_init__(self) -> None:
        _check_level(self.level)

    def weight(self, rho: Tensor) -> Tensor:
        return rho

    def level_for(self, loss_level: str) -> str:
        return self.level or ("token" if loss_level == "token" else "sequence")

    def __call__(self, log_rho_BT: Tensor, mask_BT: Tensor, loss_level: str, limit: float) -> Tensor:
        """[B,T] at token level, [B] at sequence level."""
        return self.weight(at_level(log_rho_BT, mask_BT, self.level_for(loss_level)).clamp(-limit, limit).exp())


@dataclass(frozen=True)
class TIS(Mismatch):
    """Truncated importance sampling: × min(ρ, cap)."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not self.cap > 0:
            raise ValueError(f"cap must be positive; got {self.cap}")

    def weight(self, rho: Tensor) -> Tensor:
        return rho.clamp(max=self.cap)


@dataclass(frozen=True)
class IcePop(Mismatch):
    """× ρ where low ≤ ρ ≤ high, nothing elsewhere."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not 0 <= self.low < self.high:
            raise ValueError(f"low and high must satisfy 0 <= low < high; got {self.low}, {self.high}")

    def weight(self, rho: Tensor) -> Tensor:
        return rho * ((rho >= self.low) & (rho <= self.high))


@dataclass(frozen=True)
class MIS(IcePop):
    """Masked importance sampling: the product over the response, dropped with all its tokens outside [low, high]."""

    level: str | None = "sequence"
    low: float = 0.0
    high: float = 2.0


@dataclass(frozen=True)
class SequenceMask(Mismatch):
    """Off-policy sequence masking: a response is dropped if its advantage is negative and the policy has left it.

    Dropped when A < 0 and mean_t(log μ − log π) > delta. It weighs nothing else: ρ is not applied.
    μ is ``rollout_logp`` where that is given, else ``old_logp``.
    """

    level: str | None = "sequence"
    delta: float = 0.1

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not self.delta > 0:
            raise ValueError(f"delta must be positive; got {self.delta}")

    def drop(self, log_drift_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Tensor:
        """[B] bool, from log μ − log π."""
        drift_B = at_level(log_drift_BT, mask_BT, "sequence-mean")
        advantage_B = advantages if advantages.dim() == 1 else at_level(advantages, mask_BT, "sequence-mean")
        return (advantage_B < 0) & (drift_B > self.delta)

    def weight(self, rho: Tensor) -> Tensor:
        return torch.ones_like(rho)


BY_NAME: dict[str, Mismatch] = {
    "exact": Mismatch(),
    "tis": TIS(),
    "icepop": IcePop(),
    "mis": MIS(),
    "sequence-mask": SequenceMask(),
}
