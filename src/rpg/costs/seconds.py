"""How long a step takes, from what has to be read and computed (models/counts.py): an estimate.

Two lines, fitted to the rows of docs/speed-table.md, which they meet within a fifth (tests/train/test_estimates.py):

a decoding step    1.3 × its floor + 36 µs a layer
training           1.2 × its products + 12 × its activations moved through memory; not less than 8 ms a layer and pass
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Device
from .operations import Ceilings, Counts

DECODE, PREFILL = 1.3, 2.0  # × floor
PRODUCTS, MOVES = 1.2, 12.0
OPTIMISER_BYTES = 30  # a weight: gradient, master and moments read, the last two written, and the rounded weight


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    counts: Counts
    activation: int  # bytes a token that the backward pass needs
    trained: int  # parameters
    frozen: bool  # all but an adapter: no gradients of the weights
    recompute: bool
    micro_tokens: int
    slots: int


@dataclass(frozen=True)
class Batch:
    """Responses to sample or to train on. ``mean`` and ``longest``: tokens of a response."""

    groups: float
    samples: int
    prompt: int
    mean: float
    longest: int

    @property
    def rows(self) -> float:
        return self.groups * self.samples

    @property
    def tokens(self) -> float:
        return self.groups * self.prompt + self.rows * self.mean


def rollout_seconds(work: Work, device: Device, batch: Batch) -> float:
    """Reading the prompts, then steps with all slots in use, then the last ones until the longest response ends."""
    rows = min(batch.rows, work.slots)
    full = (batch.rows - rows) * batch.mean / work.slots
    ceilings = Ceilings(device.flops, device.bandwidth)
    prompts = PREFILL * ceilings.seconds(work.counts.prefill_flops(1, batch.prompt)) * batch.groups
    last = rows * batch.mean / batch.longest  # on average
    steps = full * decode_seconds(work, device, batch, rows) + batch.longest * decode_seconds(work, device, batch, last)
    return prompts + steps


def decode_seconds(work: Work, device: Device, batch: Batch, rows: float) -> float:
    """One token for each of so many rows, of the age that rows have on average."""
    spread = min(batch.longest - batch.mean, batch.mean)  # lengths are taken to lie evenly around their mean
    age = (batch.mean**2 + spread**2 / 3) / (2 * batch.mean)
    held = rows * (batch.prompt + age)
    counts, ceilings = work.counts, Ceilings(device.flops, device.bandwidth)
    count = max(1, round(rows))
    floor = ceilings.seconds(counts.decode_flops(count, batch.prompt + age), counts.decode_bytes(count, held))
    return DECODE * floor + counts.layers * device.decode_layer


def train_seconds(work: Work, device: Device, batch: Batch, optimiser_steps: int = 1, forward: bool = False) -> float:
    """Once over all responses, forward and backward; ``forward``: only that, as log-probabilities need it."""
    counts = work.counts
    flops = counts.train_flops(1, batch.samples, batch.prompt, round(batch.mean), shared=True) * batch.groups
    head = 6 * batch.rows * batch.mean * counts.head
    moved = MOVES * work.activation * batch.tokens
    share = 1.0
    if forward:
        share = 1 / 3
    elif work.frozen:
        share = 2 / 3
    again = 1 / 3 if work.recompute and not forward else 0.0  # of the layers, not of the head
    products = PRODUCTS * (share * flops + again * (flops - head)) / device.flops
    least = max(1.0, batch.tokens / work.micro_tokens) * counts.layers * device.train_layer * (1 / 3 if forward else 1)
    seconds = max(products + (share + again) * moved / device.bandwidth, least)
    if forward:
        return seconds
    return seconds + optimiser_steps * work.trained * OPTIMISER_BYTES / device.bandwidth
