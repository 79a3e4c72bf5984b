"""What of a run is in its checkpoints, beside the model; and the way back. Whoever wrote one, and with however many
ranks: it has the same files, and any number of ranks can go on from it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.shards import cut, gathered, local
from ..run import checkpoint
from ..run.logs import RunLogs, write_summary
from ..run.settings import flat
from .collect import Cursor
from .optim import averaged_weights, load_optimizer, optimizer_tensors
from .summary import best_of, summarise

if TYPE_CHECKING:
    from .loop import Trainer

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


def save(run: Trainer, logs: RunLogs) -> None:
    """Written by the first rank, to which the others send what they have."""
    tensors: dict[str, Mapping[str, Tensor]] = {"optimizer": optimizer_tensors(run.optimizer, run.learner.parameters())}
    if _averaging(run):  # model/ has the average; this is what to go on from
        tensors["parameters"] = {name: p.detach() for name, p in run.learner.parameters()}
    if held := run.reference.tensors():
        tensors["reference"] = held
    if run.world.sharded:
        tensors = {name: gathered(group, keep=run.world.first) for name, group in tensors.items()}
    with run.averaged() if run.world.sharded else contextlib.nullcontext():
        run.world.by_first(lambda: _write(run, logs, tensors))


def _write(run: Trainer, logs: RunLogs, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    def write_model(folder: Path) -> None:
        with contextlib.nullcontext() if run.world.sharded else averaged_weights(run.optimizer):
            run.policy.save(folder)

    state = {
        "step": run.done,
        "tokens_total": run.tokens_total,
        "starved": run.starved,
        "bad_steps": run.updater.bad_steps,
        "cursor": asdict(run.collector.cursor),
        "reference": run.reference.state(),
        "room": run.oom_retry.state(),
        "mismatch": run.old_logp.measured,
        "dtype": str(run.dtype).removeprefix("torch."),
        "evals": run.evals,
        "spent": run.spent,
        "started": run.started,
        "seconds": run.seconds(),
        "threads": torch.get_num_threads(),
        "ranks": run.world.size,
        "config": flat(run.config),
    }
    logs.sync()
    root = run.folder / "checkpoints"
    checkpoint.save(root, run.done, write_model, tensors, state)
    keep = run.config.checkpoint
    checkpoint.prune(root, keep.keep, _best_step(run) if keep.best else None, newest=run.done)
    write_summary(run.folder, summarise(run, "running", ""))


def _averaging(run: Trainer) -> bool:
    """Whether what is trained is neither in model/ nor, as masters are, in the optimiser's state."""
    return run.schedule_free and not run.optimizer.all_rounded


def _best_step(run: Trainer) -> int | None:
    saved = set(checkpoint.folders(run.folder / "checkpoints"))
    scored = [e for e in run.evals if e["step"] in saved]
    return int(best_of(scored)["step"]) if scored else None


def check_settings(run: Trainer, found: checkpoint.Checkpoint) -> None:
    """What a run is made of cannot change on the way."""
    then, now = found.state["config"], json_like(flat(run.config))
    keys = {key for key in (*then, *now) if not key.startswith(FREE)}
    if changed := {key for key in keys if then.get(key) != now.get(key)}:
        names = ", ".join(sorted(changed))
        raise ValueError(f"cannot resume {run.folder} with other settings than its checkpoint's: {names}")
    for what, before, number in (
        ("threads", found.state["threads"], torch.get_num_threads()),
        ("processes", found.state.get("ranks", 1), run.world.size),
    ):
        if before != number:
            text = f"the checkpoint was made with {before} {what}, this is {number}"
            run.view.message(f"{text}: results will differ in the last bits", "warning")


def load(run: Trainer, found: checkpoint.Checkpoint) -> None:
    """The rest of a run whose model was loaded already. Every rank takes its share."""
    state = found.state
    if _averaging(run):
        with torch.no_grad():
            stored = found.tensors("parameters")
            for name, p in run.learner.parameters():
                local(p).copy_(cut(stored[name], p))
    load_optimizer(run.optimizer, run.learner.parameters(), found.tensors("optimizer"))
    tensors = found.tensors("reference") if state["reference"]["held"] else {}
    run.reference.load(state["reference"], tensors)
    sizes, now = ("optim.micro_tokens", "optim.recompute"), json_like(flat(run.config))
    if all(state["config"].get(key) == now.get(key) for key in sizes):  # else as it is set now
        run.oom_retry.load(state["room"])
    run.old_logp.measured = state["mismatch"]
    run.collector.cursor = Cursor(**state["cursor"])
    run.updater.bad_steps, run.starved = state["bad_steps"], state["starved"]
    run.saved = found.step
    run.spent = state["spent"]
    run.done, run.tokens_total, run.evals = state["step"], state["tokens_total"], state["evals"]
    run.started, run.seconds_before = state["started"], state["seconds"]


def json_like(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))
