"""When the policy that anchors the KL term is renewed: one rule for `rpg train`, TRL and verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RenewalSettings(Protocol):
    """``reference`` in a run's settings, as far as it is needed here."""

    @property
    def every(self) -> int: ...
    @property
    def kl(self) -> float: ...
    @property
    def smoothing(self) -> float: ...


class Renewal:
    """When a copy is renewed: every K steps, or when the moving average of the KL per token from it passes a target."""

    def __init__(self, rule: str, config: RenewalSettings):
        self.rule, self.config = rule, config
        self.average_kl = 0.0
        self.renewals = 0
        self.updates = 0  # counted here where the caller does not count

    def due(self, step: int | None, kl: float | None) -> bool:
        """After a step. ``kl``: per token, current policy from reference; None where it was not measured."""
        if step is None:
            self.updates += 1
            step = self.updates
        if self.rule == "every":
            return step % self.config.every == 0
        past = self.config.smoothing
        if kl is not None:
            self.average_kl = past * self.average_kl + (1 - past) * kl
        return self.average_kl > self.config.kl

    def renewed(self) -> None:
        self.average_kl = 0.0
        self.renewals += 1

    def state(self) -> dict[str, Any]:
        state = {"average_kl": self.average_kl, "renewals": self.renewals}
        return state | {"updates": self.updates} if self.updates else state

    def load(self, state: Mapping[str, Any]) -> None:
        self.average_kl, self.renewals = state["average_kl"], state["renewals"]
        self.updates = state.get("updates", 0)
