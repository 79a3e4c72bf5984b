"""When the policy that anchors the KL term is renewed: one rule for `rpg train`, TRL and verl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

COUNTS = ("iterations", "optimizer-steps")  # what ``every`` and the moving average count


class RenewalSettings(Protocol):
    """``reference`` in a run's settings, as far as it is needed here."""

    @property
    def every(self) -> int: ...
    @property
    def kl(self) -> float: ...
    @property
    def smoothing(self) -> float: ...


class Renewal:
    """When a copy is renewed: every K updates, or when the moving average of the KL per token from it passes a target.

    An update is an iteration or an optimiser step: whoever calls ``due`` counts one of them, and calls it after each,
    or after several at once.
    """

    def __init__(self, rule: str, config: RenewalSettings):
        self.rule, self.config = rule, config
        self.sum_kl = 0.0  # of measured KLs, each with the weight that smoothing has left it
        self.weight = 0.0  # the sum of those weights: a young average is divided by what it has seen
        self.renewals = 0
        self.updates = 0  # counted here where the caller does not count

    @property
    def average_kl(self) -> float:
        """0 where nothing was measured since the last renewal."""
        return self.sum_kl / self.weight if self.weight else 0.0

    def due(self, update: int | None, kl: float | None, updates: int = 1) -> bool:
        """After ``updates`` of them; ``update`` is the number of the last one, None: counted here.

        ``kl``: per token, current policy from reference; None or not finite where it was not measured.
        """
        if update is None:
            self.updates += updates
            update = self.updates
        if self.rule == "every":
            return update // self.config.every > (update - updates) // self.config.every
        if kl is not None and math.isfinite(kl):
            past = self.config.smoothing**updates
            self.sum_kl = past * self.sum_kl + (1 - past) * kl
            self.weight = past * self.weight + (1 - past)
        return self.average_kl > self.config.kl

    def renewed(self) -> None:
        self.sum_kl = self.weight = 0.0
        self.renewals += 1

    def state(self) -> dict[str, Any]:
        state = {"sum_kl": self.sum_kl, "weight": self.weight, "renewals": self.renewals}
        return state | {"updates": self.updates} if self.updates else state

    def load(self, state: Mapping[str, Any]) -> None:
        """Of an older checkpoint too: its average had no weight, and a NaN could stick in it."""
        if "sum_kl" in state:
            self.sum_kl, self.weight = state["sum_kl"], state["weight"]
        else:
            self.sum_kl = state["average_kl"] if math.isfinite(state["average_kl"]) else 0.0
            self.weight = 1.0 if self.sum_kl else 0.0
        self.renewals = state["renewals"]
        self.updates = state.get("updates", 0)
