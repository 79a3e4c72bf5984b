"""Which tokens learn, chosen by comparing all tokens of an optimiser step (public as ``rpg.gates``).

A clip decides sample by sample; a gate looks at the whole batch first. ``choose`` gives [B,T] bool, and ``role`` says
what it means: ``keep``: the other tokens' gradient is cut; ``kl``: only these tokens have the KL term. A choice over a
micro-batch is not the choice over the step: with micro-batches, choose once for the step and pass the parts of the
result to the loss as ``chosen``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens of an optimiser step, [B,T] each, without gradients."""

    logp: Tensor
    advantage: Tensor
    mask: Tensor  # bool
    clipped: Tensor  # bool: cut by the clip already
    entropy: Tensor | None = None

    def covariance(self) -> Tensor:
        """(A − mean A)·(log π − mean log π) of each token: their mean is the covariance that moves the entropy."""
        a, logp = (x - x[self.mask].mean() for x in (self.advantage.expand_as(self.logp), self.logp))
        return a * logp


class Gate:
    role: ClassVar[str] = "keep"
    needs_entropy: ClassVar[bool] = False

    def choose(self, x: Tokens) -> Tensor:
        raise NotImplementedError


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], of the tokens; got {share}")


def _number(share: float, tokens: Tensor) -> int:
    return max(1, int(share * int(tokens.sum())))


@dataclass(frozen=True)
class HighEntropy(Gate):
    """Only the tokens of the highest entropy learn: forks, not fillings (arXiv 2506.01939)."""

    share: float = 0.2
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_share(self.share)

    @torch.no_grad()
    def choose(self, x: Tokens) -> Tensor:
        assert x.entropy is not None
        if not bool(x.mask.any()):
            return x.mask
        ordered = x.entropy[x.mask].sort(descending=True).values
        return (x.entropy >= ordered[_number(self.share, x.mask) - 1]) & x.mask


@dataclass(frozen=True)
class ClipCov(Gate):
    """A random few of the tokens with a covariance between two bounds do not learn (Clip-Cov, arXiv 2505.22617)."""

    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"give cov_low < cov_high, the covariances that count; got {self.cov_low}, {self.cov_high}"
            )

    @torch.no_grad()
    def choose(self, x: Tokens) -> Tensor:
        covariance = x.covariance()
        candidate = (covariance > self.cov_low) & (covariance < self.cov_high) & x.mask & ~x.clipped
        places = candidate.flatten().nonzero()[:, 0]
        drawn = _shuffled(places, x.logp[x.mask])[: _number(self.share, x.mask)]
        keep = torch.ones_like(candidate).flatten()
        keep[drawn] = False
        return keep.view_as(candidate)


@dataclass(frozen=True)
class KLCov(Gate):
    """The tokens of the largest covariance have a KL penalty, the others none (KL-Cov, arXiv 2505.22617)."""

    share: float = 2e-4
    role: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        _check_share(self.share)

    @torch.no_grad()
    def choose(self, x: Tokens) -> Tensor:
        covariance = x.covariance().masked_fill(~x.mask, -torch.inf).flatten()
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        chosen[covariance.topk(_number(self.share, x.mask)).indices] = True
        return chosen.view_as(x.mask) & x.mask


BY_NAME: dict[str, Gate] = {"high-entropy": HighEntropy(), "clip-cov": ClipCov(), "kl-cov": KLCov()}


def _shuffled(places: Tensor, logp_N: Tensor) -> Tensor:
    """In an order that is random from batch to batch, and the same for the same batch: a resumed run repeats it."""
    seed = int(torch.stack([logp_N.double().sum(), logp_N.double().square().sum()]).view(torch.int64).sum()) % 2**63
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    return places[order.to(places.device)]
