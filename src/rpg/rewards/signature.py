"""Can a reward function be called as it will be: f(response, answer, prompt)? Asked before anything is sampled."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

PASSED = ("response", "answer", "prompt")
RIGHT = f"({', '.join(PASSED)})"
MEANINGS = {
    **dict.fromkeys(("response", "completion", "completions", "solution_str"), "response"),
    **dict.fromkeys(("answer", "ground_truth"), "answer"),
    **dict.fromkeys(("prompt", "prompts", "question"), "prompt"),
}  # names that say which of the three a parameter is for, here and in other trainers
LONGEST = 120  # characters of a signature that are shown


class WrongSignature(ValueError):
    """Its text is one line for the user."""


def check_signature(function: Callable[..., Any], spec: str = "") -> None:
    """Refuses what would fail, or mistake one text for another, in every call.

    What does not say how it is called (some functions in C) passes; a decorated function is asked as it is called, not
    as what it wraps.
    """
    name = function_name(spec or function)
    if isinstance(function, type):
        raise WrongSignature(f"reward {name} is a class: name a function, or a variable that holds an instance of it")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:
        return
    order = ""
    try:
        bound = signature.bind(*PASSED).arguments
        if all(MEANINGS.get(taken, given) == given for taken, given in bound.items() if isinstance(given, str)):
            return
        order = ", in this order"
    except TypeError:
        pass
    raise WrongSignature(
        f"reward {name} takes {_text(signature)}, but is called with {RIGHT}{order}; write {_line(function, name)}"
    )


def function_name(function: Any) -> str:
    """score; of one that is given by its name my_reward.py:score, without the folder."""
    if isinstance(function, str):
        return os.path.basename(function)
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _line(function: Any, name: str) -> str:
    """The right one."""
    if inspect.ismethod(getattr(function, "__call__", None)):  # noqa: B004  # an instance of a class
        return f"def __call__(self, {RIGHT[1:]}:"
    start = "async def" if inspect.iscoroutinefunction(function) else "def"
    short = name.rpartition(":")[2].rpartition(".")[2]
    return f"{start} {short if short.isidentifier() else 'score'}{RIGHT}:"


class _Default:
    def __repr__(self) -> str:
        return "…"


def _text(signature: inspect.Signature) -> str:
    """Without annotations and values, whose texts may be anything."""
    empty = inspect.Parameter.empty
    bare = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else _Default())
        for parameter in signature.parameters.values()
    ]
    text = str(inspect.Signature(bare))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
