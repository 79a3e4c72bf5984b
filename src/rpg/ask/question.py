"""A user's text as a problem: put as the task puts its own, with the answer where that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..run.config import Config
from ..tasks import Problem, Task, finite, load_task
from ..tasks.sources.datasets import DATASETS, dataset_name
from ..tasks.task import TaggedAnswer


@dataclass(frozen=True)
class Question:
    problem: Problem
    judge: Task | None  # None where its answer is not known


def question(
    config: Config, task: str | None, text: str | None, answer: str | None, number: int, warn: Callable[[str], None]
) -> Question:
    """``text`` as a problem of ``task``; None: the ``number``-th of its held-out problems. ``answer``: what the user
    says is right. A task that cannot be had leaves the text without a judge."""
    if task is None:
        if text is None:
            raise ValueError("give a prompt")
        if answer is not None:
            raise ValueError("an answer is judged by a task: name it with --task")
        return Question(Problem(text, ""), None)
    named = config.task
    try:
        judge = load_task(task, config.seed, named.test, named.prompt_key, named.answer_key, look=False)
    except ValueError as error:
        if text is None or answer is not None:
            raise
        warn(f"without rewards: {error}")
        row = DATASETS.get(dataset_name(task) or "")
        return Question(Problem(text, "", template=(row and row.template) or "plain"), None)
    return _held_out(judge, number) if text is None else _asked(judge, text, answer)


def _held_out(task: Task, number: int) -> Question:
    name, problems = next(iter(task.tests.items()))
    if not len(problems):
        raise ValueError(f"{name} has no held-out problems: give a prompt")
    return Question(problems[number % len(problems)], task)


def _asked(task: Task, text: str, answer: str | None) -> Question:
    """A problem of the task with this text has the answer, or the task works it out. Where neither does, the text is
    put as the task's first problem is."""
    found = _same(task, text) or (task.ask(text) if task.ask is not None else None)
    like = found or next(_first(task), Problem("", ""))
    if found is None:
        end = like.prompt[len(like.prompt.rstrip()) :]
        like = replace(like, prompt=text.rstrip() + end)
    if answer is None:
        return Question(like, None if found is None else task)
    if isinstance(like.answer, TaggedAnswer):
        raise ValueError(f"{task.name} judges by more than the answer's text: leave --answer out")
    return Question(replace(like, answer=answer), task)


def _same(task: Task, text: str) -> Problem | None:
    sets = (finite(problems) for problems in (*task.tests.values(), task.train))
    return next((p for problems in sets for p in problems if p.prompt.strip() == text.strip()), None)


def _first(task: Task) -> Iterator[Problem]:
    """Of each set."""
    for problems in (task.train, *task.tests.values()):
        yield from problems[:1]
