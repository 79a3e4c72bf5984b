"""Sampling that never stops: a step trains on the groups that ended first, and those under way go on in the next.

Rewards are computed while decoding goes on. When a group's rewards are looked at does not depend on how long they took:
so a run is the same run every time, and can be resumed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from torch import Tensor

from ...loss.methods import Method
from ...rewards.failing import added
from ...rollout import Sampling
from ...rollout.flight import Underway
from ...run.config import Config
from ...run.seeds import stream
from ...tasks import Scores, Task
from ..progress import SamplingPosition
from .collect import Collector, Experience, Group, Sampler, scored
from .stored import read_groups, read_underway, write_groups, write_underway


class StreamCollector(Collector):
    """Between two steps it holds what is under way, and groups that have ended and are still to be trained on."""

    def __init__(self, config: Config, method: Method, sampler: Sampler, task: Task, position: SamplingPosition):
        super().__init__(config, method, sampler, task, position)
        rollout = config.rollout
        self.sampling = Sampling(rollout.max_new_tokens, rollout.temperature)
        self.under_way: list[Underway] = []
        self.ready: list[Group] = []  # in the order in which they ended
        self.asked: dict[int, int] = {}  # the problem of each group under way
        self.pool = ThreadPoolExecutor(1, "rewards")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def collect(self, step: int, fresh: int | None = None) -> Experience:
        fresh = self.config.rollout.prompts if fresh is None else fresh
        self.step = step
        round_ = _Round(self, step, fresh)
        begin = perf_counter()
        self.under_way = self.sampler.engine.decode(  # type: ignore[attr-defined]
            self.under_way,
            self.config.rollout.samples,
            self.sampling,
            round_.feed,
            version=step - 1,
            keep_cache=self.config.rollout.cache == "kept",
        )
        round_.wait()
        seconds = {"rollout": perf_counter() - begin - round_.waited, "reward": round_.waited}
        trained, self.ready = self.ready[:fresh], self.ready[fresh:]
        failures = round_.failures
        self.position.count_failures(failures)
        if self.method.dynamic and round_.sampled:
            kept = sum(group.informative(self.signal) for group in round_.sampled)
            self.position.keep_rate = 0.7 * self.position.keep_rate + 0.3 * kept / len(round_.sampled)
        if self.choice is not None:
            self.choice.note(round_.sampled, step)
        return Experience(
            trained,
            round_.sampled,
            1,
            failures,
            round_.messages,
            seconds,
            self.signal,
            added(round_.calls),
            more={
                "groups/under_way": float(len(self.under_way)),
                "groups/ready": float(len(self.ready)),
                "slots/busy": self.sampler.engine.busy,  # type: ignore[attr-defined]
            },
        )

    def begin(self, count: int) -> list[Underway]:
        """New groups, with the next prompts."""
        groups = []
        for index, _, ids in self._next(count):
            number = self.position.number
            self.position.number += 1
            self.asked[number] = index
            seed = stream(self.config.seed, "group", number)
            groups.append(Underway.begin(number, ids, seed, self.config.rollout.samples))
        return groups

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self.sampler.engine.copy_cache()  # type: ignore[attr-defined]
        ready, ready_tensors = write_groups("ready", self.ready)
        under_way, tensors = write_underway("under_way", self.under_way)
        asked = {str(number): index for number, index in self.asked.items()}
        return {"ready": ready, "under_way": under_way, "asked": asked}, ready_tensors | tensors

    def load(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.ready = read_groups("ready", values["ready"], tensors, self.task)
        self.under_way = read_underway("under_way", values["under_way"], tensors)
        self.asked = {int(number): index for number, index in values["asked"].items()}


class _Round:
    """One step's sampling: what the engine is told, and what came of it."""

    def __init__(self, collector: StreamCollector, step: int, fresh: int):
        self.collector, self.step, self.fresh = collector, step, fresh
        rollout, position = collector.config.rollout, collector.position
        self.ahead = rollout.ahead * position.pace
        self.for_one = min(1 / max(position.keep_rate, 0.1), 4) if collector.method.dynamic else 1.0
        self.limit = max(fresh + 1, math.ceil(fresh * (1 + self.ahead))) * rollout.max_rounds
        """groups that end in a step, however few of them have signal"""
        self.sampled: list[Group] = []
        self.failures: Counter[str] = Counter()
        self.messages: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.waited = 0.0
        self._scoring: list[tuple[list[Underway], list[str], Future[Scores]]] = []

    def feed(self, over: list[Underway], under_way: int) -> list[Underway] | None:
        """Rewards of groups that ended are looked at when the next ones end, or when nothing else is to be done."""
        collector = self.collector
        self.wait()
        if over:
            self._score(over)
        if not under_way:
            self.wait()
        collector.sampler.context.stage(f"rollout {min(len(collector.ready), self.fresh)}/{self.fresh}")
        if len(collector.ready) >= self.fresh or len(self.sampled) >= self.limit:
            return None
        return collector.begin(max(0, self.most() - under_way))

    def most(self) -> int:
        """Groups that may be under way: for this step and what may be ahead of it, those without signal not counted.

        With ``ahead`` 1 and more that is always fresh · (1 + ahead): what has ended leaves its place to the next, so
        that no slot is empty. With 0.5 half of what has ended keeps its place, so that 1.5 batches have been begun by
        the end of a step.
        """
        scored = sum(len(groups) for groups, _, _ in self._scoring) / self.for_one
        ended = min(self.fresh, len(self.collector.ready) + scored)
        wanted = self.fresh * (1 + self.ahead) - ended * max(0.0, 1 - self.ahead)
        return max(1, math.ceil(wanted * self.for_one))

    def _score(self, over: list[Underway]) -> None:
        collector = self.collector
        texts, items = [], []
        for group in over:
            problem = collector.task.train[collector.asked[group.number]]
            for part in group.parts:
                texts.append(collector.sampler.policy.decode(part.tokens))
                items.append((texts[-1], problem.answer, problem.prompt))
        self._scoring.append((over, texts, collector.pool.submit(collector.sampler.scorer.score, items)))

    def wait(self) -> None:
        """For the rewards that are being computed."""
        begin = perf_counter()
        for groups, texts, future in self._scoring:
            self._take(groups, texts, future.result())
        self._scoring = []
        self.waited += perf_counter() - begin

    def _take(self, over: Sequence[Underway], texts: Sequence[str], scores: Scores) -> None:
        collector, n = self.collector, self.collector.config.rollout.samples
        rollouts = [rollout for group in over for rollout in group.rollouts()]
        responses = collector.penalised(scored(rollouts, texts, scores))
        for i, group in enumerate(over):
            index = collector.asked.pop(group.number)
            mine = responses[i * n : (i + 1) * n]
            problem = collector.task.train[index]
            made = Group(problem, group.prompt, mine, index=index, number=group.number, step=self.step)
            self.sampled.append(made)
            if not collector.method.dynamic or made.informative(collector.signal):
                collector.ready.append(made)
        self.failures.update(scores.failures)
        self.messages += scores.messages
        self.calls.append(scores.calls)
