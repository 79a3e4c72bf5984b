"""PolicyLoss: divergence × estimator × clip × level × reduction -> a loss and its diagnostics.

Read ``PolicyLoss._weights`` for what multiplies ∇log π, ``_differentiable`` for the same as an expression for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from .checks import check_batch, choose, one_of
from .clipping import Clip
from .diagnostics import diagnose
from .mismatch import Mismatch, SequenceMask
from .objective import DIVERGENCES, LEVELS, Divergence, KLToGo, Ratios, at_level, bounded

ESTIMATORS = ("differentiable", "reinforce")
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "none")


@dataclass(frozen=True)
class View:
    """A batch as the level sees it: [B,T] at token level, [B] at sequence levels."""

    log_w: Tensor
    log_u: Tensor
    w: Tensor
    v: Tensor | float
    logp: Tensor
    advantage: Tensor  # broadcastable to the above
    valid: Tensor  # bool

    def ratios(self, detach: bool = False) -> Ratios:
        if detach:
            return Ratios(self.w.detach(), self.v, self.log_u.detach(), self.logp.detach())
        return Ratios(self.w, self.v, self.log_u, self.logp)


@dataclass(frozen=True)
class LossOutput:
    """``loss`` has the gradient; ``metrics`` are detached 0-d tensors, computed when first read."""

    loss: Tensor
    _diagnose: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        return self._diagnose()


@dataclass(frozen=True)
class PolicyLoss:
    """A KL-regularised policy-gradient loss. Every combination that exists is exact, or says in which way it is not.

    divergence: none, fkl, rkl, ufkl, urkl (exact off-policy); k1, k2, k3 (penalties as published elsewhere).
    beta: strength of the KL term.
    estimator: ``reinforce`` (−sg(ω)·log π) or ``differentiable`` (autograd through the ratios).
    clip: a rule of ``rpg.clip``, or None for no clipping.
    level: ratios per ``token``, per ``sequence`` (product), or ``sequence-mean`` (geometric mean, GSPO).
    reduction: ``token-mean``, ``seq-mean-token-mean``, ``seq-mean-token-sum``, ``constant`` (``constant`` tokens a
        sequence, Dr.GRPO) or ``none``. At the sequence levels a sequence's loss stands for the sum over its tokens.
    kl_in_clip: the KL term is cut with the reward term. None: as published, inside where the method defines it.
    kl_to_go: rkl/urkl as a KL reward-to-go, exact for the sequence objective. It stands outside the clip.
    kl_ratio_cap: upper bound of w inside the KL term's weight (CPGD; reinforce only).
    constant: tokens per sequence for reduction='constant'.
    mismatch: a rule of ``rpg.mismatch`` for samplers that are not numerically the trainer.
    control_variate: subtract c·w·∇log π with the variance-optimal c, fitted on the other sequences: free of bias.
    max_log_ratio: exponents are bounded to ± this before exp, gradients kept; ``bounded`` counts them.
    """

    divergence: str = "urkl"
    beta: float = 1e-4
    estimator: str = "reinforce"
    clip: Clip | None = None
    level: str = "token"
    reduction: str = "token-mean"
    kl_in_clip: bool | None = None
    kl_to_go: bool = False
    kl_ratio_cap: float | None = None
    constant: float | None = None
    mismatch: Mismatch | None = None
    control_variate: bool = False
    max_log_ratio: float = 20.0

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, ("none", *DIVERGENCES))
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("level", self.level, LEVELS)
        one_of("reduction", self.reduction, REDUCTIONS)
        if not self.beta >= 0:
            raise ValueError(f"beta must be at least 0; got {self.beta}. J = E[R] - beta*D: the sign is in the formula")
        if not 0 < self.max_log_ratio <= 80:
            raise ValueError(f"max_log_ratio must be in (0, 80], or exp overflows in float32; got {self.max_log_ratio}")
        if self.clip is not None and not isinstance(self.clip, Clip):
            raise TypeError(f"clip must be a rule such as rpg.clip.RPGClip() or None; got {self.clip!r}")
        if self.mismatch is not None and not isinstance(self.mismatch, Mismatch):
            raise TypeError(f"mismatch must be a rule such as rpg.mismatch.TIS() or None; got {self.mismatch!r}")
        if (self.reduction == "constant") != (self.constant is not None):
            raise ValueError("constant (tokens per sequence, e.g. the longest response) goes with reduction='constant'")
        if self.constant is not None and not self.constant > 0:
            raise ValueError(f"constant must be positive; got {self.constant}")
        differentiable = self.estimator == "differentiable"
        if differentiable and self.clip is not None and self.clip.action == "truncate":
            raise ValueError(f"clip {type(self.clip).__name__} stops the ratio's gradient; use estimator='reinforce'")
        if self.kl_ratio_cap is not None and (differentiable or not self.kl_ratio_cap > 0):
            raise ValueError("kl_ratio_cap must be positive and needs estimator='reinforce'")
        if self.kl_to_go and (self.divergence not in ("rkl", "urkl") or self.level == "sequence-mean"):
            raise ValueError("kl_to_go needs divergence 'rkl' or 'urkl' and level 'token' or 'sequence'")
        if self.control_variate and self.level == "token" and self.reduction == "seq-mean-token-mean":
            raise ValueError(
                "control_variate is free of bias only with a constant denominator; use reduction='token-mean'"
            )
        if self.kl_in_clip and not self._can_hold_kl:
            raise ValueError("kl_in_clip=True has no meaning for this clip, divergence and estimator; leave it None")

    @property
    def _kl(self) -> Divergence | None:
        return DIVERGENCES[self.divergence] if self.divergence != "none" and self.beta > 0 else None

    @property
    def _can_hold_kl(self) -> bool:
        """The KL term can be cut with the reward term where ω = w·Â, or where the clip cuts whole samples."""
        if self.clip is None or not self.clip.holds_kl or self.divergence == "none" or self.kl_to_go:
            return False
        row = DIVERGENCES[self.divergence]
        return row.exact and (self.estimator == "reinforce" or row.per_ratio is not None or self.clip.whole_sample)

    @property
    def kl_inside(self) -> bool:
        """Whether the KL term is inside the clip: ``kl_in_clip``, or where that is None, as published."""
        return self._can_hold_kl if self.kl_in_clip is None else self.kl_in_clip

    def replace(self, **changes: object) -> PolicyLoss:
        """A copy with some choices changed."""
        names = {f.name for f in fields(self)}
        for name in changes:
            if name not in names:
                raise ValueError(choose("option", name, names))
        return replace(self, **changes)  # type: ignore[arg-type]

    # ---- denominators ---------------------------------------------------------------------------------------------

    def count(self, mask: Tensor) -> Tensor:
        """What this batch adds to the denominator of its optimiser step (a sequence without tokens counts nothing)."""
        if self.reduction == "none":
            return torch.ones((), device=mask.device)
        if self.reduction == "token-mean":
            return mask.bool().sum().float()
        return mask.bool().any(-1).sum().float() * (self.constant or 1.0)

    def step_denominator(self, *masks: Tensor, average_over_ranks: bool = True) -> Tensor:
        """The denominator of a whole optimiser step, from the masks of this rank's micro-batches.

        Pass it as ``denominator`` to each micro-batch's loss and sum the gradients: that is the gradient of one large
        batch, exactly. With torch.distributed initialised the counts are summed over ranks; ``average_over_ranks``
        says that the wrapper (DDP, FSDP) averages gradients instead of adding them.
        """
        if not masks:
            raise ValueError("step_denominator needs the mask of every micro-batch of the step")
        total = torch.stack([self.count(mask) for mask in masks]).sum()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
            if average_over_ranks:
                total = total / torch.distributed.get_world_size()
        return total

    # ---- the loss -------------------------------------------------------------------------------------------------

    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref_logp: Tensor | None = None,
        rollout_logp: Tensor | None = None,
        denominator: Tensor | float | None = None,
        *,
        old_mass: float = 1.0,
        exact_kl: Tensor | None = None,
        entropy: Tensor | None = None,
        keep: Tensor | None = None,
        groups: Tensor | None = None,
        score_sq: Tensor | None = None,
    ) -> LossOutput:
        """Loss over a batch of responses.

        logp, old_logp: [B,T] log-probabilities of the sampled tokens under the current and the sampling policy.
        advantages: [B] or, at token level, [B,T].       mask: [B,T], true on response tokens.
        ref_logp: the KL's anchor; None: old_logp, as in the paper. It may be unnormalised.
        rollout_logp: the sampler's own log-probabilities, for mismatch correction and its diagnostics.
        denominator: the optimiser step's total (``step_denominator``), when this is one of its micro-batches.
        old_mass: Z, where old_logp is the log of an unnormalised measure and samples came from it divided by Z.
        exact_kl: [B,T] per-state KL over the vocabulary (``rpg.vocabulary_kl``), in place of the sampled KL term.
        entropy: [B,T] exact entropies, for the metrics.
        keep: [B,T] bool; false cuts a token's gradient (CAPO's ``rpg.clip.curvature_keep``).
        groups: [B] prompt ids; the control variate then leaves out the whole group (needed for group baselines).
        score_sq: |∇log π|² per element, or a proxy, for the control variate; None: taken as constant.
        """
        logp, old_logp, advantages, mask, ref_logp, rollout_logp = check_batch(
            self.level, logp, old_logp, advantages, mask, ref_logp, rollout_logp
        )
        if exact_kl is not None and self.level != "token":
            raise ValueError("exact_kl is a per-state term: it needs level='token'")
        if isinstance(self.mismatch, Mismatch) and rollout_logp is None and not isinstance(self.mismatch, SequenceMask):
            raise ValueError(f"mismatch={self.mismatch} needs rollout_logp, the sampler's own log-probabilities")
        if denominator is None and not mask.any():
            raise ValueError("mask selects no token: nothing to learn from (drop this batch before the loss)")

        log_w_BT = logp - old_logp
        log_u_BT = log_w_BT if ref_logp is None else logp - ref_logp
        log_v = None if ref_logp is None else at_level(ref_logp - old_logp, mask, self.level)
        log_w = at_level(log_w_BT, mask, self.level)
        log_u = log_w if ref_logp is None else at_level(log_u_BT, mask, self.level)
        limit = self.max_log_ratio
        view = View(
            log_w=log_w,
            log_u=bounded(log_u, limit),
            w=bounded(log_w, limit).exp(),
            v=1.0 if log_v is None else log_v.clamp(-limit, limit).exp(),
            logp=at_level(logp, mask, self.level),
            advantage=advantages if advantages.dim() == log_w.dim() else advantages.unsqueeze(-1),
            valid=mask if self.level == "token" else mask.any(-1),
        )
        clip = None if self.clip is None else self.clip.fit(log_w.detach(), view.valid)
        sampled_kl = self._kl if exact_kl is None and not self.kl_to_go else None
        if self.estimator == "reinforce":
            with torch.no_grad():
                reward, kl = self._weights(view, clip, sampled_kl)
                weight = reward if kl is None else reward + kl
                if self.control_variate:
                    weight = weight - _control_variate(view, weight, groups, score_sq) * view.w
            loss = -weight * view.logp
        else:
            loss = self._differentiable(view, clip, sampled_kl)
            if self.control_variate:
                with torch.no_grad():
                    reward, kl = self._weights(view, clip, sampled_kl)
                    c = _control_variate(view, reward if kl is None else reward + kl, groups, score_sq)
                loss = loss + c * view.w

        if self._kl is not None and exact_kl is not None:
            loss = loss + self.beta * exact_kl.to(loss.dtype).masked_fill(~mask, 0)
        elif self._kl is not None and self.kl_to_go:
            to_go = KLToGo(log_w_BT, log_u_BT, self.divergence, limit)
            kl_BT = to_go.value() if self.estimator == "differentiable" else -to_go.weight() * logp
            kl_BT = kl_BT * mask
            loss = loss + self.beta * (kl_BT if self.level == "token" else kl_BT.sum(-1))

        if keep is not None:
            if keep.shape != loss.shape:
                raise ValueError(f"keep must have the loss's shape {list(loss.shape)}; got {list(keep.shape)}")
            loss = torch.where(keep.bool(), loss, loss.detach())
        weight_m = self._mismatch_weight(logp, old_logp, advantages, mask, rollout_logp)
        if weight_m is not None:
            loss = loss * (weight_m.unsqueeze(-1) if weight_m.dim() < loss.dim() else weight_m)
        if old_mass != 1.0:
            loss = loss * old_mass

        def metrics() -> dict[str, Tensor]:
            return diagnose(
                self, view, clip, sampled_kl, logp, old_logp, ref_logp, rollout_logp, mask, entropy, weight_m
            )

        return LossOutput(self._reduce(loss, view.valid, mask, denominator), metrics)

    def _weights(self, x: View, clip: Clip | None, kl: Divergence | None) -> tuple[Tensor, Tensor | None]:
        """The reward's and the KL's part of ω, what multiplies ∇log π (descent on −ω). No gradients."""
        r, a, beta = x.ratios(detach=True), x.advantage, self.beta
        if kl is None:
            return (r.w if clip is None else clip.weight(r.w, a)) * a, None
        if clip is None or not self.kl_inside:
            capped = r if self.kl_ratio_cap is None else replace(r, w=r.w.clamp(max=self.kl_ratio_cap))
            return (r.w if clip is None else clip.weight(r.w, a)) * a, beta * kl.weight(capped)
        if clip.action == "truncate":
            r = replace(r, w=clip.clamp(r.w, a))
            return r.w * a, beta * kl.weight(r)
        kl_weight = beta * kl.weight(r)
        keep = clip.keep(r.w, a + kl_weight / r.w)  # RPG Algorithm 2: the sign of the regularised advantage
        return r.w * a * keep, kl_weight * keep

    def _differentiable(self, x: View, clip: Clip | None, kl: Divergence | None) -> Tensor:
        """The loss as an expression in w, log u and log π, for autograd."""
        r, a, beta = x.ratios(), x.advantage, self.beta
        if kl is None or clip is None or not self.kl_inside:
            loss = -(r.w if clip is None else clip.surrogate(r.w, a)) * a
            loss = loss if kl is None else loss + beta * kl.value(r)
        elif clip.whole_sample:
            loss = -r.w * a + beta * kl.value(r)
            regularised = a + beta * kl.weight(x.ratios(detach=True)) / r.w.detach()
            loss = torch.where(clip.keep(r.w, regularised), loss, loss.detach())
        else:  # RPG Algorithm 1: max/min of ±w·Â, the gradient flowing through Â too
            assert kl.per_ratio is not None
            regularised = a + beta * kl.per_ratio(r)
            loss = -clip.surrogate(r.w, regularised.detach()) * regularised
        return loss.masked_fill(~x.valid, 0)

    def _mismatch_weight(
        self, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, rollout_logp: Tensor | None
    ) -> Tensor | None:
        if self.mismatch is None:
            return None
        with torch.no_grad():
            if isinstance(self.mismatch, SequenceMask):
                drift_BT = (old_logp if rollout_logp is None else rollout_logp) - logp
                return (~self.mismatch.drop(drift_BT, advantages, mask)).to(logp.dtype)
            assert rollout_logp is not None
            weight = self.mismatch(old_logp - rollout_logp, mask, self.max_log_ratio)
            if self.level != "token" and weight.dim() == 2:
                raise ValueError(f"level={self.level!r} needs mismatch level='sequence': one weight per response")
            return weight

    def _reduce(self, loss: Tensor, valid: Tensor, mask_BT: Tensor, denominator: Tensor | float | None) -> Tensor:
        if self.reduction == "none":
            return loss
        if denominator is None:
            denominator = self.count(mask_BT)
        elif not denominator > 0:
            raise ValueError(f"denominator must be positive, the optimiser step's total; got {float(denominator)}")
        if self.reduction == "seq-mean-token-mean":
            length_B = mask_BT.sum(-1).clamp(min=1)
            loss = (loss if loss.dim() == 1 else loss.sum(-1)) / length_B
        return loss.sum() / denominator


def _control_variate(x: View, weight: Tensor, groups: Tensor | None, score_sq: Tensor | None) -> Tensor:
    """c* = E[w·ω·|s|²] / E[w²·|s|²], for each sequence from the sequences outside its own group. [B,1] or [B]."""
    n = x.valid if score_sq is None else score_sq * x.valid
    top, bottom = x.w.detach() * weight * n, x.w.detach().square() * n
    if top.dim() == 2:
        top, bottom = top.sum(-1), bottom.sum(-1)
    group = torch.arange(len(top), device=top.device) if groups is None else groups.unique(return_inverse=True)[1]
    sums = top.new_zeros(2, int(group.max()) + 1).index_add_(1, group, torch.stack([top, bottom]))
    others = sums.sum(1, keepdim=True) - sums
    c = torch.where(others[1] > 1e-6 * sums[1].sum(), others[0] / others[1].clamp(min=1e-30), 0.0)[group]
    return c.unsqueeze(-1) if x.w.dim() == 2 else c
