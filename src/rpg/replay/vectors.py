"""What each method multiplies ∇log π by, token by token: dL/dlog π, and dL/dentropy where a loss has an entropy term.

It is computed once, on the whole batch, from [B,T] tensors alone. A gradient is linear in it, so what is a multiple of
a vector that is there already needs no backward pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..loss.metrics import LossOutput
from .methods import Compared

SAME = 1e-6  # of a vector's size: below this two are the same, up to a factor


@dataclass(frozen=True)
class BatchScores:
    """Of the policy as it is, on every response token."""

    logp_BT: Tensor
    entropy_BT: Tensor
    old_logp_BT: Tensor
    mask_BT: Tensor
    group_B: Tensor


@dataclass(frozen=True)
class Multiple:
    """``scale`` times the pool's vector ``index``; of nothing at all the index is None."""

    index: int | None
    scale: float = 1.0


@dataclass
class VectorPool:
    """Vectors that are no multiples of each other, [2,B,T]: for log π, and for the entropy."""

    vectors: list[Tensor] = field(default_factory=list)

    def add(self, vector_2BT: Tensor) -> Multiple:
        size = vector_2BT.norm()
        if not float(size):
            return Multiple(None, 0.0)
        for i, known in enumerate(self.vectors):
            scale = (vector_2BT * known).sum() / known.square().sum()
            if float((vector_2BT - scale * known).norm()) <= SAME * float(size):
                return Multiple(i, float(scale))
        self.vectors.append(vector_2BT)
        return Multiple(len(self.vectors) - 1)

    @property
    def has_entropy(self) -> bool:
        return any(bool(vector[1].any()) for vector in self.vectors)


def run(one: Compared, scores: BatchScores, logp_BT: Tensor, entropy_BT: Tensor) -> LossOutput:
    """The method's loss on the whole batch."""
    dtype = logp_BT.dtype

    def to(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(logp_BT.device, dtype)

    old, advantage = to(scores.old_logp_BT), to(one.advantage)
    assert old is not None
    assert advantage is not None
    return one.loss(
        logp_BT,
        old,
        advantage,
        scores.mask_BT,
        ref_logp=to(one.ref_logp_BT),
        rollout_logp=to(one.rollout_logp_BT),
        denominator=one.denominator,
        entropy=entropy_BT,
        groups=scores.group_B,
    )


def coefficients(one: Compared, scores: BatchScores) -> Tensor:
    """[2,B,T], in float64: small differences of them are gradients of their own."""
    logp_BT = scores.logp_BT.double().requires_grad_()
    entropy_BT = scores.entropy_BT.double().requires_grad_()
    loss = run(one, scores, logp_BT, entropy_BT).loss
    found = torch.autograd.grad(loss, (logp_BT, entropy_BT), allow_unused=True)
    return torch.stack([torch.zeros_like(logp_BT) if x is None else x for x in found]) * scores.mask_BT


def measured(one: Compared, scores: BatchScores) -> tuple[float, dict[str, float]]:
    """Loss and metrics as training has them, in float32."""
    with torch.no_grad():
        out = run(one, scores, scores.logp_BT, scores.entropy_BT)
        metrics = {name: float(value) for name, value in out.metrics.items()}
        return float(out.loss), metrics
