"""``rpg train``: prompts -> rollouts -> verified rewards -> groups -> advantages -> minibatches -> loss -> step.

Read ``Trainer.step`` first. Everything random is a function of the seed and the step (run/seeds.py), and everything
else that a step depends on is in the checkpoint: a run that was killed and resumed ends in the same bits.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import own_command
from ..distributed.context import RunContext
from ..distributed.ranks import ALONE, LOST, RankFailed, World
from ..distributed.shards import ShardedPolicy
from ..loss.advantages import NEVER_NEGATIVE
from ..models.policy import Policy
from ..publish.card import CARD, Base, base_of
from ..rewards.failing import FailureWatch, added
from ..run import checkpoint
from ..run.auto import announcement, objections, refuse_ruin, settled
from ..run.config import Config
from ..run.folder import FolderLost, RunFolder, followed
from ..run.logs import NoLogs, RunLogs, write_summary
from ..run.signals import Stop, interruptible
from ..run.teacher import with_teacher
from ..run.view import View, opening
from ..tasks import Task, fingerprint
from .batch import Batch, make_batch, with_advantages
from .evaluate import evaluate
from .failures import EXPECTED, Failed, one_line
from .old_logp import OldLogp, batch_score_sq, with_logp
from .oom_retry import make_oom_retry, pick_layout
from .optim import averaged_weights, make_optimizer
from .phases import Phases
from .progress import Progress, best_of, over, read_from, starvation, summarise
from .reference import Reference, batch_logp, load_teacher
from .samples.collect import UNEQUAL, Experience, Sampler
from .samples.source import SampleSource
from .setup import (
    about_sampler,
    anchored,
    check_ahead,
    check_base,
    check_fit,
    check_rewards,
    check_rollout,
    check_train,
    held_out,
    make_engine,
    make_scorer,
    method_of,
    pick_device,
    pick_dtype,
    rewards_of,
    task_of,
    unasked,
    warnings_about,
)
from .state import RunState, check_data, check_settings, find_start, open_logs, write_config
from .update import Updater

MAX_STARVED = 5  # steps in a row without a group to learn from, after which the run ends


def train(config: Config, *, resume: bool = False, world: World = ALONE, shown: View | None = None) -> dict[str, Any]:
    """Run to the end, or until stopped. Returns the summary; what cannot go on raises Failed, in one line.

    Of several ranks (ranks.joined) all call it; the first shows, logs and saves. ``shown`` may be open already.
    """
    with shown or opening(config, world.first) as view, contextlib.ExitStack() as stack:
        try:
            with interruptible():
                trainer, logs = _set_up(config, view, resume, stack, world)
        except (ValueError, OSError, checkpoint.CheckpointError, RankFailed) as error:
            raise Failed(str(error), setup=True) from error
        except RuntimeError as error:
            if world.has_lost(error):
                raise Failed(LOST) from error
            raise
        return trainer.run(logs)


def _set_up(
    config: Config, view: View, resume: bool, stack: contextlib.ExitStack, world: World
) -> tuple[Trainer, RunLogs]:
    if text := announcement(config):
        view.message(text)
    config = settled(config)  # what is compared and recorded is what is run

    def warn(text: str) -> None:
        view.message(text, "warning")

    folder = stack.enter_context(RunFolder(followed(Path(config.output)), warn))
    start = world.fail_together(lambda: find_start(config, folder, resume, warn) if world.first else None)
    if world.size > 1 and (where := world.from_rank0(None if start is None else start.folder)) is not None:
        start = start or checkpoint.read(where, verified=True)
    trainer = stack.enter_context(Trainer(config, folder, view, start, world))
    world.on_failure = trainer.write_failure
    opened = partial(open_logs, config, folder, view, resume, start)
    logs = stack.enter_context(world.fail_together(lambda: opened() if world.first else NoLogs()))
    folder.path = world.from_rank0(folder.path)
    return trainer, logs


class Trainer:
    """A run. From a checkpoint, if one is given: its ``model/`` holds the weights, ``trainer/`` the rest.

    ``policy`` is sampled from, ``learner`` is trained: the same, unless weights are sharded.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        view: View,
        start: checkpoint.Checkpoint | None = None,
        world: World = ALONE,
    ):
        config = settled(config)
        self.config, self.folder, self.view, self.world = config, folder, view, world
        self.context = context = RunContext(world, self._warn, view.stage)
        self.warnings: list[str] = []  # since ranks last told each other
        if start is not None:
            with read_from(start.folder):
                check_settings(config, start, context)
                Progress.load(start.state)
                pick_dtype(start.state["dtype"], torch.device("cpu"))
        refuse_ruin(config)
        self.method = method = method_of(config)
        taught = with_teacher(config, None if start is None else start.state) if method.has_kl else config
        check_rollout(config)
        check_ahead(config, method, world.size)
        check_rewards(config)
        for text in (*(objection.text for objection in objections(config)), *warnings_about(method, config)):
            self._warn(text)
        for text in (*about_sampler(method, config), *method.remarks(rewards_of(config))):
            self.view.message(text)
        view.stage(f"loading {config.task.name}")
        self.task: Task = task_of(config)
        data = fingerprint(self.task)
        if start is not None:
            check_data(config, start, data)
        for text in (*self.task.notes, *unasked(self.task, config)):
            self.view.message(text)
        self.problems = held_out(self.task, config)  # by name
        device = world.device or pick_device(config.device)
        # auto depends on the device, on which a resumed run need not be
        dtype = pick_dtype(config.dtype if start is None else start.state["dtype"], device)
        view.loads(f"the model {config.model}")
        self.policy = Policy.load(
            config.model if start is None else str(start.model_folder),
            device=device,
            dtype=dtype,
            temperature=config.rollout.temperature,
            options=config.model_options,
            peft=config.peft,
        )
        check_base(self.policy, world.size, config.rollout.engine)
        self.progress = progress = Progress() if start is None else Progress.load(start.state)
        teacher = load_teacher(taught, self.policy) if config.reference.model is not None and method.has_kl else None
        held = method.anchor != "old" and (teacher is not None or not self.policy.adapted)  # a second set of weights
        planned = anchored(taught, method)
        layout = pick_layout(self.policy, planned, held, world=world)
        self.engine = make_engine(self.policy, config, layout, context)
        longest = [check_fit(self.policy, problems, config) for problems in self.problems.values()]
        self.engine.expect(max(check_train(self.policy, self.task, config, context), *longest))
        self.scorer = make_scorer(config, self.task)
        self.sampler = Sampler(self.policy, self.engine, self.scorer, config, context)
        self.learner = ShardedPolicy(self.policy, world) if world.sharded else self.policy
        self.optimizer = make_optimizer(self.learner.parameters(), config.optim)
        self.reference = Reference(self.learner, method.anchor, taught.reference, world, self.policy, teacher)
        self.source = SampleSource(config, method, self.sampler, self.task, progress.cursor)
        self.phases = Phases(self.optimizer, self.engine, self.policy.device, layout.offload)
        self.oom_retry = make_oom_retry(self.policy, planned, held, self.engine.release, context, layout)
        self.updater = Updater(config, method, self.learner, self.optimizer, folder, progress, self.oom_retry, context)
        self.old_logp = OldLogp(config, method.loss, dtype, progress)
        known = None if start is None else start.model_folder / CARD
        base = base_of(config.model, config.model_options, known) if world.first else Base("")
        parts = self.learner, self.optimizer, self.reference, self.oom_retry, progress, self.source, self.updater.probe
        self.state = RunState(config, world, dtype, *parts, data, base)
        self.saved = progress.step  # step of the newest checkpoint
        self.stop = Stop()
        self.failure_watch = FailureWatch()
        self.saving_seconds: float | None = None  # of a checkpoint, until they are logged
        if start is not None:
            with read_from(start.folder):
                self.state.restore(start)
            if world.sharded:
                self.sync()
        progress.start_clock()

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.view.message(text, "warning")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.scorer.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, logs: RunLogs) -> dict[str, Any]:
        try:
            with self.stop.listening(lambda text: self.view.message(text, "warning")):
                self._loop(logs)
                summary = self.summary(*self._outcome())
                self.world.on_rank0(lambda: self._write_summary(summary))
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt)
            gone = self.world.has_lost(error)
            message = f"stopped at once; {self._resuming}" if at_once else LOST if gone else one_line(error)
            self.write_failure(message, "stopped" if at_once else "failed")
            if gone or isinstance(error, EXPECTED):
                raise Failed(message) from error
            if at_once:
                self._warn(message)
                raise KeyboardInterrupt(message) from None
            raise
        if summary["message"]:
            planned = summary["stopped_by"] in ("minutes", "tokens")
            self.view.message(summary["message"], "info" if planned else "warning")
        return summary

    def write_failure(self, message: str, status: str = "failed") -> None:
        if self.world.first:
            with contextlib.suppress(OSError):  # the disk may be what failed
                self._write_summary(self.summary(status, message))

    def _loop(self, logs: RunLogs) -> None:
        if self.progress.step == 0:
            self._begin(logs)
        while self.progress.step < self.config.steps and not self._told_to_stop() and not self._over:
            self.step(self.progress.step + 1, logs)
            if self.world.from_rank0(self.folder.lost()) is not None:
                self.save(logs)
            if self._is_starved:
                break
        unsaved = self._told_to_stop() and self.progress.step > self.saved
        if unsaved or self.world.from_rank0(self._has_nothing_saved()):
            self.save(logs)
        self.world.on_rank0(self._prune)

    def _has_nothing_saved(self) -> bool:
        """Whether somebody has removed the checkpoint that the run would end with."""
        gone = self.saved > 0 and not (self.folder.path / "checkpoints" / f"step-{self.saved:06d}").is_dir()
        return gone and self.config.checkpoint.keep > 0

    def _told_to_stop(self) -> bool:
        """Whether a signal has come to any rank: all stop at the same step. What a rank alone warned of is shown."""
        mine, self.warnings = self.warnings, []
        signals, warnings = zip(*self.world.gather((self.stop.by, mine)), strict=True)
        for rank, texts in enumerate(warnings):
            for text in (text for text in texts if text not in warnings[0]):
                self.view.message(f"rank {rank}: {text}", "warning")
        signal = next((by for by in signals if by is not None), None)
        if signal is not None:
            self.stop.note(signal)
        return signal is not None

    def _outcome(self) -> tuple[str, str]:
        """The run's status, and what there is to say about it."""
        if self._is_starved:
            failed, dropped = self.failure_watch.half_failed, self.source.all_dropped
            why = starvation(MAX_STARVED, UNEQUAL[self.source.signal], failed, dropped)
            return "finished", f"ended after step {self.progress.step}: {why}"
        if self._over:
            return "finished", f"ended after step {self.progress.step}: {self._over[1]}"
        if self.stop.by is not None and self.progress.step < self.config.steps:
            return "stopped", f"stopped by {self.stop.by} after step {self.progress.step}; {self._resuming}"
        return "finished", ""

    @property
    def _is_starved(self) -> bool:
        return self.progress.starved >= MAX_STARVED

    @property
    def _over(self) -> tuple[str, str] | None:
        return over(self.config, self.progress)

    @property
    def _resuming(self) -> str:
        if self.config.checkpoint.keep == 0:
            return "there is nothing to go on from, as checkpoint.keep is 0"
        several = f"torchrun --nproc-per-node {self.world.size} -m rpg" if self.world.size > 1 else own_command()
        return f"go on with: {several} train --resume --output {shlex.quote(str(self.folder.path))}"

    def step(self, step: int, logs: RunLogs) -> None:
        """One batch of rollouts, trained on; its row of metrics; an evaluation and a checkpoint where they are due."""
        begin, learner = time.perf_counter(), self.learner
        self.phases.sampling()
        experience = self.source.collect(step)
        for text in experience.messages:
            self._warn(f"reward function: {text}")
        self.failure_watch.note(experience.calls)
        if step == 1 and self.method.advantage.never_negative(experience.scores):
            self._warn(f"{self.method.name}: {NEVER_NEGATIVE}")
        if not experience.starved:
            self.phases.training()
        training_start = time.perf_counter()
        experience, batch, now_BT = self._assembled(experience, step)
        row, advantages = experience.metrics(), None
        if batch is None:
            self.progress.starved += 1
            self._warn(f"step {step}: {experience.why_starved()}; nothing learnt")
        else:
            self.progress.starved = 0
            recompute = self.old_logp.recompute
            ref_logp_BT = self.oom_retry.run(batch, partial(self.reference.logp, batch))
            batch = with_logp(batch, now_BT if recompute else None, ref_logp_BT, self.method.needs_reference)
            score_sq = partial(batch_score_sq, learner, batch, world=self.world)
            score_sq_BT = self.oom_retry.run(batch, score_sq) if self.method.advantage.needs_score_sq else None
            batch = with_advantages(batch, self.method.advantage, experience.greedy, score_sq_BT)
            metrics = self.updater.update(batch, step)
            self.old_logp.measure(metrics)
            row |= metrics | {"old_logp/recomputed": float(recompute)} | batch.kept_metrics()
            advantages = batch.advantage_of_responses()
            self.source.served(experience)
            self.sync()
        renewed = self.reference.after_step(step, learner, row.get("kl/ref"), int(row.get("optimizer_steps", 0)))
        if self.reference.policy is not None:
            row["reference/updated"] = float(renewed)
        self.progress.step = step
        self.progress.tokens_total += int(row["tokens"])
        row["tokens_total"] = self.progress.tokens_total
        responses = experience.samples(1, advantages)
        self.view.response(responses[step % len(responses)])
        seconds = experience.seconds | {"train": time.perf_counter() - training_start} | self.phases.spent()
        self.world.on_rank0(lambda: logs.samples(step, experience.samples(self.config.log.samples, advantages)))
        self._finish_step(step, row, begin, seconds, logs)

    def _assembled(self, experience: Experience, step: int) -> tuple[Experience, Batch | None, Tensor | None]:
        """The groups worth training on as a batch, None if there are none; and what the policy as it is now makes of
        their tokens, where that is asked."""
        if experience.starved:
            return experience, None, None
        learner = self.learner
        batch = make_batch(experience.groups, learner.tokenizer.pad_token_id, learner.device)
        self.view.stage("log-probabilities")
        asked = self.old_logp.recompute or self.source.judges(experience, step)
        compute = partial(batch_logp, learner, batch, world=self.world)
        now_BT = self.oom_retry.run(batch, compute) if asked else None
        experience, batch, now_BT = self.source.sift(experience, batch, now_BT, step)
        return experience, None if experience.starved else batch, now_BT

    def _finish_step(
        self, step: int, row: dict[str, float], begin: float, seconds: dict[str, float], logs: RunLogs
    ) -> None:
        """Evaluate, log and save, where it is due."""
        if self.saving_seconds is not None:  # the checkpoint of the step before
            seconds["checkpoint"], self.saving_seconds = self.saving_seconds, None
        self.progress.spent = self.world.from_rank0(self.progress.spent + (time.perf_counter() - begin))
        last = step == self.config.steps or self._is_starved or self._over is not None
        hopeless = self.progress.bad_steps >= self.config.optim.max_bad_steps
        best = False  # until now, and worth keeping
        if (last or _due(step, self.config.eval.every)) and not hopeless:
            start = time.perf_counter()
            row |= self._evaluate(step, logs)
            seconds["eval"] = time.perf_counter() - start
            best = self.config.checkpoint.best and best_of(self.progress.evals)["step"] == step
        for text in self.progress.lights.see(step, row):
            self._warn(text)
        whole = time.perf_counter() - begin
        row |= {f"time/{name}": value for name, value in seconds.items()} | {"time/step": whole}
        row["speed/tokens_per_s"] = row["tokens"] / (whole - seconds.get("eval", 0.0))
        self._log({"step": step, **row, **self.phases.metrics()}, logs)
        if hopeless:  # nothing is saved: the last checkpoint is from before the trouble
            raise Failed(
                f"{self.progress.bad_steps} optimiser steps in a row had a loss or gradient that is not finite. "
                f"Their batches are in {self.folder.path / 'bad'}; lower optim.lr, or look at the rewards"
            )
        if _due(step, self.config.checkpoint.every) or best or last:
            self.save(logs)

    def _log(self, row: dict[str, float], logs: RunLogs) -> None:
        self.world.on_rank0(lambda: logs.metrics(row))
        self.view.step(row)

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    def _begin(self, logs: RunLogs) -> None:
        """The row of step 0: where the model begins."""
        self._log({"step": 0, **self._evaluate(0, logs)}, logs)
        self.world.on_rank0(lambda: self._write_summary(self.summary("running", "")))

    def _evaluate(self, step: int, logs: RunLogs) -> dict[str, float]:
        self.phases.sampling()
        with self.averaged():
            evaluations = evaluate(self.sampler, self.problems)
        samples = [sample for evaluation in evaluations for sample in evaluation.samples]
        self.world.on_rank0(lambda: logs.samples(step, samples))
        self.view.response(samples[0])
        row: dict[str, float] = {}
        for evaluation in evaluations:
            self.progress.cursor.count_failures(evaluation.failures)
            for text in evaluation.messages:
                self._warn(f"reward function: {text}")
            row |= evaluation.metrics()
        if step == 0:
            self.failure_watch.note(added(evaluation.calls for evaluation in evaluations))
        sets = {e.task: {"mean": e.mean.mean, "low": e.mean.low, "high": e.mean.high} for e in evaluations}
        mean = sum(e.mean.mean for e in evaluations) / len(evaluations)
        self.progress.evals.append({"step": step, "mean": mean, "sets": sets})
        return row | ({"eval/mean": mean} if len(evaluations) > 1 else {})

    # ---- checkpoints, summary, report --------------------------------------------------------------------------------

    def save(self, logs: RunLogs) -> None:
        """Written by the first rank, to which the others send what they have. What is in it: state.py."""
        if self.config.checkpoint.keep == 0:
            self.world.on_rank0(self._check_folder)
            return
        start = time.perf_counter()
        self.view.stage("saving")
        if self.world.sharded:
            self.phases.training()  # parts are gathered on the device, where the engine's cache would be in the way
        tensors = self.state.tensors()
        with self.averaged() if self.world.sharded else contextlib.nullcontext():
            self.world.on_rank0(lambda: self._write(tensors, logs))
        self.saved = self.progress.step
        self.saving_seconds = time.perf_counter() - start

    def _write(self, tensors: Mapping[str, Mapping[str, Tensor]], logs: RunLogs) -> None:
        logs.sync()
        lost = self.folder.lost()
        if lost is not None:
            self.folder.begin_again()
            write_config(self.config, self.folder.path)
        root, step = self.folder.fixed() / "checkpoints", self.progress.step
        try:
            values = self.state.values() | {"rows": logs.rows()}
            write_model = partial(self.state.write_model, self.policy)  # before the tensors: trained ones, not averages
            checkpoint.save(root, step, write_model, tensors, values, self.folder.run)
            self._prune()
        except checkpoint.CheckpointError as error:
            if self.folder.lost() is None:
                raise checkpoint.CheckpointError(self.folder.named(str(error))) from error
            self._write(tensors, logs)  # it was deleted just now
            return
        if lost is not None:
            raise FolderLost(f"{lost}. Step {step} is saved, the metrics are not; {self._resuming}")
        self._write_summary(self.summary("running", ""))

    def _prune(self) -> None:
        """At the end too: the run may have been killed between its last checkpoint and this."""
        root, step, keep = self.folder.fixed() / "checkpoints", self.progress.step, self.config.checkpoint
        if keep.keep:
            scored = [e for e in self.progress.evals if e["step"] in checkpoint.folders(root)] if keep.best else []
            checkpoint.prune(root, keep.keep, best_of(scored)["step"] if scored else None, step, self.folder.run)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        self._check_folder()
        write_summary(self.folder.path, summary)

    def _check_folder(self) -> None:
        if (lost := self.folder.lost()) is not None:
            raise FolderLost(lost)

    def summary(self, status: str, message: str) -> dict[str, Any]:
        about = self.config, self.folder.path, self.task.name, self.problems, self.policy, self.progress
        budget = self._over[0] if status == "finished" and self._over and not self._is_starved else None
        return summarise(*about, status, message, self.stop.by if status == "stopped" else budget)

    def sync(self) -> None:
        """The engine samples from the trained weights, as they are now."""
        if isinstance(self.learner, ShardedPolicy):
            self.learner.copy_into(self.policy)
        self.engine.sync()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the weights are those to evaluate and to ship. Of schedule-free these are not the trained ones."""
        with averaged_weights(self.optimizer):
            if self.optimizer.schedule_free:
                self.sync()
            yield
        if self.optimizer.schedule_free:
            self.sync()


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
