"""A task: problems to train on, problems held out, and a reward function that looks at the response alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ENDLESS = 2**31  # length of problems that are made when asked for


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    level: int = 0  # difficulty, where the task grades it
    template: str = "plain"  # how the prompt is put to the model, unless the run says otherwise: see templates.py
    system: str = ""  # system prompt that the dataset brings along
    source: str = ""  # the dataset it is from, where there are several


class Reward(Protocol):
    """What a response is worth. Responses with a reward above one half count as solved."""

    def __call__(self, response: str, answer: str, prompt: str) -> float: ...


@dataclass(frozen=True)
class Task:
    name: str
    train: Sequence[Problem]
    test: Sequence[Problem] | Mapping[str, Sequence[Problem]]  # held out; several sets by name
    reward: Reward | Callable[[str, str, str], float]
    trusted: bool = False  # the reward cannot hang or crash: it is called directly, not in a process of its own
    notes: tuple[str, ...] = ()  # what a user should know of the problems: duplicates, overlap; one line each

    @property
    def tests(self) -> dict[str, Sequence[Problem]]:
        """The held-out problems by name: evaluations are named after it."""
        return dict(self.test) if isinstance(self.test, Mapping) else {self.name: self.test}
