r"""Rewards that are sums: ``task.rewards`` gives each part a weight.

correct            the task's own reward; where it is a part, it alone decides what counts as solved
format             1 for a response in the form that the prompt's template asks for, else 0
my_reward.py:f     a function of your own, called as f(response, answer, prompt), sync or async
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from ..names import choose
from .answers import boxed, final_answer
from .scoring import CORRECT, Part
from .task import ENDLESS, Problem, Task
from .templates import template_text

FORMAT = "format"
OPEN, CLOSE = "<think>", "</think>"
ANSWER_LINE = re.compile(r"[*_]*+answer[*_]*+\s*+:[*_\s]*+[^*_\s]", re.IGNORECASE)


def make_reward(own: str | None, parts: Mapping[str, float], task: Task, template: str | None = None) -> Sequence[Part]:
    """What a Scorer takes: the function ``own``, or the weighted ``parts``, or the task's reward if neither is given.

    ``template`` is the run's, where it has one: ``format`` goes by it, else by those of the problems.
    """
    if own is not None and parts:
        raise ValueError(f"task.reward is the only reward: drop it, or put it into task.rewards ({own}: 1)")
    if own is not None:
        return (Part("", own),)
    if not parts:
        return (Part("", task.reward, trusted=task.trusted),)
    for name, weight in parts.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"task.rewards: the weight of {name} must be a finite number; got {weight!r}")
    if not any(parts.values()):
        raise ValueError("task.rewards: all weights are 0: there is nothing to learn")
    made, names = [], _names(parts)
    for given, weight in parts.items():
        name = names[given]
        if given == CORRECT:
            made.append(Part(name, task.reward, weight, task.trusted))
        elif given == FORMAT:
            asked = (template,) if template is not None else _templates(task)
            made.append(Part(name, partial(well_formed, asked=tuple(map(template_text, asked))), weight, trusted=True))
        elif ":" in given:
            made.append(Part(name, given, weight))
        else:
            known = choose("reward in task.rewards:", given, (CORRECT, FORMAT))
            raise ValueError(f"{known}, or a function of your own, file.py:name")
    return made


def _names(parts: Iterable[str]) -> dict[str, str]:
    """What metrics call them: correct, format, my_reward.score for rewards/my_reward.py:score unless two are alike."""
    short = {given: given.rpartition("/")[2].replace(".py:", ".").replace(":", ".") for given in parts}
    alike = list(short.values())
    return {given: name if alike.count(name) == 1 else given.replace("/", "_") for given, name in short.items()}


def _templates(task: Task) -> tuple[str, ...]:
    """Of the problems; of endless ones, of the first."""
    sets: list[Sequence[Problem]] = [task.train, *task.tests.values()]
    looked_at = chain.from_iterable(problems[:64] if len(problems) >= ENDLESS else problems for problems in sets)
    return tuple(dict.fromkeys(problem.template for problem in looked_at))


# ---- form ------------------------------------------------------------------------------------------------------------


def well_formed(response: str, answer: str, prompt: str, *, asked: Sequence[str] = ("",)) -> float:
    """1 for a response in the form that one of these templates asks for, whether the answer is right or wrong.

    A template with <think> in it asks for one block of thought, opened at the very beginning (or by the model's chat
    template: the opening tag may be missing) and closed once. One with \\boxed asks for a box with something in it,
    one with "Answer:" for a last line that begins so; others for an answer in any form that ``verify`` reads. The
    answer has to come after the thought.
    """
    return float(any(_fits(response, template) for template in asked))


def _fits(response: str, template: str) -> bool:
    thought, closed, rest = response.rpartition(CLOSE)
    if OPEN in template:
        opened = thought.lstrip().removeprefix(OPEN)
        if not closed or CLOSE in thought or OPEN in opened or OPEN in rest:
            return False
    if "\\boxed" in template:
        box = boxed(rest)
        return box is not None and bool(box[1].strip())
    if "Answer:" in template:
        lines = rest.rstrip().rsplit("\n", 1)
        return ANSWER_LINE.match(lines[-1].lstrip()) is not None
    return final_answer(rest) is not None
