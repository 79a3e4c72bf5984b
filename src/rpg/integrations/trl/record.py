"""``record=PATH``: the batch of one optimiser step and the weights before it, as `rpg replay` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...loss.policy_loss import PolicyLoss
from ...recorded.layout import write
from ...recorded.losses import loss_as_data
from .config import RPGConfig


class RecordedStep:
    """Micro-batches of the step ``args.record_step``, as the loss is given them."""

    def __init__(self, args: RPGConfig):
        self.path = None if args.record is None else Path(args.record)
        self.step = args.record_step
        self.parts: list[dict[str, Tensor | None]] = []
        self.loss, self.rule = 0.0, PolicyLoss()

    def due(self, steps_done: int) -> bool:
        return self.path is not None and steps_done + 1 == self.step

    def add(self, inputs: dict[str, Any], rule: PolicyLoss, loss: Tensor, **logps: Tensor | None) -> None:
        """``logps``: old_logp, ref_logp, rollout_logp, mask, as the loss has them."""
        if "pixel_values" in inputs:
            raise ValueError("record: a batch with images cannot be replayed; leave record out")
        self.rule = rule
        self.loss += float(loss.detach())
        part = {
            "reward": inputs["rpg_reward"].nan_to_num(0.0),
            "group": inputs["rpg_group"],
            "advantages": inputs["advantages"],
            **_sequences(inputs),
            **logps,
        }
        self.parts.append({name: None if x is None else x.detach().cpu() for name, x in part.items()})

    def write(self, trainer: Any, denominator: float, measured: dict[str, float]) -> None:
        """Before the optimiser step. The batch names the weights, which lie in a folder beside it."""
        assert self.path is not None
        folder = self.path.with_suffix("") if self.path.suffix else self.path.with_name(f"{self.path.name}-model")
        trainer.save_model(str(folder))
        about = {
            "temperature": float(trainer.temperature),
            "model": folder.name,
            "dtype": str(trainer.model.dtype).removeprefix("torch."),
            "step": self.step,
            "trainer": "TRL",
            "method": {"name": trainer.method.name, "loss": loss_as_data(self.rule)},
            "denominator": denominator,
            "reward_range": trainer.method.advantage.reward_range,
            "measured": {"loss": self.loss, **measured},
        }
        write(self.path, {name: _joined([part[name] for part in self.parts]) for name in self.parts[0]}, about)
        self.parts = []


def _sequences(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """TRL pads prompts on the left: here a response follows its prompt."""
    prompts = [row[keep.bool()] for row, keep in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
    completions = inputs["completion_ids"]
    length_B = inputs["completion_mask"].sum(-1)
    rows = [torch.cat([prompt, completion]) for prompt, completion in zip(prompts, completions, strict=True)]
    return {
        "ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
        "response_length": length_B,
    }


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """Rows of all micro-batches, as wide as the widest."""
    some = [x for x in parts if x is not None]
    if len(some) < len(parts):
        return None
    width = max(x.shape[-1] for x in some)
    return torch.cat([x if x.dim() == 1 else pad(x, (0, width - x.shape[-1])) for x in some])
