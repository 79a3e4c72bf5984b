"""A replay's numbers: a row for each method, cosines between them, and the whole as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..loss.clip import Unweighted
from ..loss.describe import clip_text
from .gradients import Gradients, jackknife
from .methods import Compared
from .vectors import Multiple

FAR = 0.5  # KL per token between what sampled and the model: beyond it, this is hardly the model that was trained


@dataclass(frozen=True)
class Family:
    """A method, and what is compared with it alone: exact weights, and the differences that a setting makes."""

    method: Compared
    base: Multiple
    exact: Multiple
    betas: dict[float, Multiple] = field(default_factory=dict)
    bounds: dict[float, Multiple] = field(default_factory=dict)
    loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What a factor on a setting does to the gradient."""

    norm: float  # over that of the method as it is
    cosine: float  # to the method as it is


@dataclass(frozen=True)
class MethodRow:
    """A row: one method on this batch."""

    name: str
    ran: bool
    loss: float
    grad_norm: float
    sd: float  # √Var(g): what another draw of the groups would change
    snr: float  # (|g|² − Var)/Var, at least 0
    cosine_exact: float
    cosine_ran: float | None
    kl_share: float | None  # |g_KL| / (|g_KL| + |g − g_KL|)
    beta: float | None
    clip: str
    betas: dict[float, Change]
    bounds: dict[float, Change]
    metrics: dict[str, float]
    cuts: bool  # whether shares below and above bounds mean anything

    @property
    def below(self) -> float | None:
        return self.metrics.get("clip/low") if self.cuts else None

    @property
    def above(self) -> float | None:
        high, dual = self.metrics.get("clip/high"), self.metrics.get("clip/dual", 0.0)
        return high + dual if self.cuts and high is not None else None


@dataclass(frozen=True)
class Replayed:
    """All of it."""

    path: str
    model: str
    about: dict[str, Any]
    measured: dict[str, float]
    entries: list[MethodRow]
    cosines: list[list[float]]
    left_out: dict[str, str]
    notes: list[str]
    groups: int
    responses: int
    tokens: int
    parameters: int
    sketched: bool
    vectors: int  # that had a backward pass
    forward_seconds: float
    backward_seconds: float
    seconds: float
    command: str = ""

    @property
    def ran(self) -> MethodRow | None:
        return next((entry for entry in self.entries if entry.ran), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not a number there is null."""
        methods = [
            {k: v for k, v in vars(e).items() if k not in ("betas", "bounds", "cuts")}
            | {"clip/low": e.below, "clip/high": e.above}
            | {name: {str(f): vars(c) for f, c in getattr(e, name).items()} for name in ("betas", "bounds")}
            for e in self.entries
        ]
        return _finite(vars(self) | {"entries": methods})  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Products:
    """Inner products of multiples of the pool's gradients, and of sums of two."""

    def __init__(self, gradients: Gradients):
        self.gram_VV = gradients.gram_VV

    def __call__(self, a: Multiple, b: Multiple) -> float:
        if a.index is None or b.index is None:
            return 0.0
        return a.scale * b.scale * float(self.gram_VV[a.index, b.index])

    def norm(self, a: Multiple) -> float:
        return math.sqrt(max(0.0, self(a, a)))

    def cosine(self, a: Multiple, b: Multiple) -> float:
        size = self.norm(a) * self.norm(b)
        return _cosine(self(a, b), size)

    def change(self, base: Multiple, difference: Multiple) -> Change:
        """Of base + difference beside base."""
        own, mixed, more = self(base, base), self(base, difference), self(difference, difference)
        norm = math.sqrt(max(0.0, own + 2 * mixed + more))
        if not own:
            return Change(math.nan, math.nan)
        return Change(norm / math.sqrt(own), _cosine(own + mixed, math.sqrt(own) * norm))


def _cosine(product: float, size: float) -> float:
    return max(-1.0, min(1.0, product / size)) if size > 0 else math.nan


def entries(families: list[Family], found: Gradients) -> tuple[list[MethodRow], list[list[float]]]:
    """Rows, and the cosines between them."""
    of = Products(found)
    ran = next((f for f in families if f.method.ran), None)
    rows = [_entry(f, found, of, ran) for f in families]
    return rows, [[of.cosine(a.base, b.base) for b in families] for a in families]


def _entry(f: Family, found: Gradients, of: Products, ran: Family | None) -> MethodRow:
    norm_sq = of(f.base, f.base)
    squares = 0.0 if f.base.index is None else f.base.scale**2 * float(found.squares_V[f.base.index])
    variance = jackknife(squares, norm_sq, found.groups)
    loss = f.method.loss
    kl_share = None
    if (less := f.betas.get(0.0)) is not None:
        of_kl, rest = of.norm(less), of.norm(f.base) * of.change(f.base, less).norm
        kl_share = of_kl / (of_kl + rest) if of_kl + rest > 0 else math.nan
    return MethodRow(
        name=f.method.name,
        ran=f.method.ran,
        loss=f.loss,
        grad_norm=math.sqrt(max(0.0, norm_sq)),
        sd=math.sqrt(variance) if not math.isnan(variance) else math.nan,
        snr=max(0.0, norm_sq - variance) / variance if variance > 0 else math.nan,
        cosine_exact=of.cosine(f.base, f.exact),
        cosine_ran=None if ran is None or f.method.ran else of.cosine(f.base, ran.base),
        kl_share=kl_share,
        beta=loss.beta if loss.has_kl else None,
        clip=clip_text(loss.clip if loss.clip is not None else loss.token_clip),
        betas={factor: of.change(f.base, d) for factor, d in f.betas.items()},
        bounds={factor: of.change(f.base, d) for factor, d in f.bounds.items()},
        metrics=f.metrics,
        cuts=(loss.clip is not None or loss.token_clip is not None) and not isinstance(loss.clip, Unweighted),
    )


def worst_disagreement(entry: MethodRow, measured: Mapping[str, float]) -> tuple[str, float]:
    """Of the numbers that the trainer measured, the one that the replay is furthest from, relative to its size."""
    own = {"loss": entry.loss, "grad_norm": entry.grad_norm, **entry.metrics}
    apart = {
        name: abs(own[name] - value) / max(abs(value), 1e-6)
        for name, value in measured.items()
        if name in own and name in COMPARED and math.isfinite(own[name])
    }
    name = max(apart, key=apart.__getitem__, default="")
    return name, apart.get(name, 0.0)


COMPARED = ("loss", "grad_norm", "ess", "kl/old", "kl/ref", "clip/low", "clip/high", "ratio/max", "entropy")


def far_away(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> str | None:
    """A note where the model can hardly be the one whose step this was."""
    log_w = (old_logp_BT - logp_BT)[mask_BT].double()
    kl = float((torch.expm1(-log_w.clamp(-20, 20)) + log_w).mean())
    if kl <= FAR:
        return None
    return (
        f"KL(old‖model) is {kl:.2g} nats per token: is this the model as it was in that step, "
        "and the temperature that of sampling?"
    )
