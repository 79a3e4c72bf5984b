"""The KL's anchor renewed inside verl, every K updates or when the KL to it passes a target, as in ``rpg train``.

verl's reference stays what it was at the start, and verl calls nobody after an update. But actor and reference live in
one worker and are sharded alike. So the worker's ``update_actor`` is followed here by a copy from shard to shard, with
nothing gathered, and its checkpoints get a file more. None of this is installed unless the settings ask for it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.shards import local
from ...loss.anchor import Renewal
from .losses import METRICS, settings_of
from .metrics import KEPT, follow
from .settings import ACTOR, OPTIONS, Settings

logger = logging.getLogger("rpg.integrations.verl")
logger.setLevel(logging.INFO)

RULES = ("every", "kl")
UPDATED, KL = METRICS + "reference_updated", METRICS + "kl/ref"
SHARDED = ("fsdp", "fsdp2")


# ---- shards ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Every rank's own part of the weights, between two models sharded alike; devices and dtypes may differ."""
    new, held = shards(source), shards(target)
    if new.keys() != held.keys() or any(new[name].shape != held[name].shape for name in held):
        raise ValueError(
            "actor and reference are sharded differently, so that one cannot be copied into the other: give "
            "actor_rollout_ref.ref the strategy and the fsdp_config (fsdp_size, wrap_policy) of actor_rollout_ref.actor"
        )
    for name, shard in held.items():
        shard.copy_(new[name])


def shards(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of parameters and buffers, in the memory that the model computes with."""
    _reshard(model)
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: local(x.detach()) for name, x in named if x.is_floating_point()}


def _reshard(model: nn.Module) -> None:
    """After a forward pass the root may still hold whole weights: copies, which are thrown away."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and (handle := _ran(module)) is not None:
            handle.reshard(True)


def _ran(module: Any) -> Any:
    """What holds the weights of a module of FSDP1, once it has seen a forward pass."""
    handle = module._handle
    return handle if handle is not None and hasattr(handle.flat_param, "_local_shard") else None


# ---- verl's worker ---------------------------------------------------------------------------------------------------


def install(chosen: Settings) -> None:
    """Follow three methods of verl's worker, if ``chosen`` has a reference that is renewed."""
    if chosen.method.anchor in RULES:
        for name, after in AFTER.items():
            follow(name, "rpg_reference", functools.partial(_with_renewal, after))


def _with_renewal(after: Callable[..., Any], worker: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    renewal = renewal_of(worker)
    return output if renewal is None else after(worker, renewal, output, *args, **kwargs)


def renewal_of(worker: Any) -> Renewal | None:
    """The worker's own, None where its settings ask for none. A worker that could not obey is refused."""
    if "_rpg_renewal" not in vars(worker):
        chosen = settings_of(worker.config.actor)
        wanted = worker._is_actor and chosen.method.anchor in RULES
        if wanted:
            _check_worker(worker)
        worker._rpg_renewal = Renewal(chosen.method.anchor, chosen.reference) if wanted else None
    renewal: Renewal | None = worker._rpg_renewal
    return renewal


def _check_worker(worker: Any) -> None:
    check(worker.config)
    if worker.ref is None:
        raise ValueError(
            f"{OPTIONS}.reference.update needs actor and reference in one worker: "
            "actor_rollout_ref.hybrid_engine=True, or reference.update=frozen"
        )


def check(actor_rollout_ref: Any) -> None:
    """verl's settings of that name, before any model is loaded: a reference that cannot be renewed is refused."""
    model, strategy = actor_rollout_ref.model, actor_rollout_ref.actor.strategy
    ranks = (model.get("lora_rank", 0), (model.get("lora", None) or {}).get("rank", 0))
    if any(rank > 0 for rank in ranks) or model.get("lora_adapter_path", None) is not None:
        raise ValueError(
            f"{OPTIONS}.reference.update: with LoRA verl's reference is the model without its adapter, which cannot be "
            "renewed: set it to frozen, or train all weights (actor_rollout_ref.model.lora_rank=0)"
        )
    if strategy not in SHARDED:
        raise ValueError(
            f"{OPTIONS}.reference.update is for {ACTOR}.strategy={' or '.join(SHARDED)}; got {strategy}: "
            "set reference.update=frozen"
        )


def _after_update(worker: Any, renewal: Renewal, output: Any, *_: Any, **__: Any) -> Any:
    kl, mini_batches = _agreed(_measured(output)) or (None, 1)
    by_iterations = settings_of(worker.config.actor).reference.count == "iterations"
    due = renewal.due(None, kl, 1 if by_iterations else mini_batches)  # calls of update_actor are iterations
    if due:
        renewal.renewed()
        copy_shards(worker.actor.engine.module, worker.ref.engine.module)
        if worker.rank == 0:
            logger.info("rpg: reference renewed after update %d (renewal %d)", renewal.updates, renewal.renewals)
    if output is not None:
        output["metrics"][UPDATED] = [float(due)]
    return output


Measured = tuple[float | None, int]


def _measured(output: Any) -> Measured | None:
    """The update's mean KL per token, and its optimiser steps; ranks that hold no metrics have neither."""
    if output is None:
        return None
    kls, kept = output["metrics"].get(KL), output["metrics"].get(KEPT)
    return None if kls is None else sum(kls) / len(kls), len(kept) if isinstance(kept, list) else 1


def _agreed(measured: Measured | None) -> Measured | None:
    """The same on every rank: those that have numbers have the same."""
    gathered: list[Measured | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, measured)
    return next((x for x in gathered if x is not None), None)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _after_save(worker: Any, renewal: Renewal, output: Any, local_path: str, *_: Any, **__: Any) -> Any:
    """A reference that was never renewed is model.path: only the count is written."""
    weights = shards(worker.ref.engine.module) if renewal.renewals else {}
    saved = {"state": renewal.state(), "weights": {name: x.cpu() for name, x in weights.items()}}
    path = _path(local_path)
    os.makedirs(local_path, exist_ok=True)
    torch.save(saved, path + ".part")
    os.replace(path + ".part", path)
    return output


def _after_load(worker: Any, renewal: Renewal, output: Any, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
    if local_path is None:
        return output
    from verl.utils.fs import copy_to_local

    path = _path(local_path)
    there = copy_to_local(path) if "://" in path else path
    if not os.path.exists(there):
        step = re.search(r"global_step_(\d+)", local_path)
        renewal.updates = int(step[1]) if step else 0
        logger.warning("rpg: %s has no reference: it is model.path again until it is renewed", local_path)
        return output
    saved = torch.load(there, weights_only=True, map_location="cpu")
    renewal.load(saved["state"])
    if saved["weights"]:
        _put(saved["weights"], worker.ref.engine.module)
    if worker.rank == 0:
        logger.info("rpg: reference restored: renewal %d, after update %d", renewal.renewals, renewal.updates)
    return output


@torch.no_grad()
def _put(weights: dict[str, Tensor], model: nn.Module) -> None:
    for name, shard in shards(model).items():
        shard.copy_(weights[name])


def _path(folder: str) -> str:
    """Beside verl's model_world_size_1_rank_0.pt."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return os.path.join(folder, f"rpg_reference_world_size_{ranks}_rank_{rank}.pt")


AFTER: dict[str, Callable[..., Any]] = {
    "update_actor": _after_update,
    "save_checkpoint": _after_save,
    "load_checkpoint": _after_load,
}
