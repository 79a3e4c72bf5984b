"""What is trained, on what, on how much: models, network, lengths of responses, a job; policies that drift apart.

Operations, bytes and rates of one GPU are those of ``rpg train --dry-run`` (costs/operations.py, costs/seconds.py,
costs/devices.py, costs/memory.py). An ASSUMPTION is marked as one; all else is counted, measured or published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import exp, log, sqrt
from statistics import NormalDist

from rpg.costs.devices import DEVICES, Device
from rpg.costs.memory import Shape
from rpg.costs.operations import Operations

NODE = 8  # GPUs


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward layers, or experts in their place. Counts are parameters."""

    name: str
    layers: int
    heads: int
    key_heads: int
    width: int  # of a head
    hidden: int
    ffn: int  # of one expert, where there are experts
    vocab: int
    tied: bool
    experts: int = 1
    chosen: int = 1  # experts a token

    def body(self, experts: float) -> float:
        """Matrices of all layers, with so many experts in each."""
        attention = 2 * self.hidden * (self.heads + self.key_heads) * self.width  # queries, output; keys, values
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + experts * 3 * self.hidden * self.ffn)  # gate, up, down

    @cached_property
    def parameters(self) -> int:
        norms = self.layers * (2 * self.hidden + 2 * self.width) + self.hidden
        return int(self.body(self.experts)) + norms + self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def spread(self) -> float:
        return self.body(self.experts) - self.body(0)  # in experts; all else is wherever attention is

    @cached_property
    def counts(self) -> Operations:
        """What a token computes with."""
        body = int(self.body(self.chosen))
        return Operations(self.layers, self.heads, self.key_heads, self.width, self.hidden, self.vocab, body)

    def touched(self, rows: float) -> Operations:
        """What ``rows`` tokens read: experts that none of them chose stay in memory (even routing is an ASSUMPTION)."""
        experts = self.experts * (1 - (1 - self.chosen / self.experts) ** rows) if self.experts > 1 else 1
        return replace(self.counts, body=int(self.body(experts)))

    def activation(self, logits: bool = False, recompute: bool = True) -> int:
        """Bytes a token."""
        shape = Shape(
            layers=self.layers,
            hidden=self.hidden,
            query_width=self.heads * self.width,
            key_width=self.key_heads * self.width,
            key_heads=self.key_heads,
            ffn=self.chosen * self.ffn,
            vocabulary=self.vocab,
        )
        return shape.activation_bytes(2, recompute, logits)


# of the public config.json: layers, heads, key heads, width, hidden, ffn, vocabulary, tied, experts, chosen
SMALL = Model("Qwen3-4B", 36, 32, 8, 128, 2560, 9728, 151936, True)
DENSE = Model("Qwen3-32B", 64, 64, 8, 128, 5120, 25600, 151936, False)
MIXTURE = Model("Qwen3-235B-A22B", 94, 64, 4, 128, 4096, 1536, 151936, False, 128, 8)
MODELS = (SMALL, DENSE, MIXTURE)
QWEN25_7B = Model("Qwen2.5-7B", 28, 28, 4, 128, 3584, 18944, 152064, False)
H20 = replace(
    DEVICES["h100"], name="NVIDIA H20", memory=96 * 10**9, flops=148e12 * 779 / 989.4, bandwidth=4.0e12 * 4.268 / 4.8
)  # NVIDIA's H20: 96 GB, 148 TFLOP/s, 4.0 TB/s; of these as much as an H200 reaches

# Network of nodes of 8: NVIDIA's H100/H200 data sheets (NVLink 900 GB/s, both ways) and DGX guide (400 Gb/s a GPU)
REACHED = 0.8  # of a link's rate; ASSUMPTION
NVLINK = REACHED * 450e9  # bytes a second and GPU, each way
CARD = REACHED * 50e9  # the same, out of the node
HOP, LEAP = 1e-6, 10e-6  # seconds for each GPU and each node in a ring; ASSUMPTION


def gather(held: float, size: int, calls: int = 1) -> float:
    """Seconds until each of ``size`` GPUs has all ``held`` bytes; a reduce-scatter takes as long.

    A node gets what it lacks through its 8 cards at once, and hands it on by NVLink at the same time."""
    inside, between = held * (size - 1) / size / NVLINK, held * max(0.0, 1 - NODE / size) / (NODE * CARD)
    return max(inside, between) + calls * ((size - 1) * HOP + max(0, size // NODE - 1) * LEAP)


def exchange(sent: float, size: int) -> float:
    """Seconds of an all-to-all within a node in which each GPU has ``sent`` bytes to give away."""
    return sent * (size - 1) / size / NVLINK


def together(device: Device, gpus: int) -> Device:
    """GPUs that split every matrix, as if they were one; two all-reduces a layer, 10 µs in a node, 30 µs beyond it
    (ASSUMPTION)."""
    layer = device.decode_layer + (0.0 if gpus == 1 else 20e-6 if gpus <= NODE else 60e-6)
    memory, flops, bandwidth = device.memory * gpus, device.flops * gpus, device.bandwidth * gpus
    return replace(device, memory=memory, flops=flops, bandwidth=bandwidth, decode_layer=layer)


@dataclass(frozen=True)
class Lengths:
    """Response tokens: log-normal, cut at a limit. ASSUMPTION: median and spread are those of hard mathematics."""

    limit: int
    median: float = 6500.0
    spread: float = 1.0  # of the logarithm
    prompt: int = 178  # tokens; of GSM8K's prompts in docs/speed-table.md

    def below(self, tokens: float) -> float:
        return NormalDist(log(self.median), self.spread).cdf(log(tokens))

    def _moment(self, power: int) -> float:
        """E[min(length, limit)^power]."""
        whole = exp(power * log(self.median) + (power * self.spread) ** 2 / 2)
        edge = (log(self.limit / self.median) - power * self.spread**2) / self.spread
        return whole * NormalDist().cdf(edge) + float(self.limit**power) * (1 - self.below(self.limit))

    @cached_property
    def mean(self) -> float:
        return self._moment(1)

    @cached_property
    def age(self) -> float:
        return self._moment(2) / (2 * self.mean)  # tokens that a response in flight has on average

    @property
    def sequence(self) -> float:
        return self.prompt + self.mean

    @cache  # noqa: B019
    def longest(self, responses: float, parts: int = 400) -> float:
        """E[max] = ∫ 1 − F(t)^n dt from 0 to the limit."""
        width = self.limit / parts
        return sum((1.0 - float(self.below((i + 0.5) * width) ** responses)) * width for i in range(parts))


@dataclass(frozen=True)
class Job:
    """The paper's: 512 prompts × 16 responses a step, minibatches of 32 prompts, 400 steps (arXiv 2505.17508)."""

    lengths: Lengths
    prompts: int = 512
    samples: int = 16
    minibatch: int = 32  # prompts
    steps: int = 400
    kept: float = 64 / 130  # of the groups sampled: measured on GSM8K (docs/gsm8k.md); ASSUMPTION: elsewhere the same

    @property
    def sampled(self) -> float:
        return self.prompts * self.samples / self.kept  # responses: dynamic sampling throws the others away

    @property
    def optimiser_steps(self) -> int:
        return self.prompts // self.minibatch


# Two policies that are ``kl`` a token apart: a token's log-ratio is normal with mean −σ²/2, so KL = σ²/2 (ASSUMPTION:
# measured tails are fatter)


def clipped(kl: float, low: float = 0.8, high: float = 1.28) -> float:
    """Share of tokens with a ratio outside."""
    normal = NormalDist(-kl, sqrt(2 * kl))
    return normal.cdf(log(low)) + 1 - normal.cdf(log(high))


def ess(kl: float, tokens: float = 1) -> float:
    return exp(-tokens * 2 * kl)  # share of the samples that count: 1 / (1 + variance), the variance exp(T σ²) − 1


def reach(kl: float) -> float:
    return log(2) / (2 * kl)  # tokens until a product of ratios has half of the samples left


def drift(steps: float, rate: float = 1e-6, straight: bool = False) -> float:
    """KL after so many optimiser steps. Measured (docs/gsm8k.md): 2.8e-4 a token at a learning rate of 3e-6, mean of
    minibatches before and after the first of two steps: so one step is twice that. ASSUMPTION: a step's length goes
    with the learning rate (the KL of a first step at 7.5e-7 was three times what this gives); steps that point anywhere
    add their KL, those that point one way their lengths."""
    return 5.6e-4 * (rate / 3e-6) ** 2 * (steps**2 if straight else steps)
