"""``rpg train``: prompts -> rollouts -> verified rewards -> groups -> advantages -> minibatches -> loss -> step.

Read ``Trainer.step`` first. Everything random is a function of the seed and the step (randomness.py), and everything
else that a step depends on is in the checkpoint: a run that was killed and resumed ends in the same bits.
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..distributed.ranks import ALONE, LOST, RankFailed, World
from ..distributed.shards import ShardedPolicy
from ..models.policy import Policy
from ..rollout import NotFinite
from ..run import checkpoint
from ..run.config import Config
from ..run.folder import locked, read_rows
from ..run.logs import NoLogs, RunLogs, write_summary, write_whole
from ..run.settings import flat, to_yaml
from ..run.signals import Stop
from ..run.view import Mute, View, make_view
from ..tasks import RewardError, Task, load_task
from .batch import make_batch, with_advantages
from .collect import Collector, Experience, PromptTooLong
from .engines import make_engine
from .evaluate import evaluate
from .oom_retry import make_oom_retry, pick_slots
from .optim import ScheduleFreeAdamW, averaged_weights, make_optimizer
from .reference import Reference, batch_logp, rule_of
from .setup import (
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
from .state import check_settings, load, save
from .summary import best_of, memory_metrics, summarise
from .update import OldLogp, Updater, prepared

MAX_STARVED = 5  # steps in a row without a group to learn from, after which the run ends
EXPECTED = (
    checkpoint.CheckpointError,
    RewardError,
    PromptTooLong,
    NotFinite,
    OSError,
    SafetensorError,
    torch.OutOfMemoryError,
    RankFailed,
)  # one line each


class Failed(ValueError):
    """The run cannot go on; its text is one line. ``setup``: nothing was done yet, what was asked for is impossible."""

    def __init__(self, message: str, setup: bool = False):
        super().__init__(" ".join(message.split()))
        self.setup = setup


def train(config: Config, *, resume: bool = False, world: World = ALONE) -> dict[str, Any]:
    """Run to the end, or until stopped. Returns the summary; what cannot go on raises Failed, in one line.

    Of several ranks (ranks.joined) all call it; the first shows, logs and saves.
    """
    folder = Path(config.output)
    title = f"{config.algorithm} · {config.model} · {config.task.name} · seed {config.seed}"
    shown = make_view(config.log.view, title=title, steps=config.steps) if world.first else Mute()
    with shown as view, contextlib.ExitStack() as stack:
        try:
            trainer, logs = _set_up(config, folder, view, resume, stack, world)
        except (ValueError, OSError, checkpoint.CheckpointError, RankFailed) as error:
            raise Failed(str(error), setup=True) from error
        except RuntimeError as error:
            if world.has_lost(error):
                raise Failed(LOST) from error
            raise
        return trainer.run(logs)


def _set_up(
    config: Config, folder: Path, view: View, resume: bool, stack: contextlib.ExitStack, world: World
) -> tuple[Trainer, RunLogs]:
    def warn(text: str) -> None:
        view.message(text, "warning")

    found = world.together(lambda: _find(config, folder, resume, stack, warn) if world.first else None)
    if world.size > 1 and (where := world.agree(None if found is None else found.folder)) is not None:
        found = found or checkpoint.read(where, verified=True)
    trainer = stack.enter_context(Trainer(config, folder, view, found, world))
    world.last_words = trainer.last_words
    if not world.first:
        world.together(lambda: None)
        return trainer, NoLogs()
    return trainer, world.together(lambda: _open(config, folder, view, resume, stack, found, warn))


def _find(
    config: Config, folder: Path, resume: bool, stack: contextlib.ExitStack, warn: Callable[[str], None]
) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from. A folder that cannot be trained in is refused."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: {folder} is a file; give a folder with --output")
    if not resume:
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
            raise ValueError(f"{folder} holds a run already: give --resume to go on with it, or another --output")
        return None
    if not (folder / "config.yaml").exists():
        raise ValueError(f"nothing to resume in {folder}: there is no config.yaml")
    stack.enter_context(locked(folder))
    found = checkpoint.load(folder / "checkpoints", warn)
    if found is None and config.checkpoint.keep == 0:
        raise ValueError(f"nothing to resume in {folder}: with checkpoint.keep 0 no checkpoint is written")
    if found is None and checkpoint.found(folder / "checkpoints"):
        raise ValueError(f"no checkpoint in {folder} is whole: nothing to resume from (a new run needs a new --output)")
    return found


def _open(
    config: Config,
    folder: Path,
    view: View,
    resume: bool,
    stack: contextlib.ExitStack,
    found: checkpoint.Checkpoint | None,
    warn: Callable[[str], None],
) -> RunLogs:
    """The run's folder and what is written into it: no mistake up to here."""
    if not resume:
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
    return logs


class Trainer:
    """A run. From a checkpoint, if one is given: its ``model/`` holds the weights, ``trainer/`` the rest.

    ``policy`` is sampled from, ``learner`` is trained: the same, unless weights are sharded.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        view: View,
        found: checkpoint.Checkpoint | None = None,
        world: World = ALONE,
    ):
        self.config, self.folder, self.view, self.world = config, folder, view, world
        self.warnings: list[str] = []  # since ranks last told each other
        if found is not None:
            check_settings(self, found)
        self.algorithm = resolve(config)
        check_rewards(config)
        for text in warnings_about(self.algorithm, config):
            self._warn(text)
        own = config.task
        self.task: Task = load_task(own.name, config.seed, own.test, own.prompt_key, own.answer_key)
        for text in (*self.task.notes, *unasked(self.task, config)):
            self.view.message(text)
        sampling, device = config.rollout, world.device or pick_device(config.device)
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
        slots = pick_slots(self.policy, config, held, world=world)
        self.engine = make_engine(self.policy, config, slots, self._warn, world)
        self.problems = held_out(self.task, config)  # by name
        longest = [check_fit(self.policy, problems, config) for problems in self.problems.values()]
        self.engine.expect(max(check_train(self.policy, self.task, config, self._warn), *longest))
        self.scorer = make_scorer(config, self.task)
        self.learner = ShardedPolicy(self.policy, world) if world.sharded else self.policy
        self.optimizer = make_optimizer(self.learner.parameters(), config.optim, world)
        rule = rule_of(self.algorithm, config.reference)
        self.reference = Reference(self.learner, rule, config.reference, world, self.policy)
        self.collector = Collector(
            config, self.algorithm, self.policy, self.engine, self.task, self.scorer, self.view.stage, world
        )
        resolved = replace(config, rollout=replace(sampling, slots=slots))
        self.oom_retry = make_oom_retry(self.policy, resolved, held, self.engine.release, self._warn, world)
        self.updater = Updater(
            config, self.algorithm, self.learner, self.optimizer, folder, self.view.stage, self.oom_retry, world
        )
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
            load(self, found)
            if world.sharded:
                self.sync()

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.view.message(text, "warning")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, logs: RunLogs) -> dict[str, Any]:
        try:
            with self.stop.listening(lambda text: self.view.message(text, "warning")):
                self._loop(logs)
            summary = summarise(self, *self._outcome())
            self.world.by_first(lambda: write_summary(self.folder, summary))
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt)
            gone = self.world.has_lost(error)
            message = f"stopped at once; {self._resuming}" if at_once else LOST if gone else _text(error)
            self.last_words(message, "stopped" if at_once else "failed")
            if gone or isinstance(error, EXPECTED):
                raise Failed(message) from error
            if at_once:
                self._warn(message)
                raise KeyboardInterrupt(message) from None
            raise
        if summary["message"]:
            self._warn(summary["message"])
        return summary

    def last_words(self, message: str, status: str = "failed") -> None:
        if self.world.first:
            with contextlib.suppress(OSError):  # the disk may be what failed
                write_summary(self.folder, summarise(self, status, message))

    def _loop(self, logs: RunLogs) -> None:
        if self.done == 0:
            self._begin(logs)
        while self.done < self.config.steps and not self._told_to_stop() and not self._out_of_time:
            self.step(self.done + 1, logs)
            if self.starved >= MAX_STARVED:
                break
        if self._told_to_stop() and self.done > self.saved:
            self.save(logs)

    def _told_to_stop(self) -> bool:
        """Whether a signal has come to any rank: all stop at the same step. What a rank alone warned of is shown."""
        mine, self.warnings = self.warnings, []
        signals, warnings = zip(*self.world.gather((self.stop.by, mine)), strict=True)
        for rank, texts in enumerate(warnings):
            for text in (text for text in texts if text not in warnings[0]):
                self.view.message(f"rank {rank}: {text}", "warning")
        found = next((by for by in signals if by is not None), None)
        self.stop.by = found or self.stop.by
        return found is not None

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
        several = f"torchrun --nproc-per-node {self.world.size} -m " if self.world.size > 1 else ""
        return f"go on with: {several}rpg train --resume --output {shlex.quote(self.config.output)}"

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
            self.sync()
        renewed = self.reference.after_step(step, self.learner, row.get("kl/ref"))
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
        self.world.by_first(lambda: logs.samples(step, experience.samples(self.config.log.samples, advantages)))

        self.spent = self.world.agree(self.spent + (time.perf_counter() - begin))
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
        self.world.by_first(lambda: logs.metrics(row))
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
        policy, world, anew = self.learner, self.world, self.old_logp.recompute
        batch = make_batch(experience.groups, policy.tokenizer.pad_token_id, policy.device)
        self.view.stage("log-probabilities")
        old_BT = self.oom_retry.run(batch, lambda tokens: batch_logp(policy, batch, tokens, world)) if anew else None
        ref_BT = self.oom_retry.run(batch, lambda tokens: self.reference.logp(batch, tokens))
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
        self.world.by_first(lambda: logs.metrics(row))
        self.view.step(row)
        self.world.by_first(lambda: write_summary(self.folder, summarise(self, "running", "")))

    def _evaluate(self, step: int, logs: RunLogs) -> dict[str, float]:
        with self.averaged():
            found = evaluate(
                self.policy,
                self.engine,
                self.scorer,
                self.problems,
                self.config,
                watch=self.view.stage,
                world=self.world,
            )
        row: dict[str, float] = {}
        rows = [row for one in found for row in one.samples]
        self.world.by_first(lambda: logs.samples(step, rows))
        for one in found:
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
        save(self, logs)
        self.saved = self.done
        self.saving_seconds = time.perf_counter() - start

    def sync(self) -> None:
        """The engine samples from the trained weights, as they are now."""
        if isinstance(self.learner, ShardedPolicy):
            self.learner.pour(self.policy)
        self.engine.sync()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the weights are those to evaluate and to ship. Of schedule-free these are not the trained ones."""
        with averaged_weights(self.optimizer):
            if self.schedule_free:
                self.sync()
            yield
        if self.schedule_free:
            self.sync()

    @property
    def schedule_free(self) -> bool:
        return isinstance(self.optimizer.optimizer, ScheduleFreeAdamW)

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begin


def _text(error: BaseException) -> str:
    """In one line; of an error that nobody expects, with its name."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory: lower optim.micro_tokens (training) or rollout.slots (sampling)"
    text = " ".join(str(error).split())
    return text if isinstance(error, (Failed, *EXPECTED)) and text else f"{type(error).__name__}: {text}"
