"""Truncated sampling in engines that do not tell which tokens they kept: said in one line at the start."""

from __future__ import annotations


def truncation_note(asked: str) -> str:
    """``asked``: the settings, in the engine's words."""
    return (
        f"{asked}: the loss compares the whole policy with a truncated sampler, which is another objective's gradient "
        "(enumerated: 3.1 % off at top-p 0.95, 6.4 % at 0.9); sample from all tokens, or train with `rpg train`, which "
        "scores over the tokens kept"
    )


def truncated(prefix: str, top_p: float | None, top_k: int | None, min_p: float | None = None) -> str | None:
    """The settings that leave tokens out, as text; None where all can be drawn."""
    cut = {"top_p": (top_p or 1.0) < 1, "top_k": (top_k or 0) > 0, "min_p": (min_p or 0.0) > 0}
    values = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    return " ".join(f"{prefix}{name}={values[name]:g}" for name, cuts in cut.items() if cuts) or None
