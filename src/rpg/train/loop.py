"""``rpg train``: prompts -> rollouts -> verified rewards -> groups -> advantages -> minibatches -> loss -> step.

Read ``Trainer.step`` first. Everything random is a function of the seed and the step (randomness.py), and everything
else that a step depends on is in the checkpoint: a run that was killed and resumed ends in the same bits.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..policy import Policy
from ..rollout import NotFinite
from ..tasks import RewardError, Task, load_task
from . import checkpoint
from .batch import make_batch, with_advantages
from .config import Config
from .engines import make_engine
from .evaluate import evaluate
from .experience import Collector, Cursor, Experience, PromptTooLong
from .folder import locked, read_rows
from .logs import RunLogs, write_summary, write_whole
from .memory import make_room, pick_slots
from .optim import ScheduleFreeAdamW, averaged_weights, load_optimizer, make_optimizer, optimizer_tensors
from .parts import (
    check_fit,
    check_rewards,
    check_train,
    held_out,
    make_scorer,
    pick_device,
    pick_dtype,
    resolve,
    unasked,
    warnings_about,
)
from .reference import Reference, batch_logp, rule_of
from .settings import flat, to_yaml
from .stopping import Stop
from .summary import best_of, memory_metrics, summarise
from .update import OldLogp, Updater, prepared
from .view import View, make_view

MAX_STARVED = 5  # steps in a row without a group to learn from, after which the run ends
EXPECTED = (
    checkpoint.CheckpointError,
    RewardError,
    PromptTooLong,
    NotFinite,
    OSError,
    SafetensorError,
    torch.OutOfMemoryError,
)  # one line each
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


class Failed(Exception):
    """The run cannot go on; its text is one line. ``setup``: nothing was done yet, what was asked for is impossible."""

    def __init__(self, message: str, setup: bool = False):
        super().__init__(" ".join(message.split()))
        self.setup = setup


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Run to the end, or until stopped. Returns the summary; what cannot go on raises Failed, in one line."""
    folder = Path(config.output)
    title = f"{config.algorithm} · {config.model} · {config.task.name} · seed {config.seed}"
    with make_view(config.log.view, title=title, steps=config.steps) as view, contextlib.ExitStack() as stack:
        try:
            trainer, logs = _set_up(config, folder, view, resume, stack)
        except (ValueError, OSError, checkpoint.CheckpointError) as error:
            raise Failed(str(error), setup=True) from error
        return trainer.run(logs)


def _set_up(
    config: Config, folder: Path, view: View, resume: bool, stack: contextlib.ExitStack
) -> tuple[Trainer, RunLogs]:
    def warn(text: str) -> None:
        view.message(text, "warning")

    found = None
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: {folder} is a file; give a folder with --output")
    if resume:
        if not (folder / "config.yaml").exists():
            raise ValueError(f"nothing to resume in {folder}: there is no config.yaml")
        stack.enter_context(locked(folder))
        found = checkpoint.load(folder / "checkpoints", warn)
        if found is None and config.checkpoint.keep == 0:
            raise ValueError(f"nothing to resume in {folder}: with checkpoint.keep 0 no checkpoint is written")
        if found is None and checkpoint.found(folder / "checkpoints"):
            raise ValueError(
                f"no checkpoint in {folder} is whole: nothing to resume from (a new run needs a new --output)"
            )
    elif (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
        raise ValueError(f"{folder} holds a run already: give --resume to go on with it, or another --output")
    trainer = stack.enter_context(Trainer(config, folder, view, found))
    if not resume:  # no mistake up to here: now there may be a folder
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder))
    elif found is not None:
        view.message(f"resumed from step {found.step} ({found.folder})")
    else:
        warn(f"{folder} has no checkpoint: starting from the beginning")
    write_whole(folder / "config.yaml", to_yaml(config))
    at = None if not resume else -1 if found is None else found.step
    logs = stack.enter_context(RunLogs(folder, config.log, folder.name, flat(config), resume=at, warn=warn))
    if resume:
        view.history(read_rows(folder / "metrics.jsonl"))
    return trainer, logs


class Trainer:
    """A run. From a checkpoint, if one is given: its ``model/`` holds the weights, ``trainer/`` the rest."""

    def __init__(self, config: Config, folder: Path, view: View, found: checkpoint.Checkpoint | None = None):
        self.config, self.folder, self.view = config, folder, view
        if found is not None:
            self._check_settings(found)
        self.algorithm = resolve(config)
        check_rewards(config)
        for text in warnings_about(self.algorithm, config):
            self._warn(text)
        own = config.task
        self.task: Task = load_task(own.name, config.seed, own.test, own.prompt_key, own.answer_key)
        for text in (*self.task.notes, *unasked(self.task, config)):
            self.view.message(text)
        sampling, device = config.rollout, pick_device(config.device)
        # auto depends on the device, on which a resumed run need not be
        self.dtype = pick_dtype(config.dtype if found is None else found.state["dtype"], device)
        weights = config.model if found is None else str(found.model_folder)
        self.policy = Policy.load(
            weights,
            device=device,
            dtype=self.dtype,
            temperature=sampling.temperature,
            options=config.model_options,
            peft=config.peft,
        )
        held = rule_of(self.algorithm, config.reference) != "old" and not self.policy.adapted
        slots = pick_slots(self.policy, config, held)
        self.engine = make_engine(self.policy, config, slots, self._warn)
        self.problems = held_out(self.task, config)  # by name
        longest = [check_fit(self.policy, problems, config) for problems in self.problems.values()]
        self.engine.expect(max(check_train(self.policy, self.task, config, self._warn), *longest))
        self.scorer = make_scorer(config, self.task)
        self.optimizer = make_optimizer(self.policy.parameters(), config.optim)
        self.reference = Reference(self.policy, rule_of(self.algorithm, config.reference), config.reference)
        self.collector = Collector(
            config, self.algorithm, self.policy, self.engine, self.task, self.scorer, self.view.stage
        )
        resolved = replace(config, rollout=replace(sampling, slots=slots))
        self.room = make_room(self.policy, resolved, held, self.engine.release, self._warn)
        self.updater = Updater(config, self.algorithm, self.policy, self.optimizer, folder, self.view.stage, self.room)
        self.old_logp = OldLogp(config, self.algorithm.loss, self.dtype)
        self.done = 0  # steps
        self.tokens_total = 0
        self.starved = 0  # steps in a row
        self.evals: list[dict[str, Any]] = []  # {"step", "mean" over all sets, "sets": {name: {"mean", "low", "high"}}}
        self.spent = 0.0  # seconds of steps, without evaluations and checkpoints
        self.seconds_before = 0.0  # of this run, before it was resumed
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.begin = time.perf_counter()
        self.saved = 0  # step of the newest checkpoint
        self.stop = Stop()
        self.saving_seconds: float | None = None  # of a checkpoint, until they are logged
        if found is not None:
            self._load(found)

    def _warn(self, text: str) -> None:
        self.view.message(text, "warning")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, logs: RunLogs) -> dict[str, Any]:
        try:
            with self.stop.listening(self._warn):
                self._loop(logs)
            summary = summarise(self, *self._outcome())
            write_summary(self.folder, summary)
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt)
            message = f"stopped at once; {self._resuming}" if at_once else _text(error)
            with contextlib.suppress(OSError):  # the disk may be what failed
                write_summary(self.folder, summarise(self, "stopped" if at_once else "failed", message))
            if isinstance(error, EXPECTED):
                raise Failed(message) from error
            if at_once:
                self._warn(message)
            raise
        if self.config.log.report:
            self._report()
        if summary["message"]:
            self._warn(summary["message"])
        return summary

    def _loop(self, logs: RunLogs) -> None:
        if self.done == 0:
            self._begin(logs)
        while self.done < self.config.steps and self.stop.by is None and not self._out_of_time:
            self.step(self.done + 1, logs)
            if self.starved >= MAX_STARVED:
                break
        if self.stop.by is not None and self.done > self.saved:
            self.save(logs)

    def _outcome(self) -> tuple[str, str]:
        """The run's status, and what there is to say about it."""
        if self.starved >= MAX_STARVED:
            return "finished", self._starvation()
        if self._out_of_time:
            return "finished", f"ended after step {self.done}: its {self.config.minutes:g} minutes are over"
        if self.stop.by is not None and self.done < self.config.steps:
            return "stopped", f"stopped by {self.stop.by} after step {self.done}; {self._resuming}"
        return "finished", ""

    @property
    def _out_of_time(self) -> bool:
        return self.config.minutes is not None and self.spent >= 60 * self.config.minutes

    @property
    def _resuming(self) -> str:
        if self.config.checkpoint.keep == 0:
            return "there is nothing to go on from, as checkpoint.keep is 0"
        return f"go on with: rpg train --resume --output {shlex.quote(self.config.output)}"

    def step(self, step: int, logs: RunLogs) -> None:
        """One batch of rollouts, trained on; its row of metrics; an evaluation and a checkpoint where they are due."""
        begin = time.perf_counter()
        experience = self.collector.collect(step)
        for text in experience.messages:
            self._warn(f"reward function: {text}")
        trained = time.perf_counter()
        row = experience.metrics()
        if experience.starved:
            self.starved += 1
            self._warn(f"step {step}: {experience.lacking()}; nothing learnt")
            advantages = None
        else:
            self.starved = 0
            metrics, advantages = self._learn(experience, step)
            row |= metrics
            self.engine.sync()
        renewed = self.reference.after_step(step, self.policy, row.get("kl/ref"))
        if self.reference.policy is not None:
            row["reference/updated"] = float(renewed)
        for text in self.updater.messages:
            self._warn(text)
        self.updater.messages.clear()
        seconds = experience.seconds | {"train": time.perf_counter() - trained}
        if self.saving_seconds is not None:  # the checkpoint of the step before
            seconds["checkpoint"], self.saving_seconds = self.saving_seconds, None
        self.done = step
        self.tokens_total += int(row["tokens"])
        row |= {"tokens_total": self.tokens_total}
        logs.samples(step, experience.samples(self.config.log.samples, advantages))

        self.spent += time.perf_counter() - begin
        last = step == self.config.steps or self.starved >= MAX_STARVED or self._out_of_time
        due = self.config.eval.every and step % self.config.eval.every == 0
        best = False  # until now, and worth keeping
        if (due or last) and not self._hopeless:
            start = time.perf_counter()
            row |= self._evaluate(step, logs)
            seconds["eval"] = time.perf_counter() - start
            best = self.config.checkpoint.best and best_of(self.evals)["step"] == step
        whole = time.perf_counter() - begin
        row |= {f"time/{name}": value for name, value in seconds.items()} | {"time/step": whole}
        row |= {"speed/tokens_per_s": row["tokens"] / (whole - seconds.get("eval", 0.0))} | memory_metrics(
            self.policy.device
        )
        row = {"step": step, **row}
        logs.metrics(row)
        self.view.step(row)
        if self._hopeless:  # nothing is saved: the last checkpoint is from before the trouble
            raise Failed(
                f"{self.updater.bad_steps} optimiser steps in a row had a loss or gradient that is not finite. "
                f"Their batches are in {self.folder / 'bad'}; lower optim.lr, or look at the rewards"
            )
        every = self.config.checkpoint.every
        if (every and step % every == 0) or best or last:
            self.save(logs)

    @property
    def _hopeless(self) -> bool:
        return self.updater.bad_steps >= self.config.optim.max_bad_steps

    def _learn(self, experience: Experience, step: int) -> tuple[dict[str, float], list[float]]:
        policy, anew = self.policy, self.old_logp.recompute
        batch = make_batch(experience.groups, policy.tokenizer.pad_token_id, policy.device)
        self.view.stage("log-probabilities")
        old_BT = self.room.run(batch, lambda tokens: batch_logp(policy, batch, tokens)) if anew else None
        ref_BT = self.room.run(batch, lambda tokens: self.reference.logp(batch, tokens))
        needs = "ref_logp" in self.algorithm.loss.needs or self.algorithm.advantage.beta > 0
        batch = prepared(batch, old_BT, ref_BT, needs)
        greedy = [group.greedy or 0.0 for group in experience.groups] if self.collector.greedy else None
        batch = with_advantages(batch, self.algorithm.advantage, greedy)
        metrics = self.updater.update(batch, step) | {"old_logp/recomputed": float(anew)}
        self.old_logp.measure(metrics)
        assert batch.advantage is not None
        advantage = batch.advantage if batch.advantage.dim() == 1 else batch.advantage[:, 0]
        return metrics, advantage.tolist()

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    def _begin(self, logs: RunLogs) -> None:
        """The row of step 0: where the model begins."""
        row = {"step": 0, **self._evaluate(0, logs)}
        logs.metrics(row)
        self.view.step(row)
        write_summary(self.folder, summarise(self, "running", ""))

    def _evaluate(self, step: int, logs: RunLogs) -> dict[str, float]:
        with averaged_weights(self.optimizer):
            if self._schedule_free:
                self.engine.sync()
            found = evaluate(self.policy, self.engine, self.scorer, self.problems, self.config, watch=self.view.stage)
        if self._schedule_free:
            self.engine.sync()
        row: dict[str, float] = {}
        for one in found:
            logs.samples(step, one.samples)
            self.collector.count(one.failures)
            for text in one.messages:
                self._warn(f"reward function: {text}")
            row |= one.metrics()
        sets = {e.task: {"mean": e.mean.mean, "low": e.mean.low, "high": e.mean.high} for e in found}
        mean = sum(e.mean.mean for e in found) / len(found)
        self.evals.append({"step": step, "mean": mean, "sets": sets})
        if len(found) > 1:
            row["eval/mean"] = mean
        return row

    def _starvation(self) -> str:
        return (
            f"ended after step {self.done}: for {MAX_STARVED} steps no group had unequal rewards, so there is nothing "
            "to learn. If all are solved the task is done; if none are, it is too hard for this model: try easier "
            "problems, more rollout.samples or a higher rollout.temperature"
        )

    # ---- checkpoints, summary, report --------------------------------------------------------------------------------

    def save(self, logs: RunLogs) -> None:
        if self.config.checkpoint.keep == 0:
            return
        start = time.perf_counter()
        self.view.stage("saving")
        tensors = {"optimizer": optimizer_tensors(self.optimizer, self.policy.parameters())}
        if self._averaging:  # model/ has the average; this is what to go on from
            tensors["parameters"] = {name: p.detach() for name, p in self.policy.parameters()}
        if held := self.reference.tensors():
            tensors["reference"] = held
        state = {
            "step": self.done,
            "tokens_total": self.tokens_total,
            "starved": self.starved,
            "bad_steps": self.updater.bad_steps,
            "cursor": asdict(self.collector.cursor),
            "reference": self.reference.state(),
            "room": self.room.state(),
            "mismatch": self.old_logp.measured,
            "dtype": str(self.dtype).removeprefix("torch."),
            "evals": self.evals,
            "spent": self.spent,
            "started": self.started,
            "seconds": self.seconds(),
            "threads": torch.get_num_threads(),
            "config": flat(self.config),
        }
        logs.sync()
        root = self.folder / "checkpoints"
        checkpoint.save(root, self.done, self._write_model, tensors, state)
        keep = self.config.checkpoint
        checkpoint.prune(root, keep.keep, self._best_step() if keep.best else None, newest=self.done)
        write_summary(self.folder, summarise(self, "running", ""))
        self.saved = self.done
        self.saving_seconds = time.perf_counter() - start

    @property
    def _averaging(self) -> bool:
        """Whether what is trained is neither in model/ nor, as masters are, in the optimiser's state."""
        return self._schedule_free and not self.optimizer.all_rounded

    @property
    def _schedule_free(self) -> bool:
        """Whether what is evaluated and shipped is not what is trained."""
        return isinstance(self.optimizer.optimizer, ScheduleFreeAdamW)

    def _write_model(self, folder: Path) -> None:
        with averaged_weights(self.optimizer):
            self.policy.save(folder)

    def _check_settings(self, found: checkpoint.Checkpoint) -> None:
        """What a run is made of cannot change on the way."""
        then, now = found.state["config"], json_like(flat(self.config))
        keys = {key for key in (*then, *now) if not key.startswith(FREE)}
        if changed := {key for key in keys if then.get(key) != now.get(key)}:
            names = ", ".join(sorted(changed))
            raise ValueError(f"cannot resume {self.folder} with other settings than its checkpoint's: {names}")
        threads = torch.get_num_threads()
        if found.state["threads"] != threads:
            text = f"the checkpoint was made with {found.state['threads']} threads, this is {threads}"
            self._warn(f"{text}: results will differ in the last bits")

    def _load(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        if self._averaging:
            with torch.no_grad():
                stored = found.tensors("parameters")
                for name, p in self.policy.parameters():
                    p.copy_(stored[name])
        load_optimizer(self.optimizer, self.policy.parameters(), found.tensors("optimizer"))
        tensors = found.tensors("reference") if state["reference"]["held"] else {}
        self.reference.load(state["reference"], tensors)
        sizes, now = ("optim.micro_tokens", "optim.recompute"), json_like(flat(self.config))
        if all(state["config"].get(key) == now.get(key) for key in sizes):  # else as it is set now
            self.room.load(state["room"])
        self.old_logp.measured = state["mismatch"]
        self.collector.cursor = Cursor(**state["cursor"])
        self.updater.bad_steps, self.starved = state["bad_steps"], state["starved"]
        self.saved = found.step
        self.spent = state["spent"]
        self.done, self.tokens_total, self.evals = state["step"], state["tokens_total"], state["evals"]
        self.started, self.seconds_before = state["started"], state["seconds"]

    def _best_step(self) -> int | None:
        saved = set(checkpoint.found(self.folder / "checkpoints"))
        scored = [e for e in self.evals if e["step"] in saved]
        return int(best_of(scored)["step"]) if scored else None

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begin

    def _report(self) -> None:
        from ..report import read_run, write

        try:
            write([read_run(self.folder)], self.folder / "report.html")
        except OSError as error:  # the run itself is whole
            self._warn(f"no report.html: {_text(error)}")


def _text(error: BaseException) -> str:
    """In one line; of an error that nobody expects, with its name."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory: lower optim.micro_tokens (training) or rollout.slots (sampling)"
    text = " ".join(str(error).split())
    return text if isinstance(error, (Failed, *EXPECTED)) and text else f"{type(error).__name__}: {text}"


def json_like(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))
