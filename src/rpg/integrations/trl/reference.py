"""The policy that anchors the KL term inside TRL: a copy of what is trained, renewed by a rule, in every checkpoint.

The rules are those of ``rpg train`` (loss/anchor.py), counted in optimiser steps or in iterations, which are TRL's
generations. TRL computes the reference's log-probabilities when it generates: a copy that is due is therefore renewed
before the next generation that begins an optimiser step, so that all of the responses of an optimiser step have the
same reference.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...loss.anchor import Renewal
from ...models import adapters
from ...run.config import ReferenceConfig
from ...training.optim import HALF
from ...training.reference import AVERAGE, floating

TENSORS, STATE = "rpg_reference.safetensors", "rpg_reference.json"


class TRLReference:
    """``copy`` is the model that TRL asks for the reference's log-probabilities.

    Where an adapter is trained there is none: it asks ``adapted_model``, the trained model with the weights in
    ``adapter``, or with its adapter off.
    """

    def __init__(self, model: nn.Module, rule: str, config: ReferenceConfig, adapted: bool):
        self.rule, self.config, self.model, self.adapted = rule, config, model, adapted
        self.renewal = Renewal(rule, config)
        self.due = False  # to be renewed before the next generation that begins an optimiser step
        self.measured: list[float] = []  # KLs of the optimiser steps of this iteration, where iterations count
        self.copy: nn.Module | None = None
        self.adapter: dict[str, Tensor] | None = None
        if not adapted:
            self.copy = copy.deepcopy(model).requires_grad_(False).eval()
            vars(self.copy).pop("forward", None)  # TRL's fused head, which is bound to the original
        elif rule != "frozen" or not _is_zero(model):
            self.adapter = _adapter_of(model)
        self.averages = {name: x.float() for name, x in self.weights().items() if rule == "ema" and x.dtype in HALF}

    def adapted_model(self, **inputs: Any) -> Any:
        """The trained model with the reference's adapter in the place of its own, or with none; without dropout."""
        model: Any = self.model
        other = model.disable_adapter() if self.adapter is None else adapters.swapped_in(model, self.adapter)
        with other, _without_dropout(model):
            return model(**inputs)

    @torch.no_grad()
    def after_step(self, step: int, kl: float | None, generates_next: bool) -> bool:
        """After an optimiser step. ``kl``: per token, current policy from reference, over all processes."""
        if self.rule == "frozen":
            return False
        if self.rule == "ema":
            self._blend(1 - self.config.decay)
            return True
        self.due |= self._due(step, kl, generates_next)
        if not (self.due and generates_next):
            return False
        self._blend(1.0)
        self.renewal.renewed()
        self.due = False
        return True

    def _due(self, step: int, kl: float | None, generates_next: bool) -> bool:
        if self.config.count == "optimizer-steps":
            return self.renewal.due(step, kl)
        if kl is not None and math.isfinite(kl):
            self.measured.append(kl)
        if not generates_next:
            return False
        kls, self.measured = self.measured, []
        return self.renewal.due(None, sum(kls) / len(kls) if kls else None)

    def _blend(self, share: float) -> None:
        new = adapters.weights(self.model) if self.adapted else floating(self.model)
        for name, held in self.weights().items():
            if share == 1:
                held.copy_(new[name])
            elif name in self.averages:
                self.averages[name] = self.averages[name].to(held.device)
                held.copy_(self.averages[name].lerp_(new[name].float(), share))
            else:
                held.lerp_(new[name].to(held.dtype), share)

    def weights(self) -> dict[str, Tensor]:
        """What is held, by the names of the model's."""
        return floating(self.copy) if self.copy is not None else self.adapter or {}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return self.weights() | {AVERAGE + name: x for name, x in self.averages.items()}

    def save(self, folder: Path) -> None:
        if tensors := self._tensors():
            save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS)
        state = {"rule": self.rule, **self.renewal.state(), "due": self.due, "held": bool(tensors)}
        state |= {"count": self.config.count, "measured": self.measured}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not (folder / STATE).exists():
            raise ValueError(
                f"{folder} has no {STATE}: it is not a whole checkpoint of an RPGTrainer with a reference. To begin "
                "from its weights, give it as the model instead of resuming"
            )
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["rule"] != self.rule:
            raise ValueError(
                f"{folder} was trained with reference_update={state['rule']}, this run has {self.rule}: set "
                f"reference_update={state['rule']} to resume; to change it, give {folder} as the model of a new run"
            )
        if (count := state.get("count", "optimizer-steps")) != self.config.count:
            raise ValueError(
                f"{folder} was trained with reference_count={count}, this run has {self.config.count}: set "
                f"reference_count={count} to resume"
            )
        self.renewal.load(state)
        self.due, self.measured = state["due"], state.get("measured", [])
        if not state["held"]:
            self.adapter = None  # the adapter began as nothing, in the process that began the run
            return
        tensors = load_file(folder / TENSORS)
        if self.adapted and self.adapter is None:
            self.adapter = _adapter_of(self.model)
        for name, held in self._tensors().items():
            held.copy_(tensors[name])


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in adapters.weights(model).items()}


def _is_zero(model: nn.Module) -> bool:
    """Whether the model with its adapter is the model with it off: a LoRA whose second factors are all zero."""
    trained = adapters.weights(model)
    second = [x for name, x in trained.items() if "lora_B" in name or "lora_embedding_B" in name]
    return bool(second) and all("lora_" in name for name in trained) and not any(bool(x.any()) for x in second)
