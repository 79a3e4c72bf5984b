"""PolicyLoss: divergence × estimator × clip × level × reduction -> a loss and its diagnostics.

What multiplies ∇log π is in ``terms.py``; the divergences are in ``objective.py``, the clips in ``clip.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..console import brief, choose, one_of
from .clip import KL3, Box, Clip, DualClip, LogBox, Seen, TrustRegion, Unweighted
from .control_variate import control_variate
from .gates import Gate, Tokens
from .inputs import Inputs, check_batch, check_shape
from .metrics import LossOutput, measure
from .mismatch import BY_NAME, Mismatch, SequenceMask
from .objective import DIVERGENCES, LEVELS, Ratios, at_level, bounded, kl_to_go_weight
from .terms import Terms

ESTIMATORS = ("differentiable", "reinforce")
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "none")
_NEEDED = {
    "ref_logp": "the log-probabilities under its KL's anchor, such as the first model or a teacher",
    "keep": "what rpg.clip.curvature_keep gives",
}


@dataclass(frozen=True)
class PolicyLoss:
    """A KL-regularised policy-gradient loss. Every combination that exists is exact, or says in which way it is not.

    divergence: none, fkl, rkl, ufkl, urkl (exact off-policy); k1, abs, k2, k3 (penalties as published elsewhere).
    beta: strength of the KL term.
    estimator: ``reinforce`` (−sg(ω)·log π) or ``differentiable`` (autograd through the ratios).
    clip: a rule of ``rpg.clip``, or None for no clipping.
    level: ratios per ``token``, per ``sequence`` (product), or ``sequence-mean`` (geometric mean, GSPO).
    reduction: ``token-mean``, ``seq-mean-token-mean``, ``seq-mean-token-sum``, ``constant`` (``constant`` tokens a
        sequence, Dr.GRPO) or ``none``. At the sequence levels a sequence's loss stands for the sum over its tokens.
    kl_in_clip: the KL term is cut with the reward term. None: as published, inside where the method defines it.
    through_advantage: differentiate through Â = A − β·log u too, as RPG's Algorithm 1 prints it. It adds β·clip(w),
        which has zero mean unclipped and a large variance.
    token_clip: at the sequence levels: a rule that bounds each token's ratio before they are joined (GMPO).
    length_weighted: at the sequence levels: a response's loss counts once for each of its tokens (LUSPO).
    gate: a rule of ``rpg.gates`` that compares all tokens of an optimiser step.
    entropy_bonus: α of −α·entropy in the loss; it needs the ``entropy`` of the call, with its gradient.
    entropy_target: after a step at this entropy or below, ``next_bonus`` raises α by ``entropy_step``, up to
        ``entropy_bonus_limit``; above, it lowers α. ``rpg train`` applies α only after a step at the target or below.
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
    through_advantage: bool = False
    token_clip: Clip | None = None
    length_weighted: bool = False
    gate: Gate | None = None
    entropy_bonus: float = 0.0
    entropy_target: float | None = None
    entropy_step: float = 1e-4
    entropy_bonus_limit: float = 1.0
    kl_to_go: bool = False
    kl_ratio_cap: float | None = None
    constant: float | None = None
    mismatch: Mismatch | None = None
    control_variate: bool = False
    max_log_ratio: float = 20.0
    needs: tuple[str, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, ("none", *DIVERGENCES))
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("level", self.level, LEVELS)
        one_of("reduction", self.reduction, REDUCTIONS)
        object.__setattr__(self, "needs", tuple(self.needs))
        for name in self.needs:
            one_of("needs", name, _NEEDED)
        if not self.beta >= 0:
            raise ValueError(f"beta must be at least 0; got {self.beta}. J = E[R] - beta*D: the sign is in the formula")
        if not 0 < self.max_log_ratio <= 40:
            raise ValueError(f"max_log_ratio must be in (0, 40], or float32 overflows; got {self.max_log_ratio}")
        if self.clip is not None and not isinstance(self.clip, Clip):
            raise TypeError(f"clip must be a rule such as rpg.clip.RPGClip() or None; got {self.clip!r}")
        if self.mismatch is not None and not isinstance(self.mismatch, Mismatch):
            rule = type(BY_NAME.get(str(self.mismatch), BY_NAME["tis"])).__name__  # of the name that settings give it
            raise TypeError(f"mismatch must be a rule such as rpg.mismatch.{rule}() or None; got {self.mismatch!r}")
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
            if self.reduction == "seq-mean-token-mean" or self.level == "sequence-mean" or self.length_weighted:
                raise ValueError("control_variate has zero mean only with ratios and denominators free of 1/|y|")
            if self.mismatch is not None and type(self.mismatch) is not Mismatch:
                raise ValueError("control_variate has zero mean only without a capped or masked mismatch weight")
        self._check_parts()
        if self.kl_in_clip and not self._can_hold_kl:
            raise ValueError("kl_in_clip=True has no meaning for this clip and divergence; leave it None")
        if self.through_advantage and not (differentiable and self.kl_inside and self.divergence in ("rkl", "urkl")):
            raise ValueError(
                "through_advantage needs divergence rkl or urkl, estimator='differentiable' and the KL inside a clip"
            )

    def _check_parts(self) -> None:
        """token_clip, length_weighted, gate, and the entropy's bonus."""
        if self.token_clip is not None:
            if not isinstance(self.token_clip, Box | DualClip | KL3) or isinstance(self.token_clip, LogBox):
                raise ValueError(f"token_clip must be a rule with limits, as rpg.clip.Box(); got {self.token_clip!r}")
            if self.level == "token" or self.estimator != "differentiable":
                raise ValueError("token_clip needs level='sequence-mean' or 'sequence' and estimator='differentiable'")
            if self.divergence != "none":
                raise ValueError("token_clip needs divergence='none': a KL term would see the bounded ratios")
        if self.length_weighted and self.level == "token":
            raise ValueError("length_weighted needs level='sequence-mean' or 'sequence'")
        if self.gate is not None:
            if not isinstance(self.gate, Gate):
                raise TypeError(f"gate must be a rule such as rpg.gates.HighEntropy() or None; got {self.gate!r}")
            if self.level != "token" or self.control_variate:
                raise ValueError("gate needs level='token' and no control_variate, whose mean would not be zero")
            if self.gate.role == "kl" and (self.kl_inside or self.kl_to_go):
                raise ValueError(f"{type(self.gate).__name__} needs the KL outside the clip: kl_in_clip=False")
        if not self.entropy_bonus >= 0 or not self.entropy_step > 0:
            got = f"{self.entropy_bonus}, {self.entropy_step}"
            raise ValueError(f"entropy_bonus must be at least 0 and entropy_step positive; got {got}")
        if self.entropy_target is not None and not self.entropy_target > 0:
            raise ValueError(f"entropy_target must be positive, in nats per token; got {self.entropy_target}")
        if self.entropy_target is not None and not self.entropy_bonus <= self.entropy_bonus_limit:
            got = f"{self.entropy_bonus_limit} and entropy_bonus={self.entropy_bonus}"
            raise ValueError(f"entropy_bonus_limit must be at least entropy_bonus, where it starts; got {got}")
        if isinstance(self.clip, TrustRegion) and self.level == "sequence":
            raise ValueError("TrustRegion measures a token's probability, not a response's: give level='token'")

    @property
    def has_ratio(self) -> bool:
        """Whether π/old is in its gradient; mirror descent (k2) needs none."""
        return not isinstance(self.clip, Unweighted) or self.divergence == "k2"

    @property
    def has_kl(self) -> bool:
        return self.divergence != "none" and self.beta > 0

    @property
    def only_here(self) -> str | None:
        """Why it runs in ``rpg train`` alone: what losses are not given in TRL and verl. None: it runs there too."""
        if "keep" in self.needs:
            return "its gate needs logits and the optimiser's moments"
        if self.gate is not None:
            return "its gate compares all tokens of an optimiser step, and a loss sees one micro-batch"
        if self.has_bonus:
            return "its entropy bonus needs the gradient of the entropy"
        return None

    @property
    def has_bonus(self) -> bool:
        """Whether the loss needs the gradient of the entropy."""
        return self.entropy_bonus > 0 or self.entropy_target is not None

    def next_bonus(self, bonus: float, entropy: float) -> float:
        """The coefficient after an optimiser step of that mean entropy (Skywork-OR1, arXiv 2505.22312)."""
        if self.entropy_target is None:
            return bonus
        step = self.entropy_step if entropy <= self.entropy_target else -self.entropy_step
        return min(max(bonus + step, 0.0), self.entropy_bonus_limit)

    @property
    def needs_sampler(self) -> bool:
        """Whether its mismatch rule asks for the sampler's own log-probabilities."""
        return self.mismatch is not None and not isinstance(self.mismatch, SequenceMask)

    @property
    def kl_inside(self) -> bool:
        """Whether the KL term is inside the clip: ``kl_in_clip``, or where that is None, as published."""
        return self._published_inside if self.kl_in_clip is None else self.kl_in_clip

    @property
    def _can_hold_kl(self) -> bool:
        """Whether the KL term can be cut with the reward term."""
        if self.clip is None or not self.clip.holds_kl or self.divergence == "none" or self.kl_to_go:
            return False
        return DIVERGENCES[self.divergence].exact

    @property
    def _published_inside(self) -> bool:
        """In RPG's Algorithm 1 the KL term is inside where w factors out of ω, in Algorithm 2 always."""
        if not self._can_hold_kl or self.clip is None:
            return False
        factors = DIVERGENCES[self.divergence].per_ratio is not None
        return factors or self.estimator == "reinforce" or self.clip.whole_sample

    @property
    def kl_place(self) -> str:
        """Where the KL term stands: one of ``terms.KL_PLACES``. The one place where that is decided."""
        if not self.has_kl:
            return "none"
        if self.clip is None or not self.kl_inside:
            return "outside"
        if self.clip.action == "truncate":
            return "in the weight"
        return "in the advantage" if self.through_advantage else "whole sample"

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
        chosen: Tensor | None = None,
        state_kl: Tensor | None = None,
    ) -> LossOutput:
        """Loss over a batch of responses.

        logp, old_logp: [B,T] log-probabilities of the sampled tokens under the current and the sampling policy.
        advantages: [B] or, at token level, [B,T].       mask: [B,T], true on response tokens.
        ref_logp: the KL's anchor; None: old_logp, as in the paper. It may be unnormalised.
        rollout_logp: the sampler's own log-probabilities, for mismatch correction and its diagnostics.
        denominator: the optimiser step's total (``step_denominator``), when this is one of its micro-batches.
        old_mass: Z, where old_logp is the log of an unnormalised measure and samples came from it divided by Z.
        exact_kl: [B,T] per-state KL over the vocabulary (``rpg.vocabulary_kl``), in place of the sampled KL term.
        entropy: [B,T] exact entropies, for the metrics, a gate, and with their gradient for ``entropy_bonus``.
        keep: bool, the loss's shape; false cuts a gradient (CAPO's ``rpg.clip.curvature_keep``, reshaped to [B,T]).
        groups: [B] prompt ids; the control variate then leaves out the whole group (needed for group baselines).
        score_sq: |∇log π|² per element, or a proxy, for the control variate; None: taken as constant.
        chosen: [B,T] bool, what ``choose`` gave for the whole optimiser step; None: the gate chooses in this batch.
        state_kl: [B,T] KL(old‖π) over the vocabulary, for ``rpg.clip.TrustRegion`` with measure='state-kl'.
        """
        x = check_batch(self.level, logp, old_logp, advantages, mask, ref_logp, rollout_logp)
        self._check_call(x, denominator, old_mass, exact_kl, entropy, keep, groups, score_sq)
        self._check_looks(x, entropy, chosen, state_kl)
        terms = self._terms(x, state_kl, apart=exact_kl is not None or self.kl_to_go)
        if self.gate is not None:
            if chosen is None:
                chosen = self._choose(terms, x, entropy)
            if self.gate.role == "kl":
                terms = replace(terms, kl_only=chosen)
            else:
                keep = chosen if keep is None else keep.bool() & chosen
        if self.estimator == "reinforce":
            with torch.no_grad():
                omega = terms.omega()
                if self.control_variate:
                    omega = omega - control_variate(terms, omega, groups, score_sq) * terms.ratios.w
                omega = (omega * terms.valid).neg_()
            loss = omega * terms.ratios.logp
        else:
            loss = terms.differentiable()
            if self.control_variate:
                with torch.no_grad():
                    c = control_variate(terms, terms.omega(), groups, score_sq)
                loss = loss + c * terms.ratios.w
            loss = loss * terms.valid

        to_go_BT = None
        if self.has_kl and exact_kl is not None:
            loss = loss + self.beta * exact_kl.to(loss.dtype).masked_fill(x.mask == 0, 0)
        elif self.has_kl and self.kl_to_go:
            to_go_BT = self._omega_to_go(x)
            kl_BT = to_go_BT * x.logp
            loss = loss - (kl_BT if self.level == "token" else kl_BT.sum(-1))

        if keep is not None:
            loss = torch.where(keep.bool(), loss, loss.detach())
        if self.length_weighted:
            loss = loss * x.length
        if self.entropy_bonus and entropy is not None:
            bonus_BT = self.entropy_bonus * entropy.to(loss.dtype).masked_fill(x.mask == 0, 0)
            loss = loss - (bonus_BT if loss.dim() == 2 else bonus_BT.sum(-1))
        correction = self._correction(x)
        if correction is not None:
            loss = loss * (correction.unsqueeze(-1) if correction.dim() < loss.dim() else correction)
        if old_mass != 1.0:
            loss = loss * old_mass
        loss = self.reduce(loss, x.length, denominator)
        rho_level = None if self.mismatch is None else self.mismatch.level_for(self.level)
        seen = (self.level, rho_level, to_go_BT, correction, entropy, self.token_clip)
        return LossOutput(loss, lambda: measure(terms, x, *seen))

    def _check_call(
        self,
        x: Inputs,
        denominator: Tensor | float | None,
        old_mass: float,
        exact_kl: Tensor | None,
        entropy: Tensor | None,
        keep: Tensor | None,
        groups: Tensor | None,
        score_sq: Tensor | None,
    ) -> None:
        if "ref_logp" in self.needs and x.ref is None and self.has_kl:
            raise ValueError(f"this loss needs ref_logp=: {_NEEDED['ref_logp']}")
        if "keep" in self.needs and keep is None:
            raise ValueError(f"this loss needs keep=: {_NEEDED['keep']}")
        if exact_kl is not None:
            if self.level != "token":
                raise ValueError("exact_kl is a per-state term: it needs level='token'")
            if not self.has_kl or self.kl_to_go or self.kl_in_clip or self.through_advantage:
                raise ValueError("exact_kl needs beta > 0, and no kl_to_go, kl_in_clip=True or through_advantage")
            if self.gate is not None and self.gate.role == "kl":
                raise ValueError(f"exact_kl is of all tokens, but {type(self.gate).__name__} chooses some")
            if x.logp.requires_grad and not exact_kl.requires_grad:
                raise ValueError("exact_kl must carry a gradient: compute it from the current policy's logits")
        if keep is not None and self.control_variate:
            raise ValueError("keep and control_variate do not go together: on kept tokens alone its mean is not zero")
        tokens, responses = [*x.logp.shape], [*x.length.shape]
        samples = tokens if self.level == "token" else responses
        check_shape("exact_kl", exact_kl, tokens)
        check_shape("entropy", entropy, tokens)
        check_shape("keep", keep, samples)
        check_shape("groups", groups, responses)
        check_shape("score_sq", score_sq, samples)
        if not old_mass > 0:
            raise ValueError(f"old_mass must be positive; got {old_mass}")
        if self.needs_sampler and x.rollout is None:
            raise ValueError(f"mismatch={self.mismatch} needs rollout_logp, the sampler's own log-probabilities")
        if denominator is None and not x.tokens:
            raise ValueError("mask selects no token: nothing to learn from (drop this batch before the loss)")

    def _check_looks(self, x: Inputs, entropy: Tensor | None, chosen: Tensor | None, state_kl: Tensor | None) -> None:
        """What the clip, the gate and the entropy's bonus look at."""
        check_shape("chosen", chosen, [*x.logp.shape])
        check_shape("state_kl", state_kl, [*x.logp.shape])
        if self.clip is not None and "state_kl" in self.clip.looks and (state_kl is None or self.level != "token"):
            raise ValueError(f"state_kl is needed, at level='token': {self.clip} measures it (see rpg.vocabulary_kl)")
        if self.gate is not None and self.gate.needs_entropy and chosen is None and entropy is None:
            raise ValueError(f"entropy is needed: {type(self.gate).__name__} chooses tokens by it")
        if self.entropy_bonus and (entropy is None or (x.logp.requires_grad and not entropy.requires_grad)):
            raise ValueError("entropy is needed, with its gradient: entropy_bonus is part of the loss")

    @torch.no_grad()
    def choose(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        **unused: object,
    ) -> Tensor:
        """[B,T] bool: what the gate chooses among all tokens of an optimiser step, for ``chosen``."""
        x = check_batch(self.level, logp, old_logp, advantages, mask, None, None)
        return self._choose(self._terms(x, None, apart=True), x, entropy)

    def _choose(self, terms: Terms, x: Inputs, entropy: Tensor | None) -> Tensor:
        assert self.gate is not None
        return self.gate.choose(Tokens(x.logp.detach(), terms.advantage, x.mask.bool(), terms.cut, entropy))

    def _terms(self, x: Inputs, state_kl: Tensor | None, apart: bool) -> Terms:
        """The batch at the loss's level. ``apart``: the KL term is added by itself, not sampled."""
        limit, level, ref = self.max_log_ratio, self.level, x.ref
        moving = x.logp.detach() if self.estimator == "reinforce" else x.logp
        log_w_BT = moving - x.old
        if self.token_clip is not None:
            log_w_BT = _bound_tokens(self.token_clip, log_w_BT, x.advantages.unsqueeze(-1), limit)
        log_w = at_level(log_w_BT, x.mask, level)
        log_u = log_w if ref is None else at_level(moving - ref, x.mask, level)
        valid = x.mask if level == "token" else (x.length > 0).to(x.mask.dtype)
        return Terms(
            ratios=Ratios(
                w=bounded(log_w, limit).exp(),
                log_u=log_u,
                logp=at_level(x.logp, x.mask, level),
                log_v=None if ref is None else lambda: at_level(ref - x.old, x.mask, level),
                limit=limit,
            ),
            log_w=log_w,
            advantage=x.advantages if x.advantages.dim() == log_w.dim() else x.advantages.unsqueeze(-1),
            valid=valid,
            clip=None if self.clip is None else self.clip.fit(log_w.detach(), valid),
            seen=Seen(at_level(x.old, x.mask, level), None if state_kl is None else state_kl.detach()),
            kl=DIVERGENCES[self.divergence] if self.has_kl and not apart else None,
            kl_place="none" if apart else self.kl_place,
            beta=self.beta,
            kl_ratio_cap=self.kl_ratio_cap,
        )

    def _omega_to_go(self, x: Inputs) -> Tensor:
        log_w_BT = x.log_ratio(x.logp.detach(), x.old)
        log_u_BT = log_w_BT if x.ref is None else x.log_ratio(x.logp.detach(), x.ref)
        return self.beta * kl_to_go_weight(log_w_BT, log_u_BT, self.divergence, self.max_log_ratio) * x.mask

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

    def reduce(self, loss: Tensor, length_B: Tensor, denominator: Tensor | float | None) -> Tensor:
        """A loss of every token, or of every response, to one number."""
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


def _bound_tokens(rule: Clip, log_w_BT: Tensor, advantage_B1: Tensor, limit: float) -> Tensor:
    """Each token's log-ratio, held at its limit and without its gradient where the rule cuts it."""
    w_BT = bounded(log_w_BT.detach(), limit).exp()
    return torch.where(rule.keep(w_BT, advantage_B1), log_w_BT, rule.clamp(w_BT, advantage_B1).log())
