"""An answer that knows where it is from, for rewards that need more than its text. To everybody else it is the text."""

from __future__ import annotations

from typing import Any


class Tagged(str):
    """``str`` with a ``tag``; pickles with it. A copy by str(), strip() and the like is without."""

    tag: Any

    def __new__(cls, text: str, tag: Any) -> Tagged:
        made = super().__new__(cls, text)
        made.tag = tag
        return made

    def __reduce__(self) -> tuple[type[Tagged], tuple[str, Any]]:
        return Tagged, (str(self), self.tag)


def tag_of(answer: str) -> Any:
    if not isinstance(answer, Tagged):
        raise ValueError("the answer must come as the task gave it: this one is a copy, and its origin is lost")
    return answer.tag
