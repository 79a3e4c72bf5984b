"""The micro-batches of one optimiser step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Window:
    """``start``: TRL's count of micro-batches at its first. ``batches``: what the data loader gave for each."""

    start: int
    batches: list[Any]
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    denominator: float = 0.0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.batches, self.start)

    def holds(self, step: int) -> bool:
        return 0 <= step - self.start < len(self.batches)
