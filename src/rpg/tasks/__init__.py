"""Prompts and verifiers: tasks by name, from a file, or of your own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..names import choose
from .builtin import BUILTIN
from .files import load_file, split
from .importing import load_function
from .scoring import RewardError, Scorer, Scores
from .task import ENDLESS, Problem, Reward, Task
from .verify import verify

__all__ = ["ENDLESS", "Problem", "Reward", "RewardError", "Scorer", "Scores", "Task", "load_task", "verify"]

FILES = (".jsonl", ".json")


def load_task(name: str, seed: int = 0, test: str | None = None) -> Task:
    """A built-in task, a .jsonl or .json file, or ``my_task.py:make``, a function that returns a Task.

    ``test``: where to take the held-out problems from instead of the task's own.
    """
    task = _load(name, seed)
    if test is None:
        return task
    if test.endswith(FILES):
        return replace(task, test=load_file(test), test_name=Path(test).stem)
    other = _load(test, seed)
    return replace(task, test=other.test, test_name=other.name)


def _load(name: str, seed: int) -> Task:
    if name in BUILTIN:
        return BUILTIN[name](seed)
    if name.endswith(FILES):
        train, test = split(load_file(name))
        return Task(Path(name).stem, train, test, verify_reward)
    if ":" in name:
        make = load_function(name)
        try:
            made = make()
        except Exception as error:
            raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Task):
            raise ValueError(f"{name} must return a rpg.tasks.Task; it returned {type(made).__name__}")
        return made
    raise ValueError(f"{choose('task', name, BUILTIN)}, or a .jsonl file, or my_task.py:make")


def verify_reward(response: str, answer: str, prompt: str) -> float:
    """1 where the response's final answer is right."""
    return float(verify(response, answer))
