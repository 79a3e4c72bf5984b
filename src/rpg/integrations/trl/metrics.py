"""Metrics of micro-batches on several processes -> metrics of the optimiser step."""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor

from ...training.update import Means


class StepMeans(Means):
    """``add`` takes what one micro-batch found on this process; all processes call it."""

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self.accelerator = accelerator

    def _rows(self, row: Tensor) -> list[list[float]]:
        rows: list[list[float]] = self.accelerator.gather(row[None]).tolist()
        return rows

    def take(self) -> dict[str, float]:
        """The step's, and begin anew."""
        found = self.result()
        self.sums, self.weights = {}, {}
        return found
