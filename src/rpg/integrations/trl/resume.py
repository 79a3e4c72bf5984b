"""What a checkpoint has beside TRL's own: TRL's count of micro-batches, and the responses still to be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

PROGRESS = "rpg_progress.json"


def cut(trainer: Any) -> dict[str, int]:
    """What a generation's responses are cut into parts by: with another of these, stored parts are of no use."""
    args = trainer.args
    return {
        "processes": trainer.accelerator.num_processes,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "steps_per_generation": args.steps_per_generation,
        "num_iterations": trainer.num_iterations,
    }


def cycle(trainer: Any) -> int:
    """Micro-batches from one generation to the next."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def save(trainer: Any, folder: Path) -> None:
    """Every process its own responses, the first one the rest."""
    if trainer._step % cycle(trainer):
        torch.save(trainer._buffered_inputs, folder / _rollouts(trainer))
    if trainer.args.should_save:
        state = {"micro_steps": trainer._step, "cut": cut(trainer)}
        (folder / PROGRESS).write_text(json.dumps(state), encoding="utf-8")


def load(trainer: Any, folder: Path) -> str | None:
    """A warning, where stored responses cannot be trained on: the next step then begins with a generation."""
    trainer._step, trainer._buffered_inputs = 0, None
    if not (folder / PROGRESS).exists() or trainer.args.ignore_data_skip:
        return None
    state, now = json.loads((folder / PROGRESS).read_text(encoding="utf-8")), cut(trainer)
    then, step = state["cut"], state["micro_steps"]
    if then == now and step % cycle(trainer) == 0:
        trainer._step = step
        return None
    if step % (then["steps_per_generation"] * then["num_iterations"]) == 0:
        return None
    if then != now:
        changed = ", ".join(f"{name} was {then[name]} and is {now[name]}" for name in now if then[name] != now[name])
        return f"{changed}: the responses in {folder} are not trained on, new ones are sampled"
    device, path = trainer.accelerator.device, folder / _rollouts(trainer)
    there = trainer.accelerator.gather(torch.tensor([int(path.exists())], device=device))
    if not bool(there.all()):
        return f"{folder} has not the responses of every process: new ones are sampled"
    where = "cpu" if device.type == "cpu" else device  # a process's number among those on CPUs is no device
    trainer._step, trainer._buffered_inputs = step, torch.load(path, map_location=where, weights_only=True)
    return None


def _rollouts(trainer: Any) -> str:
    return f"rpg_rollouts_{trainer.accelerator.process_index}.pt"
