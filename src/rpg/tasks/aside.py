"""Problems to choose settings by: taken out of those to train on, so that the test problems are looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from .sources.files import place_of
from .task import ENDLESS, Lazy, Problem, Task

FAR = ENDLESS // 2  # where an endless stream is read for them: no run gets there
LEFT = 2  # of problems that have an end, at most one in so many is set aside


def set_aside(task: Task, number: int) -> Task:
    """The task with so many of its training problems as its only test set, ``aside``, and without them in training.

    None of them is a test problem, nor a copy of one. Of problems that have an end, those whose prompts have the lowest
    hash: the same for every seed. Of endless ones, those that the stream has far behind.
    """
    tests = [problems for problems in task.tests.values() if len(problems) < ENDLESS]
    taken = {place_of(problem.prompt) for problems in tests for problem in problems}
    if len(task.train) >= ENDLESS:
        chosen = _from_far(task.train, number, taken)
        train: Sequence[Problem] = Without(task.train, {place_of(problem.prompt) for problem in chosen})
    else:
        chosen, train = _by_hash(task, number, taken)
    return replace(task, train=train, test={"aside": chosen})


def _from_far(problems: Sequence[Problem], number: int, taken: set[float]) -> list[Problem]:
    chosen: dict[float, Problem] = {}
    for i in range(FAR, FAR + 100 * number):
        problem = problems[i]
        if (at := place_of(problem.prompt)) not in taken:
            chosen.setdefault(at, problem)
        if len(chosen) == number:
            return list(chosen.values())
    raise ValueError(f"task.aside: only {len(chosen)} different problems could be found; give fewer than {number}")


def _by_hash(task: Task, number: int, taken: set[float]) -> tuple[list[Problem], list[Problem]]:
    places = [place_of(problem.prompt) for problem in task.train]
    lowest = sorted(set(places) - taken)[:number]
    most = len(set(places)) // LEFT
    if len(lowest) < number or number > most:
        most = min(most, len(lowest))
        raise ValueError(
            f"task.aside must be at most {most} of the {len(places)} problems of {task.name}; got {number}"
        )
    first = dict(reversed(list(zip(places, task.train, strict=True))))
    away = set(lowest)
    train = [problem for at, problem in zip(places, task.train, strict=True) if at not in away]
    return [first[at] for at in lowest], train


class Without(Lazy):
    """An endless stream in which another problem, from far behind, stands for each of those that are taken out."""

    def __init__(self, problems: Sequence[Problem], away: set[float]) -> None:
        self.problems, self._away = problems, away

    def problem(self, index: int) -> Problem:
        for i in count(index, FAR):
            problem = self.problems[i]
            if place_of(problem.prompt) not in self._away:
                return problem
        raise AssertionError
