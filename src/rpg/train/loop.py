"""``rpg train``: prompts -> rollouts -> verified rewards -> groups -> advantages -> minibatches -> loss -> step.

Read ``Trainer.step`` first. Everything random is a function of the seed and the step (randomness.py), and everything
else that a step depends on is in the checkpoint: a run that was killed and resumed ends in the same bits.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError

from .. import __version__
from ..algorithms import Algorithm, algorithm
from ..policy import Policy
from ..rollout import NativeEngine, NotFinite, Sampling
from ..tasks import ENDLESS, Problem, RewardError, Scorer, Task, load_task
from . import checkpoint
from .batch import make_batch, with_advantages
from .config import Config
from .evaluate import Evaluation, evaluate
from .experience import Collector, Cursor, Experience, PromptTooLong, encode_prompt
from .logs import RunLogs, write_summary, write_whole
from .optim import averaged_weights, load_optimizer, make_optimizer, optimizer_tensors
from .reference import Reference, batch_logp, rule_of
from .settings import flat, to_yaml
from .update import Updater, prepared
from .view import View, make_view

MAX_STARVED = 5  # steps in a row without a group to learn from, after which the run ends
EXPECTED = (
    checkpoint.CheckpointError,
    RewardError,
    PromptTooLong,
    NotFinite,
    OSError,
    SafetensorError,
)  # one line each
FREE = ("steps", "output", "device", "log.", "eval.", "checkpoint.")  # what may differ when a run is resumed


class Failed(Exception):
    """The run cannot go on; its text is one line. ``setup``: nothing was done yet, what was asked for is impossible."""

    def __init__(self, message: str, setup: bool = False):
        super().__init__(" ".join(message.split()))
        self.setup = setup


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Run to the end, or until stopped. Returns the summary; what cannot go on raises Failed, in one line."""
    folder = Path(config.output)
    title = f"{config.algorithm} · {config.model} · {config.task.name} · seed {config.seed}"
    with make_view(config.log.view, title=title, steps=config.steps) as view:
        try:
            trainer, logs = _set_up(config, folder, view, resume)
        except (ValueError, OSError, checkpoint.CheckpointError) as error:
            raise Failed(str(error), setup=True) from error
        with trainer, logs:
            return trainer.run(logs)


def _set_up(config: Config, folder: Path, view: View, resume: bool) -> tuple[Trainer, RunLogs]:
    if not resume and (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} holds a run already: give --resume to go on with it, or another --output")
    folder.mkdir(parents=True, exist_ok=True)

    def warn(text: str) -> None:
        view.message(text, "warning")

    found = checkpoint.load(folder / "checkpoints", warn) if resume else None
    trainer = Trainer(config, folder, view)
    at = None
    if resume:
        at = -1 if found is None else found.step
    if found is not None:
        trainer.load(found)
        view.message(f"resumed from step {found.step} ({found.folder})")
    elif resume:
        warn(f"{folder} has no checkpoint: starting from the beginning")
    write_whole(folder / "config.yaml", to_yaml(config))
    logs = RunLogs(folder, config.log, folder.name, flat(config), resume=at, warn=warn)
    if resume:
        view.history(read_rows(folder / "metrics.jsonl"))
    return trainer, logs


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def evaluate_model(config: Config) -> Evaluation:
    """``rpg eval``: a model on the held-out problems of a task."""
    task = load_task(config.task.name, config.seed, config.task.test)
    policy = Policy.load(config.model, device=pick_device(config.device), temperature=1.0)
    engine = NativeEngine(policy.model, policy.tokenizer, config.rollout.slots)
    problems = task.test[: config.eval.problems]
    if not problems:
        raise ValueError(f"task {config.task.name!r} has no held-out problems")
    check_fit(policy, problems, config)
    with make_scorer(config, task) as scorer:
        return evaluate(policy, engine, scorer, task.name, problems, config)


def make_scorer(config: Config, task: Task) -> Scorer:
    own = config.task
    scorer = Scorer(
        own.reward or task.reward,
        trusted=own.reward is None and task.trusted,
        workers=own.workers,
        timeout=own.timeout,
        on_error=own.on_error,
    )
    scorer.start()
    return scorer


def check_fit(policy: Policy, problems: Sequence[Problem], config: Config) -> None:
    """Prompts and responses have to fit into the model."""
    longest = max(len(encode_prompt(policy, problem, config)) for problem in problems)
    new, context = config.rollout.max_new_tokens, policy.context
    if context is not None and longest + new > context:
        raise ValueError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={new} do not fit into the {context} of the model"
        )


def resolve(config: Config) -> Algorithm:
    """The preset with the run's options; Dr.GRPO's constant is the run's own longest response unless it is given."""
    try:
        chosen = algorithm(config.algorithm, **config.loss)
    except TypeError as error:  # a value of another type than the option's
        given = ", ".join(f"loss.{key}={value!r}" for key, value in config.loss.items())
        raise ValueError(f"{config.algorithm} cannot have {given}: {error}") from error
    if chosen.loss.reduction == "constant" and "constant" not in config.loss:
        chosen = algorithm(config.algorithm, **config.loss, constant=float(config.rollout.max_new_tokens))
    return chosen


def pick_device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {name!r} is not to be had: {str(error).splitlines()[0]}") from error
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Trainer:
    def __init__(self, config: Config, folder: Path, view: View):
        self.config, self.folder, self.view = config, folder, view
        self.algorithm = resolve(config)
        self.task: Task = load_task(config.task.name, config.seed, config.task.test)
        dtype = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        sampling = config.rollout
        device = pick_device(config.device)
        self.policy = Policy.load(config.model, device=device, dtype=dtype, temperature=sampling.temperature)
        self.engine = NativeEngine(self.policy.model, self.policy.tokenizer, sampling.slots)
        self.problems = self.task.test[: config.eval.problems]
        self._check_problems()
        self.scorer = make_scorer(config, self.task)
        self.optimizer = make_optimizer(self.policy.parameters(), config.optim)
        self.reference = Reference(self.policy, rule_of(self.algorithm, config.reference), config.reference)
        self.collector = Collector(
            config, self.algorithm, self.policy, self.engine, self.task, self.scorer, self.view.stage
        )
        self.updater = Updater(config, self.algorithm, self.policy, self.optimizer, folder, self.view.stage)
        how = Sampling(sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k)
        self.recompute_old = dtype != torch.float32 and how.whole
        self.done = 0  # steps
        self.tokens_total = 0
        self.starved = 0  # steps in a row
        self.evals: list[dict[str, Any]] = []  # {"step", "mean", "low", "high"}
        self.seconds_before = 0.0  # of this run, before it was resumed
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.begin = time.perf_counter()
        self.saved = 0  # step of the newest checkpoint
        self.now = "the first evaluation"  # what a signal waits for
        self.stopped_by: str | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    def _check_problems(self) -> None:
        """What can be known to be wrong before any work is done."""
        name, train = self.config.task.name, self.task.train
        if not self.problems:
            raise ValueError(f"task {name!r} has no held-out problems: name some with --task.test")
        if not len(train):
            raise ValueError(f"task {name!r} has no problems to train on")
        known = train[:64] if len(train) >= ENDLESS else train
        check_fit(self.policy, [*known, *self.problems], self.config)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, logs: RunLogs) -> dict[str, Any]:
        try:
            with self._stoppable():
                self._loop(logs)
            summary = self.summary(*self._outcome())
            write_summary(self.folder, summary)
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt)
            message = f"stopped at once; {self._resuming}" if at_once else _text(error)
            with contextlib.suppress(OSError):  # the disk may be what failed
                write_summary(self.folder, self.summary("stopped" if at_once else "failed", message))
            if isinstance(error, EXPECTED):
                raise Failed(message) from error
            if at_once:
                self.view.message(message, "warning")
            raise
        if self.config.log.report:
            self._report()
        if summary["message"]:
            self.view.message(summary["message"], "warning")
        return summary

    def _loop(self, logs: RunLogs) -> None:
        if self.done == 0:
            self._begin(logs)
        while self.done < self.config.steps and self.stopped_by is None:
            self.step(self.done + 1, logs)
            if self.starved >= MAX_STARVED:
                break
        if self.stopped_by is not None and self.done > self.saved:
            self.save(logs)

    def _outcome(self) -> tuple[str, str]:
        """The run's status, and what there is to say about it."""
        if self.starved >= MAX_STARVED:
            return "finished", self._starvation()
        if self.stopped_by is not None and self.done < self.config.steps:
            return "stopped", f"stopped by {self.stopped_by} after step {self.done}; {self._resuming}"
        return "finished", ""

    @property
    def _resuming(self) -> str:
        return f"go on with: rpg train --resume --output {shlex.quote(self.config.output)}"

    def step(self, step: int, logs: RunLogs) -> None:
        """One batch of rollouts, trained on; its row of metrics; an evaluation and a checkpoint where they are due."""
        begin = time.perf_counter()
        self.now = f"step {step}"
        experience = self.collector.collect(step)
        for text in experience.messages:
            self.view.message(f"reward function: {text}", "warning")
        trained = time.perf_counter()
        row = experience.metrics()
        if experience.starved:
            self.starved += 1
            self.view.message(f"step {step}: {self._lacking(experience)}; nothing learnt", "warning")
            advantages = None
        else:
            self.starved = 0
            metrics, advantages = self._learn(experience, step)
            row |= metrics
        for text in self.updater.messages:
            self.view.message(text, "warning")
        self.updater.messages.clear()
        seconds = experience.seconds | {"train": time.perf_counter() - trained}
        self.done = step
        self.tokens_total += int(row["tokens"])
        row |= {"tokens_total": self.tokens_total}
        self._write_samples(logs, step, experience, advantages)

        last = step == self.config.steps or self.starved >= MAX_STARVED
        due = self.config.eval.every and step % self.config.eval.every == 0
        if (due or last) and not self._hopeless:
            start = time.perf_counter()
            row |= self._evaluate(step, logs)
            seconds["eval"] = time.perf_counter() - start
        whole = time.perf_counter() - begin
        row |= {f"time/{name}": value for name, value in seconds.items()} | {"time/step": whole}
        row |= {"speed/tokens_per_s": row["tokens"] / whole, "memory/peak_gb": peak_memory_gb()}
        row = {"step": step, **row}
        logs.metrics(row)
        self.view.step(row)
        if self._hopeless:  # nothing is saved: the last checkpoint is from before the trouble
            raise Failed(
                f"{self.updater.bad_steps} optimiser steps in a row had a loss or gradient that is not finite. "
                f"Their batches are in {self.folder / 'bad'}; lower optim.lr, or look at the rewards"
            )
        every = self.config.checkpoint.every
        if (every and step % every == 0) or last:
            self.save(logs)

    @property
    def _hopeless(self) -> bool:
        return self.updater.bad_steps >= self.config.optim.max_bad_steps

    def _learn(self, experience: Experience, step: int) -> tuple[dict[str, float], list[float]]:
        policy, micro = self.policy, self.config.optim.micro_tokens
        batch = make_batch(experience.groups, policy.tokenizer.pad_token_id, policy.device)
        self.view.stage("log-probabilities")
        old_BT = batch_logp(policy, batch, micro) if self.recompute_old else None
        ref_BT = self.reference.logp(batch, micro)
        needs = "ref_logp" in self.algorithm.loss.needs or self.algorithm.advantage.beta > 0
        batch = prepared(batch, old_BT, ref_BT, needs)
        greedy = [group.greedy or 0.0 for group in experience.groups] if self.collector.greedy else None
        batch = with_advantages(batch, self.algorithm.advantage, greedy)
        metrics = self.updater.update(batch, step)
        renewed = self.reference.after_step(step, policy, metrics.get("kl/ref"))
        if self.reference.policy is not None:
            metrics["reference/updated"] = float(renewed)
        assert batch.advantage is not None
        advantage = batch.advantage if batch.advantage.dim() == 1 else batch.advantage[:, 0]
        return metrics, advantage.tolist()

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    def _begin(self, logs: RunLogs) -> None:
        """The row of step 0: where the model begins."""
        row = self._evaluate(0, logs) if self.problems else {}
        logs.metrics({"step": 0, **row})
        self.view.step({"step": 0, **row})
        write_summary(self.folder, self.summary("running", ""))

    def _evaluate(self, step: int, logs: RunLogs) -> dict[str, float]:
        with averaged_weights(self.optimizer):
            found = evaluate(
                self.policy, self.engine, self.scorer, self.task.name, self.problems, self.config, watch=self.view.stage
            )
        logs.samples(step, found.samples)
        self.collector.count(found.failures)
        for text in found.messages:
            self.view.message(f"reward function: {text}", "warning")
        self.evals.append({"step": step, "mean": found.mean.mean, "low": found.mean.low, "high": found.mean.high})
        return found.metrics()

    def _write_samples(self, logs: RunLogs, step: int, experience: Experience, advantages: list[float] | None) -> None:
        groups = experience.groups or experience.sampled
        rows, i = [], 0
        for g, group in enumerate(groups[: self.config.log.samples]):
            for response in group.responses:
                rows.append(
                    {
                        "split": "train",
                        "group": g,
                        "prompt": group.problem.prompt,
                        "answer": group.problem.answer,
                        "level": group.problem.level,
                        "response": response.text,
                        "reward": response.reward,
                        "advantage": advantages[i] if advantages is not None else 0.0,
                        "length": len(response.rollout.tokens),
                        "finished": response.rollout.finished,
                    }
                )
                i += 1
        if rows:
            logs.samples(step, rows)

    def _lacking(self, experience: Experience) -> str:
        m = experience.metrics()
        return (
            f"none of {len(experience.sampled)} groups had unequal rewards "
            f"({m['groups/all_solved']:.0%} all solved, {m['groups/none_solved']:.0%} none solved)"
        )

    def _starvation(self) -> str:
        return (
            f"ended after step {self.done}: for {MAX_STARVED} steps no group had unequal rewards, so there is nothing "
            "to learn. If all are solved the task is done; if none are, it is too hard for this model: try easier "
            "problems, more rollout.samples or a higher rollout.temperature"
        )

    # ---- checkpoints, summary, report --------------------------------------------------------------------------------

    def save(self, logs: RunLogs) -> None:
        self.view.stage("saving")
        tensors = {"optimizer": optimizer_tensors(self.optimizer, self.policy.parameters())}
        tensors["parameters"] = {name: p.detach() for name, p in self.policy.parameters()}
        if self.reference.policy is not None:
            tensors["reference"] = self.reference.tensors()
        state = {
            "step": self.done,
            "tokens_total": self.tokens_total,
            "starved": self.starved,
            "bad_steps": self.updater.bad_steps,
            "cursor": asdict(self.collector.cursor),
            "reference": self.reference.state(),
            "evals": self.evals,
            "started": self.started,
            "seconds": self._seconds(),
            "threads": torch.get_num_threads(),
            "config": flat(self.config),
        }
        logs.sync()
        root = self.folder / "checkpoints"
        checkpoint.save(root, self.done, self._write_model, tensors, state)
        keep = self.config.checkpoint
        checkpoint.prune(root, keep.keep, self._best_step() if keep.best else None, newest=self.done)
        write_summary(self.folder, self.summary("running", ""))
        self.saved = self.done

    def _write_model(self, folder: Path) -> None:
        with averaged_weights(self.optimizer):  # the parameters themselves, to go on from, are saved beside it
            self.policy.save(folder)

    def load(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        then, now = state["config"], json_like(flat(self.config))
        keys = {key for key in (*then, *now) if not key.startswith(FREE)}
        changed = {key for key in keys if then.get(key) != now.get(key)}
        if changed:
            raise ValueError(
                f"cannot resume {self.folder} with other settings than its checkpoint's: {', '.join(sorted(changed))}"
            )
        if state["threads"] != torch.get_num_threads():
            self.view.message(
                f"the checkpoint was made with {state['threads']} threads, this is {torch.get_num_threads()}: "
                "results will differ in the last bits",
                "warning",
            )
        with torch.no_grad():
            stored = found.tensors("parameters")
            for name, p in self.policy.parameters():
                p.copy_(stored[name])
        load_optimizer(self.optimizer, self.policy.parameters(), found.tensors("optimizer"))
        tensors = found.tensors("reference") if self.reference.policy is not None else {}
        self.reference.load(state["reference"], tensors)
        self.collector.cursor = Cursor(**state["cursor"])
        self.updater.bad_steps, self.starved = state["bad_steps"], state["starved"]
        self.saved = found.step
        self.done, self.tokens_total, self.evals = state["step"], state["tokens_total"], state["evals"]
        self.started, self.seconds_before = state["started"], state["seconds"]

    def _best_step(self) -> int | None:
        saved = set(checkpoint.found(self.folder / "checkpoints"))
        scored = [e for e in self.evals if e["step"] in saved]
        return max(scored, key=lambda e: (e["mean"], e["step"]))["step"] if scored else None

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begin

    def summary(self, status: str, message: str) -> dict[str, Any]:
        import transformers

        config = self.config
        found: dict[str, Any] = {
            "name": self.folder.name,
            "algorithm": config.algorithm,
            "model": config.model,
            "parameters": sum(p.numel() for p in self.policy.model.parameters()),
            "task": self.task.name,
            "seed": config.seed,
            "device": str(self.policy.device),
            "steps": config.steps,
            "step": self.done,
            "status": status,
            "message": message,
            "started": self.started,
            "seconds": self._seconds(),
            "tokens_total": self.tokens_total,
            "peak_memory_gb": peak_memory_gb(),
            "reward_failures": self.collector.cursor.failures,
            "eval": {},
            "versions": {
                "rpg": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }
        if self.evals:
            first, last = self.evals[0], self.evals[-1]
            best = max(self.evals, key=lambda e: (e["mean"], -e["step"]))
            found["eval"][self.task.name] = {
                "metric": f"mean@{config.eval.k}",
                "first": first["mean"],
                "last": last["mean"],
                "last_low": last["low"],
                "last_high": last["high"],
                "best": best["mean"],
                "best_step": best["step"],
            }
        return found

    def _report(self) -> None:
        from ..report import read_run, write

        try:
            write([read_run(self.folder)], self.folder / "report.html")
        except OSError as error:  # the run itself is whole
            self.view.message(f"no report.html: {_text(error)}", "warning")

    # ---- signals -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the present step; a second one ends it at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopped_by is not None:
                raise KeyboardInterrupt
            self.stopped_by = signal.Signals(number).name
            text = f"{self.stopped_by}: finishing {self.now}, then saving (again: stop at once)"
            # from a thread: the main one may be in the middle of a print, which would lose this one
            threading.Thread(target=self.view.message, args=(text, "warning"), daemon=True).start()

        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, stop)
        except ValueError:  # not the main thread: the caller's signals stay as they are
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _text(error: BaseException) -> str:
    """In one line; of an error that nobody expects, with its name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (Failed, *EXPECTED)) and text else f"{type(error).__name__}: {text}"


def json_like(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))


def peak_memory_gb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
