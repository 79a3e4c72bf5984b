"""PolicyLoss: divergence × estimator × clip × level × reduction -> a loss and its diagnostics.

Read ``PolicyLoss._omega`` for what multiplies ∇log π, ``_differentiable`` for the same as an expression for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from ..console import choose, one_of
from .clip import Clip
from .inputs import Inputs, check_batch, check_shape
from .metrics import diagnose
from .mismatch import Mismatch, SequenceMask
from .objective import DIVERGENCES, LEVELS, Divergence, Ratios, at_level, bounded, kl_to_go_weight

ESTIMATORS = ("differentiable", "reinforce")
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "none")


@dataclass(frozen=True)
class View:
    """A batch as the level sees it: [B,T] at token level, [B] at sequence levels."""

    ratios: Ratios
    log_w: Tensor  # before it was bounded
    advantage: Tensor  # broadcastable to the ratios
    valid: Tensor  # 1.0 where there is a sample, else 0.0


@dataclass(frozen=True)
class LossOutput:
    """``loss`` has the gradient; ``metrics`` are detached 0-d tensors, computed when first read."""

    loss: Tensor
    _diagnose: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        return self._diagnose()


_WHY_NEEDED = {"ref_logp": "its KL is anchored elsewhere than at old", "keep": "see rpg.clip.curvature_keep"}


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
    control_variate: subtract c·w·∇log π, which has zero mean, with c fitted on the other sequences. It is optimal for
        the ``score_sq`` given to the call (``rpg.logit_score_sq``); without it all |∇log π|² count as equal.
    max_log_ratio: exponents are bounded to ± this before exp, gradients kept; ``bounded`` counts them.
    needs: arguments of the call that this method is nothing without ("ref_logp", "keep").
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
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, ("none", *DIVERGENCES))
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("level", self.level, LEVELS)
        one_of("reduction", self.reduction, REDUCTIONS)
        object.__setattr__(self, "needs", tuple(self.needs))
        for name in self.needs:
            one_of("needs", name, _WHY_NEEDED)
        if not self.beta >= 0:
            raise ValueError(f"beta must be at least 0; got {self.beta}. J = E[R] - beta*D: the sign is in the formula")
        if not 0 < self.max_log_ratio <= 40:
            raise ValueError(f"max_log_ratio must be in (0, 40], or float32 overflows; got {self.max_log_ratio}")
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
        if self.kl_ratio_cap is not None and (self.kl_inside or self.kl_to_go):
            raise ValueError("kl_ratio_cap needs the KL term outside the clip: give kl_in_clip=False (and no kl_to_go)")
        if self.kl_to_go and (self.divergence not in ("rkl", "urkl") or self.level == "sequence-mean"):
            raise ValueError("kl_to_go needs divergence 'rkl' or 'urkl' and level 'token' or 'sequence'")
        if self.mismatch is not None and self.mismatch.level_for(self.level) == "token":
            if self.level != "token":
                raise ValueError(f"mismatch at level='token' has no meaning at level={self.level!r}; leave it None")
            if self.kl_to_go:
                raise ValueError("kl_to_go looks beyond its token: give the mismatch rule level='sequence'")
        if self.control_variate:
            if self.reduction == "seq-mean-token-mean" or self.level == "sequence-mean":
                raise ValueError("control_variate has zero mean only with ratios and denominators free of 1/|y|")
            if self.mismatch is not None and type(self.mismatch) is not Mismatch:
                raise ValueError("control_variate has zero mean only without a capped or masked mismatch weight")
        if self.kl_in_clip and not self._can_hold_kl:
            raise ValueError("kl_in_clip=True has no meaning for this clip, divergence and estimator; leave it None")

    @property
    def has_kl(self) -> bool:
        return self.divergence != "none" and self.beta > 0

    @property
    def _kl(self) -> Divergence | None:
        return DIVERGENCES[self.divergence] if self.has_kl else None

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
        return self._count(mask.bool().sum(-1))

    def _count(self, length_B: Tensor) -> Tensor:
        if self.reduction == "none":
            return length_B.new_ones(())
        if self.reduction == "token-mean":
            return length_B.sum()
        return (length_B > 0).sum() * (self.constant or 1)

    def step_denominator(
        self,
        *masks: Tensor,
        average_over_ranks: bool = True,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> float:
        """The denominator of a whole optimiser step, from the masks of this rank's micro-batches.

        Pass it as ``denominator`` to each micro-batch's loss and sum the gradients: that is the gradient of one large
        batch, exactly. With torch.distributed initialised the counts are summed over ``group`` (the data-parallel
        ranks); ``average_over_ranks`` says that the wrapper (DDP, FSDP) averages gradients instead of adding them.
        """
        if not masks:
            raise ValueError("step_denominator needs the mask of every micro-batch of the step")
        total = torch.stack([self.count(mask) for mask in masks]).sum()
        ranks = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total, group=group)
            ranks = torch.distributed.get_world_size(group) if average_over_ranks else 1
        return float(total) / ranks

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
        keep: bool, the loss's shape; false cuts a gradient (CAPO's ``rpg.clip.curvature_keep``, reshaped to [B,T]).
        groups: [B] prompt ids; the control variate then leaves out the whole group (needed for group baselines).
        score_sq: |∇log π|² per element, or a proxy, for the control variate; None: taken as constant.
        """
        x = check_batch(self.level, logp, old_logp, advantages, mask, ref_logp, rollout_logp)
        for name in self.needs:
            if {"ref_logp": ref_logp, "keep": keep}[name] is None and (name != "ref_logp" or self._kl is not None):
                raise ValueError(f"{name} is needed: this method is another one without it ({_WHY_NEEDED[name]})")
        if exact_kl is not None:
            self._check_exact_kl(exact_kl, x.logp)
        if keep is not None and self.control_variate:
            raise ValueError("keep and control_variate do not go together: on kept tokens alone its mean is not zero")
        per_sample = [*x.logp.shape] if self.level == "token" else [*x.length.shape]
        check_shape("exact_kl", exact_kl, [*x.logp.shape])
        check_shape("entropy", entropy, [*x.logp.shape])
        check_shape("keep", keep, per_sample)
        check_shape("groups", groups, [*x.length.shape])
        check_shape("score_sq", score_sq, per_sample)
        if not old_mass > 0:
            raise ValueError(f"old_mass must be positive; got {old_mass}")
        if self.mismatch is not None and x.rollout is None and not isinstance(self.mismatch, SequenceMask):
            raise ValueError(f"mismatch={self.mismatch} needs rollout_logp, the sampler's own log-probabilities")
        if denominator is None and not x.tokens:
            raise ValueError("mask selects no token: nothing to learn from (drop this batch before the loss)")

        view = self._view(x)
        clip = None if self.clip is None else self.clip.fit(view.log_w.detach(), view.valid)
        sampled_kl = self._kl if exact_kl is None and not self.kl_to_go else None
        if self.estimator == "reinforce":
            with torch.no_grad():
                omega = self._omega(view, clip, sampled_kl)
                if self.control_variate:
                    omega = omega - _control_variate(view, omega, groups, score_sq) * view.ratios.w
                omega = (omega * view.valid).neg_()
            loss = omega * view.ratios.logp
        else:
            loss = self._differentiable(view, clip, sampled_kl)
            if self.control_variate:
                with torch.no_grad():
                    c = _control_variate(view, self._omega(view, clip, sampled_kl), groups, score_sq)
                loss = loss + c * view.ratios.w
            loss = loss * view.valid

        if self._kl is not None and exact_kl is not None:
            loss = loss + self.beta * exact_kl.to(loss.dtype).masked_fill(x.mask == 0, 0)
        elif self._kl is not None and self.kl_to_go:
            kl_BT = self._omega_to_go(x) * x.logp
            loss = loss - (kl_BT if self.level == "token" else kl_BT.sum(-1))

        if keep is not None:
            loss = torch.where(keep.bool(), loss, loss.detach())
        correction = self._correction(x)
        if correction is not None:
            loss = loss * (correction.unsqueeze(-1) if correction.dim() < loss.dim() else correction)
        if old_mass != 1.0:
            loss = loss * old_mass
        loss = self._reduce(loss, x.length, denominator)
        return LossOutput(loss, lambda: diagnose(self, x, view, clip, sampled_kl, correction, entropy))

    def _view(self, x: Inputs) -> View:
        limit, level = self.max_log_ratio, self.level
        moving = x.logp.detach() if self.estimator == "reinforce" else x.logp
        log_w = at_level(moving - x.old, x.mask, level)
        log_u = log_w if x.ref is None else at_level(moving - x.ref, x.mask, level)
        ref = x.ref
        return View(
            ratios=Ratios(
                w=bounded(log_w, limit).exp(),
                log_u=log_u,
                logp=at_level(x.logp, x.mask, level),
                log_v=None if ref is None else lambda: at_level(ref - x.old, x.mask, level),
                limit=limit,
            ),
            log_w=log_w,
            advantage=x.advantages if x.advantages.dim() == log_w.dim() else x.advantages.unsqueeze(-1),
            valid=x.mask if level == "token" else (x.length > 0).to(x.mask.dtype),
        )

    def _branching(self, x: View, clip: Clip, kl: Divergence | None) -> Tensor:
        """The advantage whose sign the clip reads: ω/w where the KL term is inside a cut, else the plain one."""
        if kl is None or not self.kl_inside or clip.action == "truncate":
            return x.advantage
        r = x.ratios.detach()
        per_ratio = kl.weight(r) / r.w if kl.per_ratio is None else kl.per_ratio(r)
        return torch.add(x.advantage, per_ratio, alpha=self.beta)

    def _omega(self, x: View, clip: Clip | None, kl: Divergence | None) -> Tensor:
        """ω, what multiplies ∇log π in ascent. No gradients."""
        w, a = x.ratios.w.detach(), x.advantage
        if clip is None:
            return w * a if kl is None else w * a + self.beta * kl.weight(x.ratios.detach())
        branching = self._branching(x, clip, kl)
        if branching is not a and not self._flows_through_advantage(clip):
            return clip.weight(w, branching) * branching  # RPG Algorithm 2: ω = w·A_reg, cut on the sign of A_reg
        return clip.weight(w, branching) * a + (0 if kl is None else self._omega_kl(x, clip, kl))

    def _omega_kl(self, x: View, clip: Clip | None, kl: Divergence) -> Tensor:
        """The KL term's part of ω."""
        r = x.ratios.detach()
        if clip is None or not self.kl_inside:
            return self.beta * kl.weight(
                r if self.kl_ratio_cap is None else replace(r, w=r.w.clamp(max=self.kl_ratio_cap))
            )
        if clip.action == "truncate":  # ω with clip(w) in place of w
            return self.beta * kl.weight(replace(r, w=clip.clamp(r.w, x.advantage)))
        branching = self._branching(x, clip, kl)
        omega = self.beta * kl.weight(r) * clip.keep(r.w, branching)
        return omega - self.beta * clip.surrogate(r.w, branching) if self._flows_through_advantage(clip) else omega

    def _flows_through_advantage(self, clip: Clip) -> bool:
        """RPG Algorithm 1: Â = A − β·log u is differentiated too, which adds −β·clip(w) to ω."""
        return self.kl_inside and self.estimator == "differentiable" and not clip.whole_sample

    def _differentiable(self, x: View, clip: Clip | None, kl: Divergence | None) -> Tensor:
        """The loss as an expression in w, log u and log π, for autograd."""
        r, a = x.ratios, x.advantage
        if kl is None or clip is None or not self.kl_inside:
            loss = -(r.w if clip is None else clip.surrogate(r.w, a)) * a
            return loss if kl is None else loss + self.beta * kl.value(r)
        if clip.whole_sample:
            loss = -r.w * a + self.beta * kl.value(r)
            return torch.where(clip.keep(r.w, self._branching(x, clip, kl)), loss, loss.detach())
        assert kl.per_ratio is not None  # RPG Algorithm 1: max/min of ±w·Â, the gradient flowing through Â too
        regularised = a + self.beta * kl.per_ratio(r)
        return -clip.surrogate(r.w, regularised.detach()) * regularised

    def _omega_to_go(self, x: Inputs) -> Tensor:
        log_w_BT = x.log_ratio(x.logp.detach(), x.old)
        log_u_BT = log_w_BT if x.ref is None else x.log_ratio(x.logp.detach(), x.ref)
        return self.beta * kl_to_go_weight(log_w_BT, log_u_BT, self.divergence, self.max_log_ratio) * x.mask

    def _check_exact_kl(self, exact_kl: Tensor, logp: Tensor) -> None:
        if self.level != "token":
            raise ValueError("exact_kl is a per-state term: it needs level='token'")
        if self._kl is None or self.kl_to_go or self.kl_in_clip:
            raise ValueError("exact_kl needs a divergence with beta > 0, without kl_to_go and kl_in_clip=True")
        if logp.requires_grad and not exact_kl.requires_grad:
            raise ValueError("exact_kl must carry a gradient: compute it from the current policy's logits")

    @torch.no_grad()
    def _correction(self, x: Inputs) -> Tensor | None:
        """The mismatch rule's weight, [B,T] or [B]."""
        if self.mismatch is None:
            return None
        if isinstance(self.mismatch, SequenceMask):
            drift_BT = x.log_ratio(x.old if x.rollout is None else x.rollout, x.logp)
            return (~self.mismatch.drop(drift_BT, x.advantages, x.mask)).to(x.logp.dtype)
        assert x.rollout is not None
        return self.mismatch(x.log_ratio(x.old, x.rollout), x.mask, self.level, self.max_log_ratio)

    def _reduce(self, loss: Tensor, length_B: Tensor, denominator: Tensor | float | None) -> Tensor:
        if self.reduction == "none":
            return loss
        if denominator is None:
            denominator = self._count(length_B)
        elif isinstance(denominator, Tensor) and denominator.numel() != 1:
            raise ValueError(f"denominator must be one number; got shape {list(denominator.shape)}")
        elif not denominator > 0:
            raise ValueError(f"denominator must be positive, the optimiser step's total; got {float(denominator)}")
        if isinstance(denominator, Tensor):
            denominator = denominator.reshape(())
        if self.reduction == "seq-mean-token-mean":
            loss = (loss if loss.dim() == 1 else loss.sum(-1)) / length_B.clamp(min=1)
        return loss.sum() / denominator


def _control_variate(x: View, weight: Tensor, groups: Tensor | None, score_sq: Tensor | None) -> Tensor:
    """c* = E[w·ω·|s|²] / E[w²·|s|²], for each sequence from the sequences outside its own group. [B,1] or [B]."""
    w = x.ratios.w.detach()
    n = x.valid if score_sq is None else score_sq.masked_fill(x.valid == 0, 0)
    top, bottom = w * weight * n, w.square() * n
    if top.dim() == 2:
        top, bottom = top.sum(-1), bottom.sum(-1)
    if groups is None:
        group = torch.arange(len(top), device=top.device)
    else:
        group = groups.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    sums = top.new_zeros(2, int(group.max()) + 1).index_add_(1, group, torch.stack([top, bottom]))
    others = sums.sum(1, keepdim=True) - sums
    c = torch.where(others[1] > 1e-6 * sums[1].sum(), others[0] / others[1].clamp(min=1e-30), 0.0)[group]
    return c.unsqueeze(-1) if w.dim() == 2 else c
