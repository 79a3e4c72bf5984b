"""``policy_loss.rpg.record=PATH``: the batch of one optimiser step and the weights before it, for `rpg replay`.

The loss sees a mini-batch in micro-batches, and the engine's ``optimizer_step`` knows the gradient's norm: the first
leave their rows here, the second has them written. With an engine other than FSDP the file is written as soon as its
rows are complete, without weights and norm.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...recorded.layout import write
from ...recorded.losses import loss_as_data
from ...training.update import Means
from .losses import METRICS, Extra, denominator
from .settings import OPTIONS, Settings

logger = logging.getLogger("rpg.integrations.verl")
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
REWARDS = ("token_level_rewards", "token_level_scores", "rm_scores")
Rows = dict[str, list[Tensor]]  # a list a name: of each row a number or a vector


@dataclass
class MiniBatch:
    """What has come of an optimiser step so far."""

    rows: Rows = field(default_factory=dict)
    loss: float = 0.0
    means: Means = field(default_factory=Means)
    about: dict[str, Any] = field(default_factory=dict)
    path: str | None = None  # complete, and to be written at the engine's step


@dataclass
class Recording:
    """Of this process: a worker has one actor."""

    steps: int = 0  # optimiser steps whose rows are complete
    now: MiniBatch = field(default_factory=MiniBatch)
    hooked: bool = False


_recording = Recording()


def note(chosen: Settings, config: Any, data: Any, loss: Tensor, extra: Extra) -> None:
    """A micro-batch that the loss was called with."""
    total = data["global_batch_size"]
    if (data["dp_size"] or 1) != 1 or total is None:
        raise ValueError(f"{OPTIONS}.record needs one data-parallel rank: leave it out, or train on one GPU")
    if "rollout_is_weights" in data:
        raise ValueError(f"{OPTIONS}.record does not go with rollout_correction.rollout_is: take {OPTIONS}.mismatch")
    now = _recording.now
    for name, values in _rows(chosen, data, extra).items():
        now.rows.setdefault(name, []).extend(values)
    now.loss += float(loss.detach())
    metrics = {name.removeprefix(METRICS): torch.tensor(x) for name, x in extra.metrics.items()}
    now.means.add(metrics | {"tokens": torch.tensor(extra.tokens)})
    if len(now.rows["ids"]) < total:
        return
    _recording.steps += 1
    if _recording.steps != chosen.record_step:
        _recording.now = MiniBatch()
        return
    rule = chosen.loss(config.loss_scale_factor)
    now.path = chosen.record
    now.about = {
        "temperature": float(data["temperature"]),
        "step": _recording.steps,
        "trainer": "verl",
        "method": {"name": chosen.name, "loss": loss_as_data(rule)},
        "denominator": denominator(rule, dict(config.global_batch_info)),
        "reward_range": chosen.method.advantage.reward_range,
        "reward_of": None if _rewards(data) is not None else "advantages",
    }
    if not _recording.hooked:
        _write(now, {})


def install() -> None:
    """Around an FSDP engine's optimizer_step."""
    engines = sys.modules.get(ENGINE)
    if engines is None or _recording.hooked:
        return
    theirs, _recording.hooked = engines.FSDPEngine.optimizer_step, True

    @functools.wraps(theirs)
    def optimizer_step(self: Any) -> Any:
        now = _recording.now
        if now.path is None:
            return theirs(self)
        folder = Path(now.path).with_suffix("")
        _save_weights(self, folder)
        norm = theirs(self)
        now.about["model"] = folder.name
        now.about["dtype"] = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        _write(now, {"grad_norm": float(norm)})
        return norm

    engines.FSDPEngine.optimizer_step = optimizer_step


def _save_weights(engine: Any, folder: Path) -> None:
    """A Hugging Face folder, of whole weights."""
    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    state = {name: getattr(x, "full_tensor", lambda x=x: x)().cpu() for name, x in module.state_dict().items()}
    module.save_pretrained(folder, state_dict=state)
    if (tokenizer := getattr(engine.model_config, "tokenizer", None)) is not None:
        tokenizer.save_pretrained(folder)


def _write(now: MiniBatch, measured: dict[str, float]) -> None:
    _recording.now = MiniBatch()
    assert now.path is not None
    groups = {key: n for n, key in enumerate(dict.fromkeys(tuple(x.tolist()) for x in now.rows["prompt"]))}
    tensors = {name: _joined(values) for name, values in now.rows.items() if name != "prompt"}
    tensors["group"] = torch.tensor([groups[tuple(x.tolist())] for x in now.rows["prompt"]])
    measured = {"loss": now.loss, **measured, **now.means.result()}
    write(now.path, tensors, now.about | {"measured": measured})
    logger.info("rpg: optimiser step %d is recorded in %s", now.about["step"], now.path)


def _rows(chosen: Settings, data: Any, extra: Extra) -> Rows:
    prompts, responses = data["prompts"], data["responses"]
    if not (prompts.is_nested and responses.is_nested):
        raise ValueError(f"{OPTIONS}.record needs verl's engine workers, whose batches are without padding")
    mask, advantages = data["response_mask"].unbind(), data["advantages"].unbind()
    lengths = [len(x) for x in responses.unbind()]
    rewards = _rewards(data)
    first = [a[m.bool()][:1].sum() for a, m in zip(advantages, mask, strict=True)]  # 0 without tokens
    rows = {
        "prompt": list(prompts.unbind()),
        "ids": [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)],
        "prompt_length": [torch.tensor(len(x)) for x in prompts.unbind()],
        "response_length": [torch.tensor(n) for n in lengths],
        "mask": [x.bool() for x in mask],
        "old_logp": list(data["old_log_probs"].unbind()),
        "advantages": list(advantages) if chosen.method.loss.level == "token" else first,
        "reward": first if rewards is None else rewards,
    }
    for name, x_BT in (("ref_logp", extra.ref_logp_BT), ("rollout_logp", extra.rollout_logp_BT)):
        if x_BT is not None and (name != "ref_logp" or chosen.reads_reference):
            rows[name] = [x[:n] for x, n in zip(x_BT, lengths, strict=True)]
    return {name: [x.detach().cpu() for x in values] for name, values in rows.items()}


def _rewards(data: Any) -> list[Tensor] | None:
    """Of each response, where verl hands them on to the actor."""
    name = next((name for name in REWARDS if name in data), None)
    return None if name is None else [x.sum() for x in data[name].unbind()]


def _joined(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values[0].dim() == 0 else pad_sequence(values, batch_first=True)
