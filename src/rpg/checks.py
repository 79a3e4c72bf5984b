"""One-line errors that name the argument and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor


def choose(what: str, given: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Known: {', '.join(names)}"


def one_of(what: str, given: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if given not in known:
        raise ValueError(choose(what, str(given), known))


def check_batch(
    level: str,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logp: Tensor | None,
    rollout_logp: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Shapes and types checked, half precision raised to float32, everything under the mask zero."""
    if logp.dim() != 2:
        raise ValueError(f"logp must be [B,T], one row per response; got shape {list(logp.shape)}")
    shape = list(logp.shape)
    for name, x in {"old_logp": old_logp, "mask": mask, "ref_logp": ref_logp, "rollout_logp": rollout_logp}.items():
        if x is not None and list(x.shape) != shape:
            raise ValueError(f"{name} must have the shape of logp, {shape}; got {list(x.shape)}")
    if list(advantages.shape) not in (shape[:1], shape):
        raise ValueError(f"advantages must be {shape[:1]} or {shape}, as logp has it; got {list(advantages.shape)}")
    if level != "token" and advantages.dim() == 2:
        raise ValueError(f"advantages must be {shape[:1]} at level={level!r}: one number per response")
    for name, x in {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp, "rollout_logp": rollout_logp}.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point log-probabilities; got {x.dtype} (token ids?)")
    if mask.is_floating_point() and bool((mask != mask.bool()).any()):
        raise ValueError("mask must be 0 or 1; weights on tokens belong into advantages")

    dtype = torch.float32 if logp.element_size() < 4 else logp.dtype
    mask = mask.bool()
    masked = ~mask

    def clean(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(dtype).masked_fill(masked, 0)

    logp = logp.to(dtype).masked_fill(masked, 0)
    advantages = advantages.detach().to(dtype)
    advantages = advantages.masked_fill(masked if advantages.dim() == 2 else ~mask.any(-1), 0)
    old = clean(old_logp)
    assert old is not None
    return logp, old, advantages, mask, clean(ref_logp), clean(rollout_logp)
