"""A task: problems to train on, problems held out, and a reward function that looks at the response alone."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..rewards.scoring import Reward

SURROGATE = re.compile("[\ud800-\udfff]")
ENDLESS = 2**31  # length of problems that are made when asked for


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    level: int = 0  # difficulty, where the task grades it
    template: str = "plain"  # how the prompt is put to the model, unless the run says otherwise: see templates.py
    system: str = ""  # system prompt that the dataset brings along
    source: str = ""  # the dataset it is from, where there are several

    def __post_init__(self) -> None:
        for text in (self.prompt, self.system):
            if not text.isascii() and SURROGATE.search(text):
                raise ValueError(f"no tokenizer reads half a surrogate pair: mend the prompt {ascii(text)[:60]}")


class TaggedAnswer(str):
    """An answer with a ``tag``, for rewards that need more than its text. To everybody else it is the text.

    It pickles with its tag. A copy by str(), strip() and the like is without.
    """

    tag: Any

    def __new__(cls, text: str, tag: Any) -> TaggedAnswer:
        answer = super().__new__(cls, text)
        answer.tag = tag
        return answer

    def __reduce__(self) -> tuple[type[TaggedAnswer], tuple[str, Any]]:
        return TaggedAnswer, (str(self), self.tag)


def tag_of(answer: str) -> Any:
    if not isinstance(answer, TaggedAnswer):
        raise ValueError("the answer must come as the task gave it: this one is a copy, and its origin is lost")
    return answer.tag


class Lazy(Sequence[Problem]):
    """Problems that are made when asked for, without end unless a subclass has a length of its own."""

    @abstractmethod
    def problem(self, index: int) -> Problem: ...

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self.problem(i) for i in range(*index.indices(len(self)))]
        return self.problem(index)


@dataclass(frozen=True)
class Task:
    name: str
    train: Sequence[Problem]
    test: Sequence[Problem] | Mapping[str, Sequence[Problem]]  # held out; several sets by name
    reward: Reward | Callable[[str, str, str], float]
    trusted: bool = False  # the reward cannot hang or crash: it is called directly, not in a process of its own
    ask: Callable[[str], Problem | None] | None = None  # a user's own text as a problem, where its answer can be known
    notes: tuple[str, ...] = ()  # what a user should know of the problems: duplicates, overlap; one line each

    @property
    def tests(self) -> dict[str, Sequence[Problem]]:
        """The held-out problems by name: evaluations are named after it."""
        return dict(self.test) if isinstance(self.test, Mapping) else {self.name: self.test}
