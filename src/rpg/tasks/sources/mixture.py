"""``0.7*gsm8k + 0.3*math``: several tasks as one, in exact proportions."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Container, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, count
from typing import Any

from ..task import ENDLESS, Lazy, Problem, TaggedAnswer, Task, tag_of
from .datasets import dataset_name

SIGN = re.compile(r"\s\+\s")
WEIGHTED = re.compile(r"([-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf))\s*\*\s*(.+)", re.IGNORECASE)
CYCLE = 10_000  # most problems after which the pattern repeats: weights finer than this are rounded


def parse(text: str) -> list[tuple[float, str]]:
    """[(weight, name)]; weights are as they are given, 1 where none is."""
    parts = []
    for part in SIGN.split(text):
        match = WEIGHTED.fullmatch(part.strip())
        weight, name = (float(match[1]), match[2].strip()) if match else (1.0, part.strip())
        if not name:
            raise ValueError(f"task.name {text!r}: a + stands beside nothing; write 0.7*gsm8k + 0.3*math")
        if not 0 < weight < math.inf:
            raise ValueError(f"task.name {text!r}: the weight of {name} must be positive; got {weight:g}")
        parts.append((weight, name))
    names = [dataset_name(name) or name for _, name in parts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task.name {text!r}: {name} stands there twice; give it one weight")
    return parts


def unused(taken: Container[str], name: str, given: str) -> str:
    """The name, or else what the user wrote, or else that with a number."""
    numbered = (f"{given} ({number})" for number in count(2))
    return next(label for label in chain((name, given), numbered) if label not in taken)


def mix(tasks: Sequence[Task], weights: Sequence[float], seed: int = 0, given: Sequence[str] = ()) -> Task:
    """An endless stream of all of them. The test sets stay apart, each under its name, or where two have the same under
    what the user wrote, ``given``.
    """
    for task in tasks:
        if not len(task.train):
            raise ValueError(f"{task.name} has no problems to train on: it cannot be part of a mixture")
    rewards = tuple(task.reward for task in tasks)
    one = all(reward == rewards[0] for reward in rewards)
    tests: dict[str, Sequence[Problem]] = {}
    names: list[str] = []
    for part, task in enumerate(tasks):
        written = given[part] if given else task.name
        names.append(unused(names, task.name, written))
        for name, problems in task.tests.items():
            label = unused(tests, name, written)
            tests[label] = problems if one else TaggedProblems(problems, part, label)
    return Task(
        "+".join(names),
        Mixture([task.train for task in tasks], names, weights, seed, tagged=not one),
        tests,
        rewards[0] if one else RewardByPart(rewards),
        trusted=all(task.trusted for task in tasks),
        notes=tuple(note for task in tasks for note in task.notes),
    )


class Mixture(Lazy):
    """Problem i is from a part that the weights alone decide; a part's own problems come in shuffled passes."""

    def __init__(
        self,
        parts: Sequence[Sequence[Problem]],
        names: Sequence[str],
        weights: Sequence[float],
        seed: int = 0,
        tagged: bool = False,
    ) -> None:
        self.parts, self.names, self.seed = list(parts), list(names), seed
        self._tagged = tagged
        self._pattern = pattern(weights)
        self._counts = [self._pattern.count(part) for part in range(len(parts))]
        seen = [0] * len(parts)
        self._ranks = []  # how many of its part stand before it in the pattern
        for part in self._pattern:
            self._ranks.append(seen[part])
            seen[part] += 1
        self._orders: dict[int, tuple[int, list[int]]] = {}  # part -> (pass, order)

    def problem(self, index: int) -> Problem:
        turn, place = divmod(index, len(self._pattern))
        part = self._pattern[place]
        problem = self.parts[part][self._place(part, turn * self._counts[part] + self._ranks[place])]
        return with_tag(problem, part if self._tagged else None, self.names[part])

    def _place(self, part: int, number: int) -> int:
        """Of the part's number-th problem."""
        size = len(self.parts[part])
        if size >= ENDLESS:
            return number
        turn, place = divmod(number, size)
        if self._orders.get(part, (-1,))[0] != turn:
            order = list(range(size))
            random.Random(f"{self.seed}/{self.names[part]}/{turn}").shuffle(order)
            self._orders[part] = (turn, order)
        return self._orders[part][1][place]


class TaggedProblems(Lazy):
    """Problems whose answers carry the part that they are from."""

    def __init__(self, problems: Sequence[Problem], part: int, name: str) -> None:
        self.problems, self._part, self._name = problems, part, name

    def __len__(self) -> int:
        return len(self.problems)

    def problem(self, index: int) -> Problem:
        return with_tag(self.problems[index], self._part, self._name)


def finite(problems: Sequence[Problem]) -> Sequence[Problem]:
    """All that there are, of those that have an end; of endless ones none."""
    if isinstance(problems, Mixture):
        return [problem for part in problems.parts for problem in finite(part)]
    if isinstance(problems, TaggedProblems):
        return finite(problems.problems)
    return [] if len(problems) >= ENDLESS else problems


def with_tag(problem: Problem, part: int | None, name: str) -> Problem:
    answer = problem.answer if part is None else TaggedAnswer(problem.answer, (part, problem.answer))
    return replace(problem, answer=answer, source=problem.source or name)


class RewardByPart:
    """The reward of the part that the problem is from."""

    def __init__(self, rewards: Sequence[Any]) -> None:
        self.rewards = tuple(rewards)

    def __call__(self, response: str, answer: str, prompt: str) -> Any:
        part, untagged = tag_of(answer)
        return self.rewards[part](response, untagged, prompt)


def pattern(weights: Sequence[float]) -> list[int]:
    """The parts in turn, so that after n problems each has had its share of n, rounded up or down.

    The quota method of Balinski and Young (1975): of the parts that may have one more without exceeding their share
    rounded up, the one whose next is due first.
    """
    shares = _shares(weights)
    length = math.lcm(*(share.denominator for share in shares))
    taken, turns = [0] * len(shares), []
    for n in range(1, length + 1):
        allowed = [part for part, share in enumerate(shares) if taken[part] < share * n]
        part = min(allowed, key=lambda part: ((taken[part] + 1) / shares[part], part))
        taken[part] += 1
        turns.append(part)
    return turns


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """That sum to one, with a common denominator of at most CYCLE."""
    total = math.fsum(weights)
    for length in (*range(1, 1001), CYCLE):
        counts = [round(weight / total * length) for weight in weights]
        near = all(
            abs(weight / total * length - count) < 1e-9 * length for weight, count in zip(weights, counts, strict=True)
        )
        if near and min(counts) > 0:
            return [Fraction(count, length) for count in counts]
    counts = [max(1, count) for count in counts]
    counts[counts.index(max(counts))] += CYCLE - sum(counts)
    return [Fraction(count, CYCLE) for count in counts]
