"""Gradients of a batch, group by group: one forward pass a group, and one backward pass a coefficient vector.

Kept of every vector is its whole gradient and the sum over groups of |g_i|². Where whole gradients of all vectors do
not fit into the memory of the host, a random sketch of each is kept instead, from which inner products are estimated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..costs.devices import host_memory
from ..models.policy import Policy
from ..training.batch import Batch, micro_batches
from .vectors import BatchScores, VectorPool

SKETCH = 1_048_573  # numbers a sketch has (a prime): an inner product is known to about 1/√SKETCH = 0.001 of |x|·|y|
SHARE = 0.5  # of free memory that gradients may take
BLOCK = 2**18  # parameters at a time, where inner products are taken


@dataclass
class Gradients:
    """Of every vector of a pool: inner products [V,V], and Σ_i |g_i|² over the groups."""

    gram_VV: Tensor
    squares_V: Tensor
    groups: int
    sketched: bool
    parameters: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0  # of all vectors
    totals: list[Tensor] = field(default_factory=list)  # whole gradients, or sketches, [P] or [SKETCH]


@torch.no_grad()
def score(policy: Policy, batch: Batch, tokens: int) -> tuple[Tensor, Tensor]:
    """log π and entropies of the whole batch, [B,T]."""
    logp_BT, entropy_BT = torch.zeros_like(batch.old_logp_BT), torch.zeros_like(batch.old_logp_BT)
    for index in micro_batches(batch, tokens, policy.packs):
        part = batch.rows(index)
        scored = policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, kept=part.kept)
        width = part.mask_BT.shape[1]
        logp_BT[index, :width], entropy_BT[index, :width] = scored.logp_BT, scored.entropy_BT
    policy.rest()
    return logp_BT, entropy_BT


def all_gradients(
    policy: Policy,
    batch: Batch,
    scores: BatchScores,
    pool: VectorPool,
    tokens: int,
    progress: Callable[[str], None] = lambda text: None,
    host_bytes: int | None = None,
) -> Gradients:
    """``batch``'s groups are its prompts; ``scores.group_B`` are the groups that variance is taken over.

    Vectors go in chunks, as many as the device has room for at a time; each chunk has a forward pass of its own.
    """
    policy.entropy_gradient = pool.has_entropy
    params = [p for _, p in policy.parameters()]
    size = sum(p.numel() for p in params)
    pieces = _pieces(policy, batch, scores.group_B, tokens)
    cut = any(len(of_group) > 1 for of_group in pieces)
    count = len(pool.vectors)
    sketched = 4 * size * count > SHARE * (host_memory() if host_bytes is None else host_bytes)
    at_once = max(1, int(SHARE * _free(policy.device) / (4 * size * (2 if cut else 1))))
    work = _Work(policy, batch, params, pieces)
    totals: list[Tensor] = []
    norms, squares = [], []
    for first in range(0, count, at_once):
        chunk = [v.to(policy.device, torch.float32) for v in pool.vectors[first : first + at_once]]
        progress(f"gradients {first + 1} to {first + len(chunk)} of {count}")
        sums, of_groups = work.chunk(chunk)
        squares += of_groups
        for flat_P in map(_flat, sums):
            norms.append(float(_square([flat_P])))
            totals.append(_sketch(flat_P) if sketched else flat_P.cpu())
        del sums
    gram_VV = _gram(totals, policy.device)
    gram_VV.diagonal().copy_(torch.tensor(norms, dtype=gram_VV.dtype))  # exact, sketched or not
    return Gradients(
        gram_VV,
        torch.tensor(squares, dtype=torch.float64),
        len(pieces),
        sketched,
        size,
        work.forward_seconds,
        work.backward_seconds,
        totals,
    )


class _Work:
    """A chunk of vectors through every group."""

    def __init__(self, policy: Policy, batch: Batch, params: list[torch.nn.Parameter], pieces: list[list[Tensor]]):
        self.policy, self.batch, self.params, self.pieces = policy, batch, params, pieces
        self.forward_seconds = self.backward_seconds = 0.0

    def chunk(self, vectors: list[Tensor]) -> tuple[list[list[Tensor]], list[float]]:
        """Whole gradients, and Σ_i |g_i|², by vector."""
        sums = [[torch.zeros_like(p, dtype=torch.float32) for p in self.params] for _ in vectors]
        squares = torch.zeros(len(vectors), dtype=torch.float64)
        for of_group in self.pieces:
            parts: list[list[Tensor] | None] = [None] * len(vectors)
            group_squares = []
            for n, index in enumerate(of_group, 1):
                outputs, width = self._forward(index)
                for v, vector_2BT in enumerate(vectors):
                    given = vector_2BT[:, index, :width]
                    found = self._backward(outputs, given, keep=v + 1 < len(vectors))
                    if (part := parts[v]) is None:
                        parts[v] = part = found
                    else:
                        torch._foreach_add_(part, found)
                    if n == len(of_group):
                        torch._foreach_add_(sums[v], part)
                        group_squares.append(_square(part))
                        parts[v] = None
            squares += torch.stack(group_squares).cpu()
        return sums, squares.tolist()

    def _now(self) -> float:
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        return time.perf_counter()

    def _forward(self, index: Tensor) -> tuple[list[Tensor], int]:
        begin, part = self._now(), self.batch.rows(index)
        scored = self.policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, kept=part.kept)
        outputs = [scored.logp_BT, *([scored.entropy_BT] if self.policy.entropy_gradient else [])]
        self.forward_seconds += self._now() - begin
        return outputs, part.mask_BT.shape[1]

    def _backward(self, outputs: list[Tensor], given_2BT: Tensor, keep: bool) -> list[Tensor]:
        begin = self._now()
        found = torch.autograd.grad(
            outputs,
            self.params,
            list(given_2BT[: len(outputs)]),
            retain_graph=keep,
            allow_unused=True,
            materialize_grads=True,
        )
        out = [g.float() for g in found]
        self.backward_seconds += self._now() - begin
        return out


def _pieces(policy: Policy, batch: Batch, group_B: Tensor, tokens: int) -> list[list[Tensor]]:
    """Of every group its rows, in pieces of at most so many tokens."""
    out = []
    for group in range(int(group_B.max()) + 1):
        rows = (group_B == group).nonzero()[:, 0]
        rows = rows[batch.mask_BT[rows].any(-1)]
        if len(rows):
            out.append([rows[part] for part in micro_batches(batch.rows(rows), tokens, policy.packs)])
    return out


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in parts])


def _square(parts: list[Tensor]) -> Tensor:
    """Σx², summed in float64: of a million numbers float32 is off by 1e-4."""
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in parts]).square().sum()


def _sketch(flat_P: Tensor) -> Tensor:
    """Random signs, then sums of what falls on the same place modulo SKETCH: inner products are kept on average."""
    out = torch.zeros(SKETCH, device=flat_P.device)
    for number, part in enumerate(torch.split(flat_P, SKETCH)):
        signs = torch.randint(0, 2, (len(part),), generator=torch.Generator().manual_seed(number), dtype=torch.int8)
        out[: len(part)] += part * (2 * signs.to(flat_P.device) - 1)
    return out.cpu()


def _gram(totals: list[Tensor], device: torch.device) -> Tensor:
    gram_VV = torch.zeros(len(totals), len(totals), dtype=torch.float64)
    for first in range(0, len(totals[0]) if totals else 0, BLOCK):
        block = torch.stack([x[first : first + BLOCK] for x in totals]).to(device)
        block = block.double() if device.type == "cpu" else block
        gram_VV += (block @ block.T).double().cpu()
    return gram_VV


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(host_memory())


def jackknife(squares: float, norm_sq: float, groups: int) -> float:
    """Var(g) = G/(G−1)·Σ|g_i − ḡ|², of the sum g over G groups; batch-level numbers (advantages, denominators, fitted
    bounds) are held fixed. NaN of one group."""
    if groups < 2:
        return math.nan
    return max(0.0, groups / (groups - 1) * (squares - norm_sq / groups))
