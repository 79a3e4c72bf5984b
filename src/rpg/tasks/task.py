"""A task: problems to train on, problems held out, and a reward function that looks at the response alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ENDLESS = 2**31  # length of problems that are made when asked for


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    level: int = 0  # difficulty, where the task grades it


class Reward(Protocol):
    """What a response is worth. Responses with a reward above one half count as solved."""

    def __call__(self, response: str, answer: str, prompt: str) -> float: ...


@dataclass(frozen=True)
class Task:
    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: Reward | Callable[[str, str, str], float]
    trusted: bool = False  # the reward cannot hang or crash: it is called directly, not in a process of its own
    test_name: str = ""  # of the held-out problems, where they are another task's

    @property
    def evaluated(self) -> str:
        """What evaluations are named after."""
        return self.test_name or self.name
