r"""Rewards that are sums: ``task.rewards`` gives each part a weight.

correct            the task's own reward; where it is a part, it alone decides what counts as solved
format             1 for a response in the form that the prompt's template asks for, else 0
my_reward.py:f     a function of your own, called as f(response, answer, prompt), sync or async
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from ..console import choose
from ..rewards.scoring import CORRECT, Part
from ..verify import lenient_reward, verify_reward
from ..verify.answers import boxed, final_answer
from .sources.mixture import RewardByPart
from .task import ENDLESS, Problem, Task
from .templates import template_text

FORMAT = "format"
OPEN, CLOSE = "<think>", "</think>"
OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"
ANSWER_LINE = re.compile(r"[*_]*+answer[*_]*+\s*+:", re.IGNORECASE)
# space, punctuation, and what TeX has to make space and to change fonts
NOTHING = re.compile(r"(?:[\s.,;:$~{}*_`]|\\(?:[\s,;:!>()\[\]\\$]|q?quad(?![A-Za-z])|(?:text|math)[a-z]*+|\Z))*+")


def make_reward(
    function: str | None,
    parts: Mapping[str, float],
    task: Task,
    template: str | None = None,
    verifier: str = "strict",
) -> Sequence[Part]:
    """What a Scorer takes: the ``function``, or the weighted ``parts``, or the task's reward if neither is given.

    ``template`` is the run's, where it has one: ``format`` goes by it, else by those of the problems. A lenient
    ``verifier`` takes the place of ``verify`` in the task's reward.
    """
    functions(function, parts)
    if function is not None:
        return (Part("", function),)
    if verifier == "lenient":
        task = replace(task, reward=_lenient(task.reward, task.name))
    if not parts:
        return (Part("", task.reward, trusted=task.trusted),)
    terms, names = [], _names(parts)
    for given, weight in parts.items():
        name = names[given]
        if given == CORRECT:
            terms.append(Part(name, task.reward, weight, task.trusted))
        elif given == FORMAT:
            asked = (template,) if template is not None else _templates(task)
            terms.append(Part(name, partial(well_formed, asked=tuple(map(template_text, asked))), weight, trusted=True))
        else:
            terms.append(Part(name, given, weight))
    return terms


def _lenient(reward: Any, name: str) -> Any:
    if isinstance(reward, RewardByPart):
        return RewardByPart([lenient_reward if part is verify_reward else part for part in reward.rewards])
    if reward is not verify_reward:
        raise ValueError(f"task.verifier lenient: {name} has a score of its own, which math-verify cannot replace")
    return lenient_reward


def functions(function: str | None, parts: Mapping[str, float]) -> list[str]:
    """The user's own functions in a reward, by name; what can be wrong about it without a task is a ValueError here."""
    if function is not None and parts:
        raise ValueError(f"task.reward is the only reward: drop it, or put it into task.rewards ({function}: 1)")
    for name, weight in parts.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"task.rewards: the weight of {name} must be a finite number; got {weight!r}")
    if parts and not any(parts.values()):
        raise ValueError("task.rewards: all weights are 0: there is nothing to learn")
    named = [function] if function is not None else [name for name in parts if name not in (CORRECT, FORMAT)]
    for name in named if function is None else ():
        if ":" not in name:
            unknown = choose("reward in task.rewards:", name, (CORRECT, FORMAT))
            raise ValueError(f"{unknown}, or a function of your own, file.py:name")
    return named


def reward_range(task: str, function: str | None, parts: Mapping[str, float]) -> tuple[float, float] | None:
    """Where a reward lies, from the names alone; None where a function of the user's own decides it."""
    if function is not None or any(name not in (CORRECT, FORMAT) for name in parts):
        return None
    own_task = any(re.search(r"\.py:\w+$", part.strip()) for part in task.split("+"))
    if own_task and (not parts or CORRECT in parts):
        return None
    weights = list(parts.values()) or [1.0]
    if not all(isinstance(weight, int | float) for weight in weights):
        return None  # refused by ``functions``
    return sum(min(weight, 0.0) for weight in weights), sum(max(weight, 0.0) for weight in weights)


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
    template: the opening tag may be missing) and closed once. One with <answer> asks for one block of it that ends the
    response, one with \\boxed for a box (in the block, where both are asked for), one with "Answer:" for a last line
    that begins so; others for an answer in any form that ``verify`` reads. The answer has to come after the thought,
    and to say something.
    """
    return float(any(_fits(response, template) for template in asked))


def _fits(response: str, template: str) -> bool:
    thought, closed, rest = response.rpartition(CLOSE)
    if OPEN in template:
        opened = thought.lstrip().removeprefix(OPEN)
        if not closed or CLOSE in thought or OPEN in opened or OPEN in rest:
            return False
    block = OPEN_ANSWER in template
    if block:
        rest = rest.rstrip()
        if rest.count(OPEN_ANSWER) != 1 or rest.count(CLOSE_ANSWER) != 1 or not rest.endswith(CLOSE_ANSWER):
            return False
        rest = rest.partition(OPEN_ANSWER)[2].removesuffix(CLOSE_ANSWER)
    if "\\boxed" in template:
        box = boxed(rest)
        return box is not None and _says(box[1])
    if block:
        return _says(rest)
    if "Answer:" in template:
        line = rest.rstrip().rsplit("\n", 1)[-1].lstrip()
        begun = ANSWER_LINE.match(line)
        return begun is not None and _says(line[begun.end() :])
    return _says(final_answer(rest) or "")


def _says(text: str) -> bool:
    """Whether there is anything in it."""
    return NOTHING.fullmatch(text) is None
