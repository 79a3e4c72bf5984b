"""A method as text and flat data: for tables, plans and ``rpg algorithms --json``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .advantages import Advantage
from .clip import Adaptive, Clip
from .gates import Gate
from .methods import Algorithm


def describe(a: Algorithm) -> dict[str, Any]:
    """A preset as flat data."""
    loss = a.loss
    bounds = None
    if loss.clip is not None:
        bounds = [x if x < float("inf") else None for x in loss.clip.bounds()]
    return {
        "name": a.name,
        "divergence": loss.divergence,
        "beta": loss.beta,
        "estimator": loss.estimator,
        "clip": clip_text(loss.clip),
        "token_clip": clip_text(loss.token_clip),
        "gate": gate_text(loss.gate),
        "clip_bounds": bounds,
        "kl_in_clip": loss.kl_inside if loss.divergence != "none" else None,
        "level": loss.level,
        "advantage": advantage_text(a.advantage),
        "reduction": loss.reduction,
        "reference": a.reference,
        "formula": a.formula,
        "paper": a.paper,
        "options": _options(a),
    }


def _options(a: Algorithm) -> dict[str, Any]:
    """Everything that ``rpg.algorithm(name, option=…)`` can change, with its value."""
    rules = ("clip", "token_clip", "gate", "mismatch")
    of_loss = {f.name: getattr(a.loss, f.name) for f in fields(a.loss) if f.name not in rules}
    if a.advantage.beta:  # its KL is in the reward, where the option goes too
        of_loss["beta"] = a.advantage.beta
    of_rules = {k: v for rule in (a.loss.gate, a.loss.clip) if rule is not None for k, v in _fields_of(rule).items()}
    around = ("reference", "dynamic_sampling", "min_signal", "overlong_penalty", "curvature_gate")
    advantage = {f.name: getattr(a.advantage, f.name) for f in fields(a.advantage)}
    of_rules["mismatch"] = a.loss.mismatch  # None in every preset
    return of_loss | of_rules | {"advantage": advantage} | {name: getattr(a, name) for name in around}


def _fields_of(rule: Clip | Gate) -> dict[str, Any]:
    return {f.name: getattr(rule, f.name) for f in fields(rule)}  # type: ignore[arg-type]


def clip_text(rule: Clip | None) -> str:
    """RPGClip 0.8–1.28, c=10"""
    if rule is None:
        return "none"
    if isinstance(rule, Adaptive):
        return f"Adaptive {rule.target_ess or rule.target_kl:g}"
    low, high = rule.bounds()
    bounds = {(0.0, float("inf")): "", (1.0, 1.0): " w = 1"}.get((low, high))
    if bounds is None:
        bounds = f" ≤ {high:.5g}" if low == 0 else f" {low:.5g}–{high:.5g}"
    rest = {k: v for k, v in _fields_of(rule).items() if k not in ("low", "high") and v is not None}
    texts = [f", {k}={v:g}" if isinstance(v, float) else f", {k}={v}" for k, v in rest.items()]
    return f"{type(rule).__name__}{bounds}" + "".join(texts)


def beside_clip(a: Algorithm) -> list[str]:
    """What else decides how a token learns, where the method has it: gate HighEntropy, share=0.2"""
    loss = a.loss
    texts = {
        "through Â": loss.through_advantage,
        f"each token: {clip_text(loss.token_clip)}": loss.token_clip is not None,
        f"gate {gate_text(loss.gate)}": loss.gate is not None,
        "curvature gate": a.curvature_gate,
        f"entropy bonus {loss.entropy_bonus:g}": loss.entropy_bonus > 0,
        f"entropy target {loss.entropy_target}": loss.entropy_target is not None,
    }
    return [text for text, has in texts.items() if has]


def gate_text(gate: Gate | None) -> str:
    """HighEntropy, share=0.2"""
    if gate is None:
        return "none"
    return type(gate).__name__ + "".join(f", {k}={v:g}" for k, v in _fields_of(gate).items())


def advantage_text(advantage: Advantage) -> str:
    """reward-to-go, whiten, beta=0.01"""
    given = {f.name: getattr(advantage, f.name) for f in fields(advantage) if f.name != "kind"}
    chosen = {f.name: given[f.name] for f in fields(advantage) if f.name in given and given[f.name] != f.default}
    return advantage.kind + "".join(f", {k}" if v is True else f", {k}={_short(v)}" for k, v in chosen.items())


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "…".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
