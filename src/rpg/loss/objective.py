"""The divergences and their exact weights: pure functions of log-ratios, one table.

A regularised policy gradient maximises J(π) = E_π[R] − β·D. One sample y ~ μ is seen from three policies,

    w = π/μ   u = π/ref   v = ref/μ   (so w = u·v),         π current, μ sampling, ref the anchor of D,

and each divergence D is two expressions in them (RPG, arXiv 2505.17508, extended to ref ≠ μ):

* ``value``: added to the loss as β·value and differentiated by autograd ("differentiable");
* ``weight``: its part of ω in the loss −sg(ω)·log π, where ω = w·R + β·weight ("reinforce").

d value / d log π = −weight, sample by sample, so without clipping both styles have the same gradient. The paper is the
case ref = μ: v = 1 and u = w. ``ref`` need not be normalised: its mass enters through v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LEVELS = ("token", "sequence", "sequence-mean")


@dataclass(frozen=True)
class Ratios:
    """One sample per element, seen from three policies. Gradients flow through w, log_u and logp."""

    w: Tensor  # π/μ
    log_u: Tensor  # log π/ref
    logp: Tensor  # log π
    log_v: Callable[[], Tensor] | None  # log ref/μ, for the divergences that ask for it; None: ref = μ
    limit: float = 20.0  # of every exponent

    @cached_property
    def v(self) -> Tensor | float:
        return 1.0 if self.log_v is None else bounded(self.log_v(), self.limit).exp()

    @property
    def ref_over_pi_less_1(self) -> Tensor:
        return torch.expm1(bounded(-self.log_u, self.limit))

    def detach(self) -> Ratios:
        return Ratios(self.w.detach(), self.log_u.detach(), self.logp.detach(), self.log_v, self.limit)


@dataclass(frozen=True)
class Divergence:
    meaning: str
    value: Callable[[Ratios], Tensor]
    weight: Callable[[Ratios], Tensor]
    per_ratio: Callable[[Ratios], Tensor] | None = None  # weight / w, where w factors out: it can join the advantage
    exact: bool = True  # False: a penalty as others publish it, biased off-policy


DIVERGENCES: dict[str, Divergence] = {
    # ---- exact under off-policy sampling --------------------------------------------------------------------------
    "fkl": Divergence(
        "KL(ref‖π)",
        value=lambda r: -r.v * r.logp,
        weight=lambda r: r.v + torch.zeros_like(r.w),
    ),
    "ufkl": Divergence(
        "UKL(ref‖π)",
        value=lambda r: r.w - r.v * (r.log_u + 1),  # = v·k3(u)
        weight=lambda r: r.v - r.w,
    ),
    "rkl": Divergence(
        "KL(π‖ref)",
        value=lambda r: r.w * r.log_u,
        weight=lambda r: -r.w * (r.log_u + 1),
        per_ratio=lambda r: -(r.log_u + 1),
    ),
    "urkl": Divergence(
        "UKL(π‖ref)",
        value=lambda r: r.w * (r.log_u - 1),
        weight=lambda r: -r.w * r.log_u,
        per_ratio=lambda r: -r.log_u,
    ),
    # ---- penalties as published elsewhere: no importance weight, so biased off-policy (k1: no signal at all) ------
    "k1": Divergence(
        "mean of log π/ref, unweighted",
        value=lambda r: r.log_u,
        weight=lambda r: -torch.ones_like(r.w),
        exact=False,
    ),
    "abs": Divergence(
        "mean of |log π/ref|, unweighted",
        value=lambda r: r.log_u.abs(),
        weight=lambda r: -r.log_u.sign(),
        exact=False,
    ),
    "k2": Divergence(
        "mean of (log π/ref)²/2, unweighted",
        value=lambda r: r.log_u.square() / 2,
        weight=lambda r: -r.log_u,
        exact=False,
    ),
    "k3": Divergence(
        "mean of ref/π − 1 − log ref/π, unweighted",
        value=lambda r: r.ref_over_pi_less_1 + r.log_u,
        weight=lambda r: r.ref_over_pi_less_1,
        exact=False,
    ),
}


class _Bound(torch.autograd.Function):
    """Clamp the value, keep the gradient: a bounded exponent must not silence the sample that needs it most."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def bounded(x: Tensor, limit: float) -> Tensor:
    """``x`` within ±limit, with the gradient of ``x``. Whoever calls this counts what was bounded."""
    return x.clamp(-limit, limit) if not x.requires_grad else _Bound.apply(x, limit)  # type: ignore[no-untyped-call]


def k3(log_x: Tensor) -> Tensor:
    """x − 1 − log x ≥ 0. E_p[k3(q/p)] = KL(p‖q)."""
    return torch.expm1(log_x) - log_x


def at_level(x_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Token log-ratios as the level sees them: themselves, their sum (a product of ratios), or their mean (GSPO)."""
    if level == "token":
        return x_BT
    total_B = (x_BT * mask_BT).sum(-1)
    return total_B if level == "sequence" else total_B / mask_BT.sum(-1).clamp(min=1)


@torch.no_grad()
def kl_to_go_weight(log_w_BT: Tensor, log_u_BT: Tensor, divergence: str, limit: float) -> Tensor:
    """The sequence-level KL(π‖ref) from token terms, exact off-policy: ω_t = −Σ_{t'≥t} W_{≤t'}·log u_t'.

    W_{≤t} is the running product of the token ratios. Compared with the sequence-level row of the table, past terms,
    which have zero mean, are left out. ``rkl`` keeps the zero-mean W_{≤t} of its derivative; ``urkl`` has none.
    """
    prefix_BT = log_w_BT.cumsum(-1).clamp(-limit, limit).exp()
    to_go_BT = (prefix_BT * log_u_BT).flip(-1).cumsum(-1).flip(-1)
    return -(to_go_BT + prefix_BT) if divergence == "rkl" else -to_go_BT


def logit_score_sq(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """|∂ log π / ∂ logits|² = 1 − 2π_a + Σ_b π_b² of each sampled token, [B,T]: the control variate's ``score_sq``."""
    probs_BTV = logits_BTV.detach().float().softmax(-1)
    chosen_BT = probs_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)
    return 1 - 2 * chosen_BT + probs_BTV.square().sum(-1)


def vocabulary_kl(logits_BTV: Tensor, ref_logits_BTV: Tensor, divergence: str = "rkl") -> Tensor:
    """Exact per-state KL over the vocabulary, [B,T], differentiable in ``logits``: no sampling noise at all.

    Pass it to a loss as ``exact_kl``. Normalised and unnormalised coincide here: both arguments go through softmax.
    """
    if divergence not in ("fkl", "ufkl", "rkl", "urkl"):
        raise ValueError(f"divergence must be one of fkl, ufkl, rkl, urkl for a vocabulary KL; got {divergence!r}")
    if logits_BTV.shape != ref_logits_BTV.shape:
        raise ValueError(
            f"ref_logits must have the shape of logits, {list(logits_BTV.shape)}; got {list(ref_logits_BTV.shape)}"
        )
    logp_BTV = torch.log_softmax(logits_BTV.float() if logits_BTV.element_size() < 4 else logits_BTV, dim=-1)
    ref_BTV = torch.log_softmax(ref_logits_BTV.to(logp_BTV.dtype), dim=-1)
    first_BTV, second_BTV = (logp_BTV, ref_BTV) if divergence in ("rkl", "urkl") else (ref_BTV, logp_BTV)
    # a token that a top-p or top-k mask removed: 0·(−inf + inf) is 0, not NaN, and so is its gradient
    log_ratio_BTV = (first_BTV - second_BTV).masked_fill(first_BTV == float("-inf"), 0)
    return (first_BTV.exp() * log_ratio_BTV).sum(-1)
