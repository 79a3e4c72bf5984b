"""How long a step takes, from what has to be read and computed (operations.py): an estimate.

Two lines, fitted to the rows of docs/speed-table.md, and the first to those of docs/long-responses.md, which they meet
within a fifth (tests/costs/test_seconds.py):

a decoding step    1.1 × its floor + 42 µs a layer
training           1.2 × its products + 12 × its activations moved through memory; not less than 8 ms a layer and pass

Weights in 4 bits are made dense in every pass, twice or thrice for a micro-batch with gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .devices import Device
from .operations import Ceilings, Operations

DECODE, PREFILL = 1.1, 2.0  # × floor
PRODUCTS, MOVES = 1.2, 12.0
CAPTURE = 4e-3  # seconds a layer of each decoding graph that is captured again: a guess
OPTIMISER_BYTES = 30  # a weight: gradient, master and moments read, the last two written, and the rounded weight


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    operations: Operations
    activation: int  # bytes a token that are taken to be moved: Shape.moved_bytes
    trained: int  # parameters
    frozen: bool  # all but an adapter: no gradients of the weights
    recompute: bool
    micro_tokens: int
    slots: int
    cache_tokens: int | None = None  # that the engine holds in all; None: enough


@dataclass(frozen=True)
class StepSizes:
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

    @property
    def age(self) -> float:
        """Tokens that a row has sampled so far, on average: lengths are taken to lie evenly around their mean."""
        spread = min(self.longest - self.mean, self.mean)
        return (self.mean**2 + spread**2 / 3) / (2 * self.mean)


def rollout_seconds(work: Work, device: Device, sizes: StepSizes) -> float:
    """Reading the prompts, then steps with all slots in use, then the last ones until the longest response ends."""
    slots: float = work.slots
    if work.cache_tokens is not None:
        slots = max(1.0, min(slots, work.cache_tokens / (sizes.prompt / sizes.samples + sizes.age)))
    rows = min(sizes.rows, slots)
    full = (sizes.rows - rows) * sizes.mean / slots
    ceilings = Ceilings(device.flops, device.bandwidth)
    prompts = PREFILL * ceilings.seconds(work.operations.prefill_flops(1, sizes.prompt)) * sizes.groups
    last = rows * sizes.mean / sizes.longest  # on average
    steps = full * decode_seconds(work, device, sizes, rows) + sizes.longest * decode_seconds(work, device, sizes, last)
    return prompts + steps


def decode_seconds(work: Work, device: Device, sizes: StepSizes, rows: float) -> float:
    """One token for each of so many rows, of the age that rows have on average."""
    age = sizes.age
    held = rows * (sizes.prompt + age)
    operations, ceilings = work.operations, Ceilings(device.flops, device.bandwidth)
    count = max(1, round(rows))
    floor = ceilings.seconds(operations.decode_flops(count, sizes.prompt + age), operations.decode_bytes(count, held))
    return DECODE * floor + operations.layers * device.decode_layer


def train_seconds(
    work: Work, device: Device, sizes: StepSizes, optimiser_steps: int = 1, forward: bool = False
) -> float:
    """Once over all responses, forward and backward; ``forward``: only that, as log-probabilities need it."""
    operations = work.operations
    flops = operations.train_flops(1, sizes.samples, sizes.prompt, round(sizes.mean), shared=True) * sizes.groups
    head = 6 * sizes.rows * sizes.mean * operations.head
    moved = MOVES * work.activation * sizes.tokens
    share = 1.0
    if forward:
        share = 1 / 3
    elif work.frozen:
        share = 2 / 3
    again = 1 / 3 if work.recompute and not forward else 0.0  # of the layers, not of the head
    products = PRODUCTS * (share * flops + again * (flops - head)) / device.flops
    least = (
        max(1.0, sizes.tokens / work.micro_tokens) * operations.layers * device.train_layer * (1 / 3 if forward else 1)
    )
    passes = max(1.0, sizes.tokens / work.micro_tokens) * (1 if forward else 2 + work.recompute)
    dense = passes * operations.dequantise_bytes / device.bandwidth
    seconds = max(products + dense + (share + again) * moved / device.bandwidth, least)
    if forward:
        return seconds
    return seconds + optimiser_steps * work.trained * OPTIMISER_BYTES / device.bandwidth


def offload_seconds(work: Work, device: Device, moved: int) -> float:
    """Of a step: so many bytes to host memory and back, and graphs of 8, 16, 32, 64, 128, … rows captured again."""
    graphs = 0 if device.cpu else 3 + math.ceil(work.slots / 64)
    return 2 * moved / device.host_bandwidth + graphs * work.operations.layers * CAPTURE
