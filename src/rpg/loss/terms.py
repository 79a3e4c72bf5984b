"""What multiplies ∇log π, sample by sample: the reward term, the KL term, and where the clip meets them.

The KL term stands in one of five places (``PolicyLoss.kl_place`` decides which). With w = π/old, A the advantage and
ω_KL the divergence's weight from ``objective.py``, ascent is along ω·∇log π, where ω is

=============  ================================  =========================================================
none           clip(w)·A                         there is no KL term, or it is added apart (exact, to go)
outside        clip(w)·A + β·ω_KL                the clip cuts the reward term alone
in the weight  w̄·A + β·ω_KL(w̄), w̄ = clip(w)    a clip that truncates: w̄ stands for w in log u too (Remark F.2)
whole sample   w·Â where Â's sign allows, else 0  Â = ω/w: reward and KL are cut together (RPG, Algorithm 2)
in the         the same − β·clip(w)              RPG's Algorithm 1 as printed: it also differentiates through Â,
advantage                                        which adds variance and no signal (``through_advantage``)
=============  ================================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .clip import Clip, Seen
from .objective import Divergence, Ratios

KL_PLACES = ("none", "outside", "in the weight", "whole sample", "in the advantage")


@dataclass(frozen=True)
class Terms:
    """A batch as the level sees it, [B,T] at token level, [B] at sequence levels, and the rules that apply to it."""

    ratios: Ratios
    log_w: Tensor  # before it was bounded
    advantage: Tensor  # broadcastable to the ratios
    valid: Tensor  # 1.0 where there is a sample, else 0.0
    clip: Clip | None
    seen: Seen  # what the clip may look at beside the ratio
    kl: Divergence | None
    kl_place: str
    beta: float
    kl_ratio_cap: float | None = None
    kl_only: Tensor | None = None  # bool: samples that have the KL term; None: all

    @cached_property
    def signed_advantage(self) -> Tensor:
        """The advantage whose sign the clip reads: Â = ω/w where the KL is cut with the reward, else A."""
        if self.kl is None or self.kl_place not in ("whole sample", "in the advantage"):
            return self.advantage
        r = self.ratios.detach()
        per_ratio = self.kl.weight(r) / r.w if self.kl.per_ratio is None else self.kl.per_ratio(r)
        return torch.add(self.advantage, per_ratio, alpha=self.beta)

    @property
    def weight(self) -> Tensor:
        """What is left of w: it multiplies the advantage in ω."""
        w = self.ratios.w.detach()
        return w if self.clip is None else self.clip.weight(w, self.signed_advantage, self.seen)

    @property
    def cut(self) -> Tensor:
        """Bool: which samples the clip cuts."""
        w = self.ratios.w.detach()
        if self.clip is None:
            return torch.zeros_like(w, dtype=torch.bool)
        return ~self.clip.keep(w, self.advantage, self.seen)

    def omega(self) -> Tensor:
        """ω, what multiplies ∇log π in ascent. No gradients."""
        match self.kl_place:
            case "none":
                return self.weight * self.advantage
            case "whole sample":
                return self.weight * self.signed_advantage
            case _:
                return self.weight * self.advantage + self.omega_kl()

    def omega_kl(self) -> Tensor:
        """The KL term's part of ω."""
        assert self.kl is not None
        r = self.ratios.detach()
        match self.kl_place, self.clip:
            case "outside", _:
                capped = r if self.kl_ratio_cap is None else replace(r, w=r.w.clamp(max=self.kl_ratio_cap))
                weight = self.beta * self.kl.weight(capped)
                return weight if self.kl_only is None else weight * self.kl_only
            case "in the weight", Clip() as clip:
                truncated = clip.clamp(r.w, self.advantage, self.seen)
                log_u = (
                    r.log_u - self.log_w.detach() + truncated.log()
                )  # log ū; where nothing is truncated, log u itself
                log_u = torch.where(truncated == r.w, r.log_u, log_u)
                return self.beta * self.kl.weight(replace(r, w=truncated, log_u=log_u))
            case "whole sample", Clip() as clip:
                return self.beta * self.kl.weight(r) * clip.keep(r.w, self.signed_advantage, self.seen)
            case "in the advantage", Clip() as clip:
                kept = self.beta * self.kl.weight(r) * clip.keep(r.w, self.signed_advantage, self.seen)
                return kept - self.beta * clip.surrogate(r.w, self.signed_advantage, self.seen)
        raise AssertionError(self.kl_place)

    def differentiable(self) -> Tensor:
        """The loss as an expression in w, log u and log π for autograd: its gradient is −ω."""
        r, a = self.ratios, self.advantage
        match self.kl_place, self.clip:
            case "whole sample", Clip() as clip:
                assert self.kl is not None
                loss = -r.w * a + self.beta * self.kl.value(r)
                return torch.where(clip.keep(r.w, self.signed_advantage, self.seen), loss, loss.detach())
            case "in the advantage", Clip() as clip:
                assert self.kl is not None
                assert self.kl.per_ratio is not None
                regularised = a + self.beta * self.kl.per_ratio(r)
                return -clip.surrogate(r.w, regularised.detach(), self.seen) * regularised
        loss = -(r.w if self.clip is None else self.clip.surrogate(r.w, a, self.seen)) * a
        if self.kl is None:
            return loss
        penalty = self.beta * self.kl.value(r)
        return loss + (penalty if self.kl_only is None else penalty * self.kl_only)
