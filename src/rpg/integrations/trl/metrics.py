"""Metrics of micro-batches on several processes -> metrics of the optimiser step."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor

LARGEST = ("ratio/max", "mismatch/max_log_ratio")  # the largest counts; of the others the mean, weighted by tokens
NO_MEAN = ("tokens", "sequences")


class StepMeans:
    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """What one micro-batch found on this process; all processes call it."""
        names = [name for name in metrics if name not in NO_MEAN]
        own = torch.stack([metrics["tokens"].float(), *(metrics[name].float() for name in names)])
        for tokens, *values in self.accelerator.gather(own[None]).tolist():
            for name, value in zip(names, values, strict=True):
                if not math.isfinite(value):
                    continue
                if name in LARGEST:
                    self.sums[name], self.weights[name] = max(self.sums.get(name, -math.inf), value), 1.0
                else:
                    self.sums[name] = self.sums.get(name, 0.0) + value * tokens
                    self.weights[name] = self.weights.get(name, 0.0) + tokens

    def take(self) -> dict[str, float]:
        """The step's, and begin anew."""
        found = {name: total / self.weights[name] for name, total in self.sums.items() if self.weights[name]}
        self.sums, self.weights = {}, {}
        return found
