"""What a checkpoint holds beside the model, and the way back.

Whoever wrote one, and with however many ranks: it has the same files, and any number of ranks can go on from it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import secrets, trust
from ..distributed.context import RunContext
from ..distributed.ranks import World
from ..distributed.shards import cut, gathered, local
from ..models import adapters, four_bits
from ..models.policy import Policy
from ..publish.card import CARD, Base, run_card
from ..run.checkpoint import Checkpoint, folders, load
from ..run.config import Config
from ..run.folder import (
    AUTO,
    RUNS,
    SETTINGS,
    RunFolder,
    check_free,
    check_place,
    link_latest,
    new_id,
    read_rows,
    settings_to_resume,
)
from ..run.logs import RunLogs, check_trackers, write_whole
from ..run.settings import flat, to_yaml
from ..run.view import View
from .health.vitals import Probe
from .oom_retry import OomRetry
from .optim import MixedOptimizer, averaged_weights, load_optimizer, optimizer_tensors
from .progress import Progress, over
from .reference import Reference
from .samples.source import SampleSource
from .setup import algorithm_of

TOLD = 3  # settings that differ are named
# what may differ when a run is resumed
FREE = (
    "steps",
    "minutes",
    "tokens",
    "output",
    "insist",
    "device",
    "log.",
    "eval.",
    "checkpoint.",
    "optim.lr",
    "optim.schedule",
    "optim.max_grad_norm",
    "optim.micro_tokens",
    "optim.recompute",
    "optim.offload",
    "rollout.slots",
)
FELT = ("optim.", "rollout.", "eval.")  # of these, what makes other numbers: a change is said


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
    source: SampleSource
    probe: Probe
    data: dict[str, list[Any]]  # the fingerprint of the task
    base: Base  # what the card says of the model that the run began from

    def write_model(self, policy: Policy, folder: Path) -> None:
        """The weights to ship, averages where there are any, and the card that says what they are."""
        with contextlib.nullcontext() if self.world.sharded else averaged_weights(self.optimizer):
            policy.save(folder)
        adapter = adapters.method_of(policy.model) if policy.adapted else None
        done, chosen = self.progress, algorithm_of(self.config)
        about = self.config, chosen, self.base, self.data, done.step, done.tokens_total, done.evals, adapter
        card = run_card(*about, four_bits=bool(four_bits.layers(policy.model)))
        (folder / CARD).write_text(card, encoding="utf-8")

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Of sharded ones whole copies, on the first rank. All ranks have to call it."""
        named = self.learner.parameters()
        tensors: dict[str, Mapping[str, Tensor]] = {"optimizer": optimizer_tensors(self.optimizer, named)}
        if self.optimizer.needs_parameters:  # model/ has the average; this is what to go on from
            tensors["parameters"] = {name: p.detach() for name, p in named}
        if weights := self.reference.tensors():
            tensors["reference"] = weights
        if samples := self.source.state()[1]:
            tensors["samples"] = samples
        if probe := self.probe.tensors():
            tensors["probe"] = probe
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
            "data": self.data,
            "probe": self.probe.batch is not None,
            **({"samples": samples} if (samples := self.source.state()[0]) else {}),
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
        if samples := state.get("samples"):
            self.source.load(samples, checkpoint.tensors("samples") if samples["tensors"] else {})
        if state.get("probe"):
            self.probe.load(checkpoint.tensors("probe"), self.learner.device)
        sizes, now = ("optim.micro_tokens", "optim.recompute", "optim.offload"), _as_json(flat(self.config))
        if all(state["config"].get(key) == now.get(key) for key in sizes):  # else as it is set now
            self.oom_retry.load(state["room"])


def find_start(config: Config, folder: RunFolder, resume: bool, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to go on from. A folder that cannot be trained in is refused."""
    path = folder.path
    check_place(RUNS if config.output == AUTO else path, warn)
    if not resume:
        if config.output != AUTO:
            check_free(path)
        return None
    settings_to_resume(path)
    folder.lock()
    folder.run = folder.marked()
    newest = load(path / "checkpoints", warn, folder.run)
    if newest is None and config.checkpoint.keep == 0:
        raise ValueError(f"nothing to resume in {path}: with checkpoint.keep 0 no checkpoint is written")
    if newest is None and folders(path / "checkpoints"):
        raise ValueError(f"no checkpoint in {path} is whole: nothing to resume from (a new run needs a new --output)")
    return newest


def open_logs(config: Config, folder: RunFolder, view: View, resume: bool, start: Checkpoint | None) -> RunLogs:
    """The run's folder and what is written into it: no mistake up to here."""

    def warn(text: str) -> None:
        view.message(text, "warning")

    check_trackers(config.log)
    if not resume:
        folder.begin(config.algorithm if config.output == AUTO else None)
    elif not folder.run:
        folder.mark((start.run if start is not None else "") or new_id())
    path, every = folder.path, config.checkpoint.every
    link_latest(path)
    done = None if start is None else nothing_left(config, start)
    if done is None:
        write_config(config, path)
    else:  # what was trained with stays
        trust.remember(path, config)
    at = None if not resume else -1 if start is None else start.step
    logs = RunLogs(path, config.log, path.name, flat(config), resume=at, most=every, warn=warn)
    if resume:
        say_what_is_lost(path, start, logs, view)
        for text in [done] if done is not None else [] if start is None else what_changes(config, start):
            view.message(text)
        view.history(read_rows(path / "metrics.jsonl", []))
    return logs


def write_config(config: Config, folder: Path) -> None:
    """The run's settings, in its folder; the code that they name is this user's."""
    write_whole(folder / SETTINGS, to_yaml(replace(config, output=str(folder))))
    trust.remember(folder, config)


def nothing_left(config: Config, start: Checkpoint) -> str | None:
    """None: there are steps to do."""
    if start.step >= config.steps:
        return f"nothing to do: {start.step} of {config.steps} steps are done (--steps N trains on)"
    if (done := over(config, Progress.load(start.state))) is not None:
        return f"nothing to do: {done[1]} (--{done[0]} N trains on)"
    return None


def what_changes(config: Config, start: Checkpoint) -> list[str]:
    """Settings that the steps to come have, and those before had not."""
    then, now = _then_and_now(config, start)
    keys = (key for key in now if key.startswith(FREE) and key.startswith(FELT) and then.get(key) != now[key])
    return [f"{key}: {_shown(then.get(key))} → {_shown(now[key])} from step {start.step + 1}" for key in keys]


def _then_and_now(config: Config, start: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """A setting that is newer than the checkpoint had its default."""
    return _as_json(flat(Config())) | start.state["config"], _as_json(flat(config))


def check_settings(config: Config, checkpoint: Checkpoint, context: RunContext) -> None:
    """What a run is made of cannot change on the way."""
    then, now = _then_and_now(config, checkpoint)
    keys = {key for key in (*then, *now) if not key.startswith(FREE) and not secrets.named(key)}
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


def check_data(config: Config, checkpoint: Checkpoint, data: Mapping[str, list[Any]]) -> None:
    """The problems are those that the run began with."""
    for name, then in checkpoint.state.get("data", data).items():
        now = data.get(name)
        if now != then:
            which = f"test set {name!r}" if name else "problems to train on"
            told = f"{then[0]} then, {now[0]} now" if now and now[0] != then[0] else f"{then[0]}, and others now"
            raise ValueError(
                f"cannot resume {Path(config.output)}: the data of {config.task.name} has changed since: {which} "
                f"({told}). Put it back as it was, or begin a new run from the weights: "
                f"--model {checkpoint.model_folder}"
            )


def say_what_is_lost(folder: Path, start: Checkpoint | None, logs: RunLogs, view: View) -> None:
    """Of a run that is resumed: steps that are done again, and rows that its files had and have no more."""
    if start is None:
        text, step = f"{folder} has no checkpoint: starting from the beginning", 0
    else:
        text, step = f"resumed from step {start.step} ({start.folder})", start.step
    if logs.logged > step:
        again = f"step {step + 1} is" if logs.logged == step + 1 else f"steps {step + 1} to {logs.logged} are"
        text += f"; {again} done again"
    if logs.aside:
        text += f", as there is no later checkpoint; what they had written is kept in {' and '.join(logs.aside)}"
    view.message(text, "warning" if start is None or logs.aside else "info")
    before = {} if start is None else start.state.get("rows", {})
    for name, rows in logs.rows().items():
        if rows < before.get(name, 0):
            text = f"{name} has {rows} of the {before[name]} rows that it had at step {step}: the others are lost"
            view.message(text, "warning")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_json(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))
