"""What a checkpoint holds beside the model, and the way back.

Whoever wrote one, and with however many ranks: it has the same files, and any number of ranks can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.context import RunContext
from ..distributed.ranks import World
from ..distributed.shards import cut, gathered, local
from ..models.policy import Policy
from ..run.checkpoint import Checkpoint
from ..run.config import Config
from ..run.settings import flat
from .oom_retry import OomRetry
from .optim import MixedOptimizer, load_optimizer, optimizer_tensors
from .progress import Progress
from .reference import Reference

TOLD = 3  # settings that differ are named
# what may differ when a run is resumed
FREE = (
    "steps",
    "minutes",
    "output",
    "device",
    "log.",
    "eval.",
    "checkpoint.",
    "optim.lr",
    "optim.schedule",
    "optim.max_grad_norm",
    "optim.micro_tokens",
    "optim.recompute",
    "rollout.slots",
)


@dataclass(frozen=True)
class RunState:
    """All that training changes but the model itself: ``tensors`` are ``trainer/*.safetensors`` of a checkpoint,
    ``values`` are its ``trainer/state.json``."""

    config: Config
    world: World
    dtype: torch.dtype
    learner: Policy
    optimizer: MixedOptimizer
    reference: Reference
    oom_retry: OomRetry
    progress: Progress

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Of sharded ones whole copies, on the first rank. All ranks have to call it."""
        named = self.learner.parameters()
        tensors: dict[str, Mapping[str, Tensor]] = {"optimizer": optimizer_tensors(self.optimizer, named)}
        if self.optimizer.needs_parameters:  # model/ has the average; this is what to go on from
            tensors["parameters"] = {name: p.detach() for name, p in named}
        if weights := self.reference.tensors():
            tensors["reference"] = weights
        if self.world.sharded:
            return {name: gathered(group, keep=self.world.first) for name, group in tensors.items()}
        return tensors

    def values(self) -> dict[str, Any]:
        return {
            **self.progress.state(),
            "reference": self.reference.state(),
            "room": self.oom_retry.state(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "ranks": self.world.size,
            "config": flat(self.config),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Into a run whose model and progress were loaded already. Every rank takes its share."""
        state, named = checkpoint.state, self.learner.parameters()
        if self.optimizer.needs_parameters:
            with torch.no_grad():
                stored = checkpoint.tensors("parameters")
                for name, p in named:
                    local(p).copy_(cut(stored[name], p))
        load_optimizer(self.optimizer, named, checkpoint.tensors("optimizer"))
        tensors = checkpoint.tensors("reference") if state["reference"]["held"] else {}
        self.reference.load(state["reference"], tensors)
        sizes, now = ("optim.micro_tokens", "optim.recompute"), _as_json(flat(self.config))
        if all(state["config"].get(key) == now.get(key) for key in sizes):  # else as it is set now
            self.oom_retry.load(state["room"])


def check_settings(config: Config, checkpoint: Checkpoint, context: RunContext) -> None:
    """What a run is made of cannot change on the way."""
    defaults, now = _as_json(flat(Config())), _as_json(flat(config))
    then = defaults | checkpoint.state["config"]  # a setting that is newer than the checkpoint had its default
    keys = {key for key in (*then, *now) if not key.startswith(FREE)}
    if now["reference.model"] == checkpoint.state.get("reference", {}).get("teacher"):  # in place of its run
        keys.discard("reference.model")
    if changed := sorted(key for key in keys if then.get(key) != now.get(key)):
        told = [f"{key} was {_shown(then.get(key))} and is now {_shown(now.get(key))}" for key in changed[:TOLD]]
        more = f", and {len(changed) - TOLD} more differ" if len(changed) > TOLD else ""
        them = "it" if len(changed) == 1 else "them"
        raise ValueError(
            f"cannot resume {Path(config.output)}: {', '.join(told)}{more}: leave {them}, or start another --output"
        )
    for what, before, number in (
        ("threads", checkpoint.state["threads"], torch.get_num_threads()),
        ("processes", checkpoint.state.get("ranks", 1), context.world.size),
    ):
        if before != number:
            text = f"the checkpoint was made with {before} {what}, this is {number}"
            context.warn(f"{text}: results will differ in the last bits")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_json(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))
