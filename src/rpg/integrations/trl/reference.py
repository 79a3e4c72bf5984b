"""The policy that anchors the KL term inside TRL: a copy of what is trained, renewed by a rule, in every checkpoint.

The rules are those of ``rpg train`` (train/reference.py), counted in optimiser steps. TRL computes the reference's
log-probabilities when it generates: a copy that is due is therefore renewed just before the next generation, so that
all optimiser steps on a generation have the same reference.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...models import adapters
from ...train.config import ReferenceConfig
from ...train.optim import HALF

TENSORS, STATE = "rpg_reference.safetensors", "rpg_reference.json"
AVERAGE = "average/"  # in front of the names of averages in the file


class Reference:
    """``scorer`` is what TRL calls for the reference's log-probabilities; None: the model with its adapter off."""

    def __init__(self, model: nn.Module, rule: str, config: ReferenceConfig, adapted: bool):
        self.rule, self.config, self.model, self.adapted = rule, config, model, adapted
        self.average_kl = 0.0  # moving average of the KL per token from the reference
        self.renewals = 0
        self.due = False  # to be renewed before the next generation
        self.copy: nn.Module | None = None
        self.adapter: dict[str, Tensor] | None = None
        if not adapted:
            self.copy = copy.deepcopy(model).requires_grad_(False).eval()
            vars(self.copy).pop("forward", None)  # TRL's fused head, which is bound to the original
        elif rule != "frozen" or not began_as_nothing(model):
            self.adapter = {name: x.clone() for name, x in adapters.weights(model).items()}
        self.averages = {name: x.float() for name, x in self.weights().items() if rule == "ema" and x.dtype in HALF}

    @property
    def scorer(self) -> Any:
        return self.copy if self.adapter is None else self._swapped

    def prepare(self, prepared: Callable[[nn.Module], nn.Module]) -> Any:
        """The scorer as accelerate wants it."""
        return self.scorer if self.copy is None else prepared(self.copy)

    def _swapped(self, **inputs: Any) -> Any:
        """The trained model with the reference's adapter in the place of its own."""
        assert self.adapter is not None
        with adapters.swapped_in(self.model, self.adapter):
            return self.model(**inputs)

    @torch.no_grad()
    def after_step(self, step: int, kl: float | None, generates_next: bool) -> bool:
        """After an optimiser step. ``kl``: per token, current policy from reference, over all processes."""
        if self.rule == "frozen":
            return False
        if self.rule == "ema":
            self._blend(1 - self.config.decay)
            return True
        if self.rule == "every":
            self.due |= step % self.config.every == 0
        else:
            past = self.config.smoothing
            if kl is not None:
                self.average_kl = past * self.average_kl + (1 - past) * kl
            self.due |= self.average_kl > self.config.kl
        if not (self.due and generates_next):
            return False
        self._blend(1.0)
        self.average_kl, self.due = 0.0, False
        self.renewals += 1
        return True

    def _blend(self, share: float) -> None:
        new = adapters.weights(self.model) if self.adapted else floating(self.model)
        for name, own in self.weights().items():
            if share == 1:
                own.copy_(new[name])
            elif name in self.averages:
                self.averages[name] = self.averages[name].to(own.device)
                own.copy_(self.averages[name].lerp_(new[name].float(), share))
            else:
                own.lerp_(new[name].to(own.dtype), share)

    def weights(self) -> dict[str, Tensor]:
        """What is held, by the names of the model's."""
        return floating(self.copy) if self.copy is not None else self.adapter or {}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        tensors = self.weights() | {AVERAGE + name: x for name, x in self.averages.items()}
        if tensors:
            save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS)
        state = {"rule": self.rule, "average_kl": self.average_kl, "renewals": self.renewals, "due": self.due}
        (folder / STATE).write_text(json.dumps(state | {"held": bool(tensors)}), encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not (folder / STATE).exists():
            raise ValueError(
                f"{folder} has no {STATE}: it is not a whole checkpoint of an RPGTrainer with a reference. To begin "
                "from its weights, give it as the model instead of resuming"
            )
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["rule"] != self.rule:
            raise ValueError(f"{folder} was trained with reference_update={state['rule']}; this run has {self.rule}")
        self.average_kl, self.renewals, self.due = state["average_kl"], state["renewals"], state["due"]
        if not state["held"]:
            self.adapter = None  # the adapter began as nothing, in the process that began the run
            return
        tensors = load_file(folder / TENSORS)
        if self.adapted and self.adapter is None:
            self.adapter = {name: x.clone() for name, x in adapters.weights(self.model).items()}
        for name, own in self.weights().items():
            own.copy_(tensors[name])
        for name, own in self.averages.items():
            own.copy_(tensors[AVERAGE + name])


def floating(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: x.detach() for name, x in named if x.is_floating_point()}


def began_as_nothing(model: nn.Module) -> bool:
    """Whether the model with its adapter is the model with it off: a LoRA whose second factors are all zero."""
    trained = adapters.weights(model)
    second = [x for name, x in trained.items() if "lora_B" in name or "lora_embedding_B" in name]
    return bool(second) and all("lora_" in name for name in trained) and not any(bool(x.any()) for x in second)
