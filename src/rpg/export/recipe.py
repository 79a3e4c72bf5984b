"""What an export to either engine reads from a recipe, and what neither engine can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..loss.methods import Method
from ..run.config import Config
from ..run.folder import AUTO
from .start import Start

GPU_TOKENS = 32768  # in one pass of training, where the recipe does not say


def refuse(config: Config, engine: str, reasons: dict[str, Any]) -> None:
    """What has no counterpart and would change the result. ``reasons``: the engine's own, false where all is well."""
    common: dict[str, Any] = {
        "optim.name=schedule-free": config.optim.name == "schedule-free" and "give --optim.name adamw",
        "rollout.end_tokens": config.rollout.end_tokens and "put them into the model's generation_config.json",
    }
    common["task.aside"] = config.task.aside and "it is for choosing settings; leave it out"
    taught = config.reference.model and "its reference is a copy of the trained model; use rpg train"
    for name, why in (common | reasons | {"reference.model": taught}).items():
        if why:
            raise ValueError(f"{name} has no counterpart in {engine}: {why}")


def loss_options(config: Config, method: Method) -> dict[str, Any]:
    """The preset's options, where rewards lie among them if the run maps them: the engines do not know it."""
    removed = {name: None for name in ("gate", "mismatch") if config.loss.get(name) == "none"}
    options = {**config.loss, **removed}
    if method.advantage.reward_range is None:
        return options
    return with_advantage(options, reward_range=list(method.advantage.reward_range))


def with_advantage(options: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Options of a preset with some of its advantage's set, whether they name a kind, options, or none."""
    given = options.get("advantage", {})
    given = {"kind": given} if isinstance(given, str) else dict(given)
    return {**options, "advantage": given | changes}


def check_reference(start: Start, config: Config, anchor: str, engine: str) -> None:
    """A run that goes on needs its reference too; other engines take the model they are given for it."""
    if start.step == 0 or anchor == "old" or (anchor == "frozen" and start.adapter):
        return
    iterations = config.reference.count == "iterations"
    if anchor == "every" and iterations and start.step % config.reference.every == 0:
        return  # renewed at the checkpoint: it is the checkpoint
    raise ValueError(
        f"reference.update={anchor}: {engine} would take the checkpoint of step {start.step} for the reference, which "
        "it is not; give --reference.update old or every (from here on), or export without --from"
    )


def tensor_parallel(config: Config) -> int:
    """GPUs of each vLLM."""
    size = config.rollout.vllm.get("tensor_parallel_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"rollout.vllm.tensor_parallel_size must be a whole number, at least 1; got {size!r}")
    return size


def steps_a_batch(config: Config) -> int:
    """Optimiser steps."""
    return config.optim.minibatches * config.optim.epochs


def trackers(config: Config) -> tuple[list[str], str, str]:
    """Where metrics go, the project there, the run's name in it."""
    log = config.log
    names = [name for name in ("tensorboard", "wandb", "trackio") if getattr(log, name)]
    return names, log.wandb or log.trackio or "rpg", _named(config)


def _named(config: Config) -> str:
    return config.algorithm if config.output == AUTO else config.output.strip("/").replace("/", "-")
