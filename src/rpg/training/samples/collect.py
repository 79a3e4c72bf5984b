"""Prompts -> rollouts -> verified rewards -> groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from time import perf_counter
from typing import Any, Protocol

import torch

from ...distributed.context import QUIET, RunContext
from ...distributed.split_work import generate, score
from ...loss.advantages import soft_overlong_penalty
from ...loss.methods import Method
from ...models.policy import Policy
from ...rewards.failing import added
from ...rewards.scoring import CORRECT, Calls
from ...rollout import Engine, Rollout
from ...run.config import Config
from ...run.seeds import permutation, stream
from ...tasks import ENDLESS, Problem, Scorer, Scores, Task
from ...tasks.reward import reward_range
from ...tasks.templates import WRAPPED, fill
from ..progress import SamplingPosition

UNEQUAL = {"correct": "right and wrong responses", "reward": "unequal rewards"}
LONG_IN_A_ROW = 1000  # prompts without end that are all too long, after which it is no accident


@dataclass(frozen=True)
class Response:
    rollout: Rollout
    text: str
    score: float  # what the reward function said, or the sum of several
    penalty: float = 0.0  # of an overlong response, at most 0
    solved: bool = False
    parts: dict[str, float] = field(default_factory=dict)  # of a score that is a sum, without their weights

    @property
    def reward(self) -> float:
        return self.score + self.penalty

    def row(self, problem: Problem, group: int, **more: Any) -> dict[str, Any]:
        """Of samples.jsonl."""
        return {
            "group": group,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "level": problem.level,
            "response": self.text,
            "reward": self.reward,
            "solved": self.solved,
            **more,
            "length": len(self.rollout.tokens),
            "finished": self.rollout.finished,
        }


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    problem: Problem
    prompt_ids: list[int]
    responses: list[Response]
    greedy: float | None = None  # reward of the most probable response, where the algorithm needs it
    index: int = -1  # of the problem in the task's training set
    number: int = -1  # of the group in the run
    step: int = 0  # in which it was sampled to its end
    uses: int = 0  # steps that have been trained on it

    def informative(self, by: str = "reward") -> bool:
        """Whether its responses differ in what counts as solved (``correct``), or in what the reward function said.

        A penalty on their length alone is nothing to learn.
        """
        if by == "correct":
            return 0 < self.share_solved() < 1
        return max(r.score for r in self.responses) - min(r.score for r in self.responses) > 1e-9

    def share_solved(self) -> float:
        return sum(r.solved for r in self.responses) / len(self.responses)


@dataclass(frozen=True)
class Experience:
    groups: list[Group]  # what is trained on
    sampled: list[Group]  # all that was sampled for it
    rounds: int
    failures: dict[str, int]  # reward calls that raised, timed out, or gave no finite number
    messages: list[str]
    seconds: dict[str, float]
    signal: str = "reward"  # what tells groups with signal from those without: correct or reward
    calls: dict[str, Calls] = field(default_factory=dict)  # of the reward functions, by name
    more: dict[str, float] = field(default_factory=dict)  # metrics of what is under way, where sampling runs ahead
    dropped: list[Group] = field(default_factory=list)  # that the policy has left too far to learn from

    @property
    def starved(self) -> bool:
        return not self.groups

    def lags(self, step: int) -> list[int]:
        """Of each token trained on: how many steps of training lie between its draw and now."""
        lags: list[int] = []
        for group in self.groups:
            for r in group.responses:
                versions = r.rollout.versions
                drawn = [group.step - 1] * len(r.rollout.tokens) if versions is None else versions
                lags += [step - 1 - version for version in drawn]
        return lags

    @property
    def scores(self) -> list[float]:
        """Of all responses, without penalties."""
        return [response.score for group in self.sampled for response in group.responses]

    @property
    def greedy(self) -> list[float] | None:
        """Reward of each group's most probable response, where the algorithm needs it."""
        rewards = [group.greedy for group in self.groups if group.greedy is not None]
        return rewards or None

    def why_starved(self) -> str:
        m = self.metrics()
        if self.dropped:
            return (
                f"all {len(self.dropped)} groups were dropped: the policy has left them (offpolicy.min_ess, max_kl; "
                "less rollout.ahead, offpolicy.reuse or optim.lr)"
            )
        return (
            f"none of {len(self.sampled)} groups had {UNEQUAL[self.signal]} "
            f"({m['groups/all_solved']:.0%} all solved, {m['groups/none_solved']:.0%} none solved)"
        )

    def samples(self, groups: int, advantages: Sequence[float] | None) -> list[dict[str, Any]]:
        """Rows of samples.jsonl; advantages are those of all responses trained on, in order."""
        shown = [(g, group, r) for g, group in enumerate(self._shown) for r in group.responses]
        rows = []
        for i, (g, group, response) in enumerate(shown):
            if g < groups:
                more: dict[str, Any] = {"parts": response.parts} if response.parts else {}
                more["advantage"] = 0.0 if advantages is None else advantages[i]
                rows.append({"split": "train", **response.row(group.problem, g, **more)})
        return rows

    def metrics(self) -> dict[str, float]:
        shown = self.sampled or self._shown  # where sampling runs ahead, a step may train on what had ended before
        responses = [r for group in shown for r in group.responses]
        rewards = torch.tensor([r.reward for r in responses], dtype=torch.float64)
        lengths = torch.tensor([len(r.rollout.tokens) for r in responses], dtype=torch.float64)
        solved = [group.share_solved() for group in shown]
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(unbiased=False)),
            "reward/solved": sum(r.solved for r in responses) / len(responses),
            **self._solved_by_source(),
            **{f"reward/part/{p}": sum(r.parts[p] for r in responses) / len(responses) for p in responses[0].parts},
            "reward/overlong": sum(r.penalty for r in responses) / len(responses),
            "reward/failed": sum(self.failures.values()),
            "groups/kept": len(self.groups),
            "groups/sampled": len(self.sampled),
            "groups/all_solved": sum(s == 1 for s in solved) / len(solved),
            "groups/none_solved": sum(s == 0 for s in solved) / len(solved),
            "groups/rounds": self.rounds,
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated": sum(not r.rollout.finished for r in responses) / len(responses),
            "tokens": float(lengths.sum()) if self.sampled else 0.0,
            **self._sampled_for_one(),
            **self.more,
        }

    @property
    def _shown(self) -> list[Group]:
        return self.groups or self.dropped or self.sampled

    def _sampled_for_one(self) -> dict[str, float]:
        """Groups sampled for each that is new and trained on."""
        new = sum(group.uses == 0 for group in self.groups)
        return {"groups/sampled_for_one": len(self.sampled) / new} if new else {}

    def _solved_by_source(self) -> dict[str, float]:
        """Where this step has problems from several."""
        shares: dict[str, list[float]] = {}
        for group in sorted(self.sampled, key=lambda group: group.problem.source):
            shares.setdefault(group.problem.source or "other", []).append(group.share_solved())
        return {f"reward/solved/{s}": sum(x) / len(x) for s, x in shares.items()} if len(shares) > 1 else {}


class Sampler:
    """Prompts -> rollouts -> scored responses, for training and for evaluations. Of several ranks each does a share."""

    def __init__(self, policy: Policy, engine: Engine, scorer: Scorer, config: Config, context: RunContext = QUIET):
        self.policy, self.engine, self.scorer, self.config, self.context = policy, engine, scorer, config, context

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, temperature: float, seed: int, stage: str, **truncation: float
    ) -> list[list[Rollout]]:
        total, world = len(prompts) * n, self.context.world
        return generate(
            world,
            self.engine,
            prompts,
            n,
            self.config.rollout.max_new_tokens,
            temperature,
            seed,
            progress=lambda done: self.context.stage(f"{stage} {min(total, done * world.size)}/{total}"),
            **truncation,
        )

    def score(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> tuple[list[Response], Scores]:
        """``problems``: of each rollout its own."""
        texts = [self.policy.decode(rollout.tokens) for rollout in rollouts]
        items = [(text, problem.answer, problem.prompt) for problem, text in zip(problems, texts, strict=True)]
        scores = score(self.context.world, self.scorer, items)
        return scored(rollouts, texts, scores), scores


def scored(rollouts: Sequence[Rollout], texts: Sequence[str], scores: Scores) -> list[Response]:
    return [
        Response(
            rollout=rollout,
            text=texts[i],
            score=scores.values[i],
            solved=scores.solved[i],
            parts={name: values[i] for name, values in scores.parts.items()},
        )
        for i, rollout in enumerate(rollouts)
    ]


class Choice(Protocol):
    """Which problems are sampled: see choice.py."""

    def takes(self, place: int, index: int, problem: Problem, step: int) -> bool: ...

    def note(self, groups: Sequence[Group], step: int) -> None: ...


class Collector:
    """Samples what a step trains on."""

    choice: Choice | None = None  # None: every problem in its turn

    def __init__(
        self, config: Config, method: Method, sampler: Sampler, task: Task, position: SamplingPosition | None = None
    ):
        self.config, self.method, self.sampler, self.task = config, method, sampler, task
        self.position = SamplingPosition() if position is None else position
        self.signal = signal_of(config)
        self.step = 0  # that is being sampled
        rollout = config.rollout
        if method.overlong and not 0 < rollout.overlong_tokens < rollout.max_new_tokens:
            raise ValueError(
                f"rollout.overlong_tokens must be below max_new_tokens, {rollout.max_new_tokens}; "
                f"got {rollout.overlong_tokens} (--rollout.overlong false: no penalty)"
            )
        self._shuffled = lru_cache(maxsize=1)(self._shuffle)

    def collect(self, step: int, fresh: int | None = None) -> Experience:
        """Groups for one step: ``fresh`` of them, or rollout.prompts.

        With dynamic sampling, rounds of prompts until enough groups are informative.

        With a least share of groups with signal, rounds until there are so many, and those without fill up the rest.
        """
        rollout, dynamic, position = self.config.rollout, self.method.dynamic, self.position
        self.step, most = step, rollout.prompts if fresh is None else fresh
        wanted = most if dynamic else math.ceil(self.method.min_signal * most)
        kept: list[Group] = []  # with signal
        sampled: list[Group] = []
        failures: Counter[str] = Counter()
        calls: list[dict[str, Calls]] = []
        messages: list[str] = []
        seconds = {"rollout": 0.0, "reward": 0.0}
        rounds = 0
        while rounds == 0 or (len(kept) < wanted and rounds < rollout.max_rounds):
            prompts = most if rounds == 0 else wanted - len(kept)
            if dynamic or rounds:
                prompts = math.ceil(prompts * min(rollout.oversample / max(position.keep_rate, 0.1), 4))
            groups, scores = self._sample(prompts, stream(self.config.seed, "rollout", step, rounds), seconds)
            groups = [replace(group, step=step) for group in groups]
            rounds += 1
            sampled += groups
            kept += [group for group in groups if group.informative(self.signal)]
            failures.update(scores.failures)
            calls.append(scores.calls)
            messages += scores.messages
        position.keep_rate = 0.7 * position.keep_rate + 0.3 * len(kept) / len(sampled)
        position.count_failures(failures)
        if self.choice is not None:
            self.choice.note(sampled, step)
        trained = kept if dynamic else self._filled_up(kept, sampled, most)
        trained, every = trained[:most], added(calls)
        return Experience(trained, sampled, rounds, failures, messages, seconds, self.signal, every)

    def _filled_up(self, kept: list[Group], sampled: list[Group], most: int) -> list[Group]:
        """As they were sampled, and of more than a step's number those with signal first."""
        spare = most - len(kept)
        chosen, without = [], 0
        for group in sampled:
            has_signal = group.informative(self.signal)
            without += not has_signal
            if has_signal or without <= spare:
                chosen.append(group)
        return chosen

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def _next(self, count: int) -> list[tuple[int, Problem, list[int]]]:
        """The next problems, their places in the task and their tokens: endless tasks in their order, files in a new
        order in every pass.

        Prompts that are too long are left out, and those that are not chosen.
        """
        chosen: list[tuple[int, Problem, list[int]]] = []
        size, long = len(self.task.train), 0
        endless = size >= ENDLESS
        while len(chosen) < count:
            i = self.position.problem
            self.position.problem += 1
            index = i if endless else int(self._shuffled(i // size)[i % size])
            problem = self.task.train[index]
            if self.choice is not None and not self.choice.takes(i, index, problem, self.step):
                long = 0  # it is left out for what came of it: it fits
                continue
            try:
                chosen.append((index, problem, encode_prompt(self.sampler.policy, problem, self.config)))
                long = 0
            except PromptTooLong:
                long += 1
                if long >= (LONG_IN_A_ROW if endless else 2 * size):
                    raise
        return chosen

    def _shuffle(self, epoch: int) -> Any:
        return permutation(len(self.task.train), self.config.seed, "problems", epoch)

    # ---- rollouts and rewards ----------------------------------------------------------------------------------------

    def _sample(self, count: int, seed: int, seconds: dict[str, float]) -> tuple[list[Group], Scores]:
        rollout, n, sample = self.config.rollout, self.config.rollout.samples, self.sampler.sample
        start = perf_counter()
        chosen = self._next(count)
        problems, prompts = [problem for _, problem, _ in chosen], [ids for _, _, ids in chosen]
        truncation = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
        rollouts = sample(prompts, n, rollout.temperature, seed, "rollout", kept=True, **truncation)
        greedy = sample(prompts, 1, 0.0, seed, "greedy rollout") if self.method.needs_greedy else []
        seconds["rollout"] += perf_counter() - start

        start = perf_counter()
        self.sampler.context.stage("scoring")
        repeated = [problem for problem in problems for _ in range(n)] + (problems if greedy else [])
        responses, scores = self.sampler.score(repeated, list(chain(*rollouts, *greedy)))
        responses = self.penalised(responses)
        baselines = [response.reward for response in responses[len(chosen) * n :]] if greedy else [None] * len(chosen)
        first, self.position.number = self.position.number, self.position.number + len(chosen)
        groups = [
            Group(problem, ids, responses[i * n : (i + 1) * n], baselines[i], index, first + i)
            for i, (index, problem, ids) in enumerate(chosen)
        ]
        seconds["reward"] += perf_counter() - start
        return groups, scores

    def penalised(self, responses: Sequence[Response]) -> list[Response]:
        """With the overlong penalty, where the method has one."""
        if not self.method.overlong:
            return list(responses)
        limit, zone = self.config.rollout.max_new_tokens, self.config.rollout.overlong_tokens
        lengths = torch.tensor([len(response.rollout.tokens) for response in responses])
        penalties = soft_overlong_penalty(lengths, limit, zone)
        return [replace(r, penalty=float(penalty)) for r, penalty in zip(responses, penalties, strict=True)]


def signal_of(config: Config) -> str:
    """What tells groups apart: ``correct`` or ``reward``. Who says what is correct: the task, or a part of the reward.

    A function of the user's that is the whole reward, or a task's of the user's, says how good a response is.
    """
    task, by = config.task, config.rollout.dynamic_by
    if by != "auto":
        return by
    if task.rewards:
        return "correct" if task.rewards.get(CORRECT) else "reward"
    return "correct" if reward_range(task.name, task.reward, {}) is not None else "reward"


class PromptTooLong(ValueError):
    pass


def encode_prompt(policy: Policy, problem: Problem, config: Config) -> list[int]:
    """The prompt's tokens, in its template; a prompt that is too long is an error."""
    ids = policy.encode(*prompt_parts(problem, config), options=config.task.chat_options)
    if len(ids) > config.rollout.max_prompt_tokens:
        limit = config.rollout.max_prompt_tokens
        raise PromptTooLong(
            f"a prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens={limit}: {problem.prompt[:60]!r}"
        )
    return ids


def prompt_parts(problem: Problem, config: Config) -> tuple[str, bool | None, str | None]:
    """(text, chat, system prompt): the run's settings go before what the dataset brings along."""
    task = config.task
    template = task.template if task.template is not None and problem.template != WRAPPED else problem.template
    text = fill(template, problem.prompt)
    return text, task.chat, (problem.system if task.system is None else task.system) or None
