"""Prompts -> rollouts -> verified rewards -> groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch

from ..distributed.ranks import ALONE, World
from ..distributed.split_work import generate, score
from ..loss.advantages import soft_overlong_penalty
from ..loss.methods import Algorithm
from ..models.policy import Policy
from ..rollout import Engine, Rollout
from ..run.config import Config
from ..run.seeds import permutation, stream
from ..tasks import ENDLESS, Problem, Scorer, Scores, Task
from ..tasks.templates import WRAPPED, fill

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


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    problem: Problem
    prompt_ids: list[int]
    responses: list[Response]
    greedy: float | None = None  # reward of the most probable response, where the algorithm needs it

    @property
    def informative(self) -> bool:
        """Whether the reward function told responses apart; a penalty on their length alone is nothing to learn."""
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

    @property
    def starved(self) -> bool:
        return not self.groups

    def lacking(self) -> str:
        """Why nothing was kept."""
        m = self.metrics()
        return (
            f"none of {len(self.sampled)} groups had unequal rewards "
            f"({m['groups/all_solved']:.0%} all solved, {m['groups/none_solved']:.0%} none solved)"
        )

    def samples(self, groups: int, advantages: Sequence[float] | None) -> list[dict[str, Any]]:
        """Rows of samples.jsonl; advantages are those of all responses trained on, in order."""
        shown = [(g, group, r) for g, group in enumerate(self.groups or self.sampled) for r in group.responses]
        return [
            {
                "split": "train",
                "group": g,
                "prompt": group.problem.prompt,
                "answer": group.problem.answer,
                "level": group.problem.level,
                "response": response.text,
                "reward": response.reward,
                "solved": response.solved,
                **({"parts": response.parts} if response.parts else {}),
                "advantage": advantages[i] if advantages is not None else 0.0,
                "length": len(response.rollout.tokens),
                "finished": response.rollout.finished,
            }
            for i, (g, group, response) in enumerate(shown)
            if g < groups
        ]

    def metrics(self) -> dict[str, float]:
        responses = [r for group in self.sampled for r in group.responses]
        rewards = torch.tensor([r.reward for r in responses], dtype=torch.float64)
        lengths = torch.tensor([len(r.rollout.tokens) for r in responses], dtype=torch.float64)
        solved = [group.share_solved() for group in self.sampled]
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
            "tokens": float(lengths.sum()),
        }

    def _solved_by_source(self) -> dict[str, float]:
        """Where this step has problems from several."""
        shares: dict[str, list[float]] = {}
        for group in sorted(self.sampled, key=lambda group: group.problem.source):
            shares.setdefault(group.problem.source or "other", []).append(group.share_solved())
        return {f"reward/solved/{s}": sum(x) / len(x) for s, x in shares.items()} if len(shares) > 1 else {}


@dataclass
class Cursor:
    """Where the sampling of a run has got to; part of its checkpoints."""

    problem: int = 0  # the next problem of the stream
    keep_rate: float = 1.0  # share of groups that were informative lately
    failures: dict[str, int] = field(default_factory=dict)


class Collector:
    """Samples what a step trains on. ``watch`` is told how far it is."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        engine: Engine,
        task: Task,
        scorer: Scorer,
        watch: Callable[[str], None] = lambda text: None,
        world: World = ALONE,
    ):
        self.config, self.policy, self.engine, self.task, self.scorer = config, policy, engine, task, scorer
        self.watch, self.world = watch, world
        sampling = config.rollout
        self.dynamic = algorithm.dynamic_sampling if sampling.dynamic is None else sampling.dynamic
        self.overlong = algorithm.overlong_penalty if sampling.overlong is None else sampling.overlong
        if self.overlong and not 0 < sampling.overlong_tokens < sampling.max_new_tokens:
            raise ValueError(
                f"rollout.overlong_tokens must be below max_new_tokens, {sampling.max_new_tokens}; "
                f"got {sampling.overlong_tokens} (--rollout.overlong false: no penalty)"
            )
        self.greedy = algorithm.advantage.kind == "greedy-baseline"
        self.cursor = Cursor()
        self._shuffled = lru_cache(maxsize=1)(self._shuffle)

    def collect(self, step: int) -> Experience:
        """Groups for one step. With dynamic sampling, rounds of prompts until enough groups are informative."""
        sampling = self.config.rollout
        kept: list[Group] = []
        sampled: list[Group] = []
        failures: dict[str, int] = {}
        messages: list[str] = []
        seconds = {"rollout": 0.0, "reward": 0.0}
        rounds = 0
        while len(kept) < sampling.prompts and rounds < (sampling.max_rounds if self.dynamic else 1):
            missing = sampling.prompts - len(kept)
            count = missing
            if self.dynamic:
                count = math.ceil(missing * min(sampling.oversample / max(self.cursor.keep_rate, 0.1), 4))
            groups, found = self._sample(count, stream(self.config.seed, "rollout", step, rounds), seconds)
            rounds += 1
            sampled += groups
            kept += [group for group in groups if group.informative or not self.dynamic]
            for name, number in found.failures.items():
                failures[name] = failures.get(name, 0) + number
            messages += found.messages
        informative = sum(group.informative for group in sampled) / len(sampled)
        self.cursor.keep_rate = 0.7 * self.cursor.keep_rate + 0.3 * informative
        self.count(failures)
        return Experience(kept[: sampling.prompts], sampled, rounds, failures, messages, seconds)

    def count(self, failures: Mapping[str, int]) -> None:
        """Of the whole run, evaluations included."""
        for name, number in failures.items():
            self.cursor.failures[name] = self.cursor.failures.get(name, 0) + number

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def _next(self, count: int) -> list[tuple[Problem, list[int]]]:
        """The next problems and their tokens: endless tasks in their order, files shuffled anew in every pass.

        Prompts that are too long are left out.
        """
        found: list[tuple[Problem, list[int]]] = []
        size, long = len(self.task.train), 0
        endless = size >= ENDLESS
        while len(found) < count:
            i = self.cursor.problem
            self.cursor.problem += 1
            problem = self.task.train[i if endless else int(self._shuffled(i // size)[i % size])]
            try:
                found.append((problem, encode_prompt(self.policy, problem, self.config)))
                long = 0
            except PromptTooLong:
                long += 1
                if long >= (LONG_IN_A_ROW if endless else 2 * size):
                    raise
        return found

    def _shuffle(self, epoch: int) -> Any:
        return permutation(len(self.task.train), self.config.seed, "problems", epoch)

    # ---- rollouts and rewards ----------------------------------------------------------------------------------------

    def _sample(self, count: int, seed: int, seconds: dict[str, float]) -> tuple[list[Group], Scores]:
        sampling = self.config.rollout
        start = perf_counter()
        chosen = self._next(count)
        problems, prompts = [problem for problem, _ in chosen], [ids for _, ids in chosen]
        total = len(prompts) * sampling.samples
        how = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        rollouts = generate(
            self.world,
            self.engine,
            prompts,
            sampling.samples,
            sampling.max_new_tokens,
            sampling.temperature,
            seed,
            progress=lambda done: self.watch(f"rollout {min(total, done * self.world.size)}/{total}"),
            **how,
        )
        greedy = None
        if self.greedy:
            greedy = generate(self.world, self.engine, prompts, 1, sampling.max_new_tokens, 0.0, seed)
        seconds["rollout"] += perf_counter() - start

        start = perf_counter()
        self.watch("scoring")
        flat = [(problem, r) for problem, group in zip(problems, rollouts, strict=True) for r in group]
        flat += [(problem, group[0]) for problem, group in zip(problems, greedy or [], strict=False)]
        texts = [self.policy.decode(r.tokens) for _, r in flat]
        items = [(text, p.answer, p.prompt) for (p, _), text in zip(flat, texts, strict=True)]
        scores = score(self.world, self.scorer, items)
        penalties = self._penalties([r for _, r in flat])
        responses = [
            Response(
                rollout=r,
                text=texts[i],
                score=scores.values[i],
                penalty=penalties[i],
                solved=scores.solved[i],
                parts={name: values[i] for name, values in scores.parts.items()},
            )
            for i, (_, r) in enumerate(flat)
        ]
        groups = [
            Group(
                problem,
                prompt,
                responses[i * sampling.samples : (i + 1) * sampling.samples],
                responses[total + i].reward if greedy else None,
            )
            for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
        ]
        seconds["reward"] += perf_counter() - start
        return groups, scores

    def _penalties(self, rollouts: Sequence[Rollout]) -> list[float]:
        limit, zone = self.config.rollout.max_new_tokens, self.config.rollout.overlong_tokens
        if not self.overlong:
            return [0.0] * len(rollouts)
        lengths = torch.tensor([len(r.tokens) for r in rollouts])
        return [float(x) for x in soft_overlong_penalty(lengths, limit, zone)]


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
    own = config.task
    template = own.template if own.template is not None and problem.template != WRAPPED else problem.template
    text = fill(template, problem.prompt)
    return text, own.chat, (problem.system if own.system is None else own.system) or None
