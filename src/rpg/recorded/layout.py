"""The file: safetensors with the tensors of one optimiser step, and metadata in JSON. docs/replay.md has it in a table.

A mistake in a file is a ValueError of one line that names the tensor and the fix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import choose, first_line

NEEDED = ("ids", "prompt_length", "old_logp", "reward", "group")
OPTIONAL = ("mask", "response_length", "rollout_logp", "ref_logp", "advantages", "kept_count", "kept_ids")
METADATA = (
    *("temperature", "model", "dtype", "step", "trainer", "method", "measured"),
    *("denominator", "reward_range", "reward_of"),
)
SURE = 1e-3  # a log-probability may be above 0 by rounding


@dataclass(frozen=True)
class Recorded:
    """What a file holds, checked."""

    ids_BL: Tensor  # prompt and response, padded on the right
    prompt_length_B: Tensor
    response_length_B: Tensor
    mask_BT: Tensor  # bool: the response tokens that the step trained on
    old_logp_BT: Tensor
    reward_B: Tensor
    group_B: Tensor  # 0, 1, …: which prompt each response answers
    rollout_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None
    advantage: Tensor | None = None  # [B] or [B,T], as the method that ran had it
    kept_count_BT: Tensor | None = None
    kept_ids_K: Tensor | None = None
    about: dict[str, Any] = field(default_factory=dict)  # METADATA

    def __len__(self) -> int:
        return len(self.ids_BL)

    @property
    def groups(self) -> int:
        return int(self.group_B.max()) + 1

    @property
    def measured(self) -> dict[str, float]:
        """What the trainer measured in that step: loss, grad_norm, metrics by name."""
        return self.about.get("measured") or {}


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor | None], about: Mapping[str, Any]) -> None:
    """Tensors by their names in the file. It is checked first, and there whole or not at all."""
    from safetensors.torch import save

    given = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
    checked(given, about)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    said = {name: json.dumps(value) for name, value in about.items() if value is not None}
    part.write_bytes(save(given, said))
    os.replace(part, path)


def read(path: str | os.PathLike[str]) -> Recorded:
    from safetensors import safe_open

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = file.metadata() or {}
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"{path} is no safetensors file: {first_line(error)}") from error
    about = {name: _value(name, text) for name, text in said.items() if name in METADATA}
    try:
        return checked(tensors, about)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _value(name: str, text: str) -> Any:
    """JSON; a plain word stands for itself, so that a hand-written file need not quote a model's name."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def checked(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Recorded:
    for name in tensors:
        if name not in (*NEEDED, *OPTIONAL):
            raise ValueError(choose("tensor", name, (*NEEDED, *OPTIONAL)))
    missing = [name for name in NEEDED if name not in tensors]
    if missing:
        raise ValueError(f"{missing[0]} is missing: a batch has {', '.join(NEEDED)}, and mask or response_length")
    ids_BL, old_BT = tensors["ids"], tensors["old_logp"]
    if ids_BL.dim() != 2 or old_BT.dim() != 2 or not len(ids_BL):
        raise ValueError(f"ids must be [B,L] and old_logp [B,T]; got {[*ids_BL.shape]} and {[*old_BT.shape]}")
    count, width = len(ids_BL), old_BT.shape[1]
    shapes = {name: [count] for name in ("prompt_length", "reward", "group", "response_length")}
    shapes |= {name: [count, width] for name in ("old_logp", "mask", "rollout_logp", "ref_logp", "kept_count")}
    for name, shape in shapes.items():
        if name in tensors and [*tensors[name].shape] != shape:
            raise ValueError(f"{name} must have shape {shape}, as ids and old_logp say; got {[*tensors[name].shape]}")
    for name in ("ids", "prompt_length", "response_length", "group"):
        if name in tensors and tensors[name].is_floating_point():
            raise ValueError(f"{name} must be whole numbers; got {tensors[name].dtype}")
    start_B = tensors["prompt_length"].long()
    length_B, mask_BT = _responses(tensors, width)
    if int(start_B.min()) < 1 or int((start_B + length_B).max()) > ids_BL.shape[1]:
        raise ValueError(
            "prompt_length must be at least 1, and with the response's length at most L: a row of ids is the prompt's "
            f"tokens, then the response's, padded on the right to L={ids_BL.shape[1]}"
        )
    if not bool(mask_BT.any()):
        raise ValueError("mask selects no token: there is nothing to replay")
    logps = {name: _logp(name, tensors.get(name), mask_BT) for name in ("old_logp", "rollout_logp", "ref_logp")}
    reward_B = tensors["reward"].float()
    if not bool(reward_B.isfinite().all()):
        raise ValueError("reward must be finite: leave responses that could not be scored out")
    advantage = tensors.get("advantages")
    if advantage is not None and [*advantage.shape] not in ([count], [count, width]):
        raise ValueError(f"advantages must be {[count]} or {[count, width]}; got {[*advantage.shape]}")
    temperature = about.get("temperature")
    if not isinstance(temperature, (int, float)) or not temperature > 0:
        raise ValueError(f"metadata temperature must be a positive number, that of sampling; got {temperature!r}")
    if ("kept_count" in tensors) != ("kept_ids" in tensors):
        raise ValueError("kept_count and kept_ids go together: the sets that truncated sampling drew from")
    old_logp_BT = logps["old_logp"]
    assert old_logp_BT is not None
    return Recorded(
        ids_BL=ids_BL.long(),
        prompt_length_B=start_B,
        response_length_B=length_B,
        mask_BT=mask_BT,
        old_logp_BT=old_logp_BT,
        reward_B=reward_B,
        group_B=tensors["group"].unique(return_inverse=True)[1],  # type: ignore[no-untyped-call]
        rollout_logp_BT=logps["rollout_logp"],
        ref_logp_BT=logps["ref_logp"],
        advantage=None if advantage is None else advantage.float(),
        kept_count_BT=tensors.get("kept_count"),
        kept_ids_K=tensors.get("kept_ids"),
        about=dict(about),
    )


def _responses(tensors: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Lengths of the responses, and which of their tokens were trained on: all, where no mask says else."""
    mask, length_B = tensors.get("mask"), tensors.get("response_length")
    if mask is None and length_B is None:
        raise ValueError("mask [B,T] or response_length [B] is missing: which tokens are the response's")
    if mask is not None:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("mask must be 0 or 1; weights on tokens belong into advantages")
        mask = mask.bool()
    if length_B is None:
        assert mask is not None
        place_T = torch.arange(1, width + 1)
        length_B = (mask * place_T).amax(-1)  # up to the last token that counts
    length_B = length_B.long()
    if int(length_B.min()) < 0 or int(length_B.max()) > width:
        raise ValueError(f"response_length must be from 0 to T={width}, the width of old_logp")
    whole_BT = torch.arange(width) < length_B[:, None]
    if mask is None:
        return length_B, whole_BT
    if bool((mask & ~whole_BT).any()):
        raise ValueError("mask has tokens beyond response_length: it counts from the response's first token")
    return length_B, mask


def _logp(name: str, logp: Tensor | None, mask_BT: Tensor) -> Tensor | None:
    """Zero where nothing is trained on, whatever the file has there."""
    if logp is None:
        return None
    if not logp.is_floating_point():
        raise ValueError(f"{name} must be log-probabilities; got {logp.dtype} (token ids?)")
    logp_BT = logp.float().masked_fill(~mask_BT, 0)
    if not bool(logp_BT.isfinite().all()) or float(logp_BT.max()) > SURE:
        raise ValueError(f"{name} must be finite and at most 0 on the tokens of the mask: log-probabilities")
    return logp_BT
