"""A checked batch: shapes and types, NaN under the mask. A mistake is one line that names the argument and the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def check_shape(name: str, x: Tensor | None, shape: list[int]) -> None:
    if x is not None and list(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")


@dataclass(frozen=True)
class Inputs:
    """A checked batch: one floating type, no NaN or infinity under the mask. Only logp may carry a gradient."""

    logp: Tensor  # [B,T], as are the next three
    old: Tensor
    ref: Tensor | None  # None: old
    rollout: Tensor | None
    advantages: Tensor  # [B] or [B,T]
    mask: Tensor  # [B,T], 1.0 on response tokens
    length: Tensor  # [B]
    tokens: float | Tensor  # in all; a tensor where to read it is to wait for a GPU

    def log_ratio(self, a: Tensor, b: Tensor) -> Tensor:
        """log a/b, zero under the mask."""
        return (a - b) * self.mask


def check_batch(
    level: str,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logp: Tensor | None,
    rollout_logp: Tensor | None,
) -> Inputs:
    """Shapes and types checked, half precision raised to float32."""
    tensors = {"logp": logp, "old_logp": old_logp, "advantages": advantages, "mask": mask}
    for name, x in {**tensors, "ref_logp": ref_logp, "rollout_logp": rollout_logp}.items():
        if not isinstance(x, Tensor) and not (x is None and name not in tensors):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
    if logp.dim() != 2:
        raise ValueError(f"logp must be [B,T], one row per response; got shape {list(logp.shape)}")
    shape = list(logp.shape)
    policies = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp, "rollout_logp": rollout_logp}
    for name, x in {**policies, "mask": mask}.items():
        if x is not None and list(x.shape) != shape:
            raise ValueError(f"{name} must have the shape of logp, {shape}; got {list(x.shape)}")
    if list(advantages.shape) not in (shape[:1], shape):
        raise ValueError(f"advantages must be {shape[:1]} or {shape}, as logp has it; got {list(advantages.shape)}")
    if level != "token" and advantages.dim() == 2:
        raise ValueError(f"advantages must be {shape[:1]} at level={level!r}: one number per response")
    for name, x in policies.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point log-probabilities; got {x.dtype} (token ids?)")

    dtype = torch.float32 if logp.element_size() < 4 else logp.dtype
    weight = mask.to(dtype)
    if mask.dtype != torch.bool and not torch.equal(weight, weight * weight):
        raise ValueError("mask must be 0 or 1; weights on tokens belong into advantages")
    logp, old_logp = logp.to(dtype), old_logp.detach().to(dtype)
    ref_logp, rollout_logp = (None if x is None else x.detach().to(dtype) for x in (ref_logp, rollout_logp))
    advantages = advantages.detach().to(dtype)
    length = weight.sum(-1)
    # NaN, infinite, or so large that times a ratio it would be infinite: only then is it worth cleaning under the mask.
    # To look would be to wait for a GPU, which cleans in less time.
    tokens, ends = length.sum(), [math.inf]
    if not logp.is_cuda:
        given = [x.detach() for x in (logp, old_logp, ref_logp, rollout_logp, advantages) if x is not None]
        tokens, *ends = torch.stack([tokens, *(end for x in given if x.numel() for end in x.aminmax())]).tolist()
    if not all(abs(end) < 1e3 for end in ends):
        masked = ~mask.bool()
        logp, old_logp = logp.masked_fill(masked, 0), old_logp.masked_fill(masked, 0)
        ref_logp, rollout_logp = (None if x is None else x.masked_fill(masked, 0) for x in (ref_logp, rollout_logp))
        # a response without tokens has no advantage, whatever was computed for it
        advantages = advantages.masked_fill(masked if advantages.dim() == 2 else length == 0, 0)
    return Inputs(logp, old_logp, ref_logp, rollout_logp, advantages, weight, length, tokens)
