"""``gym:GENERATOR`` and ``gym:GENERATOR?option=value&…``: reasoning-gym's problems, scored by its own functions.

A problem belongs to one split for good, by a hash of its prompt, as with the built-in tasks. What is scored is the
final answer alone. reasoning-gym gives 1 to what is right and, in many generators, a part of it to what is not, up to
0.96 for a wrong board: half of that is the reward, so that only the whole counts as solved. A few of its scores give 1
to wrong answers too; the task says so in a note.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from ...console import choose, describe, install
from ...verify.answers import final_answer
from ..task import Lazy, Problem, TaggedAnswer, Task, tag_of
from .builtin import TEST, TRAIN, split_of

PREFIX = "gym:"
TEMPLATE = (
    "{prompt}\n\nThink step by step. Then write the final answer, and nothing else, between <answer> and </answer>."
)
BLOCK = 10_000  # problems of one generator; reasoning-gym makes problem i from seed + i
SPAN = {TRAIN: 4, TEST: 64}  # of reasoning-gym's problems, for one of ours: a tenth of them is held out
TRIES = 2000
NONSENSE = "none of these"

Options = tuple[tuple[str, str], ...]  # names and values, as they are written


def check(name: str) -> tuple[str, Options]:
    """(generator, options); one that there is not is a ValueError."""
    generator, _, query = name.removeprefix(PREFIX).partition("?")
    options = tuple(sorted(parse_qsl(query, keep_blank_values=True)))
    _check_options(generator, options)
    return generator, options


def load_gym(name: str, seed: int = 0) -> Task:
    generator, options = check(name)
    train = GymProblems(generator, options, TRAIN, seed)
    test = GymProblems(generator, options, TEST)
    reward = GymReward(generator, options)
    notes = _faults(reward, [train[0], train[1], test[0]])  # a generator that cannot be used fails here
    return Task(f"{PREFIX}{generator}", train, test, reward, notes=tuple(notes))


def _faults(reward: GymReward, problems: Sequence[Problem]) -> Iterator[str]:
    """What the generator's score takes for right and should not."""
    others = [*problems[1:], problems[0]]
    for what, answers in (
        ("nonsense", [NONSENSE] * len(problems)),
        ("the answer to another problem", [str(other.answer) for other in others]),
    ):
        pairs = [(given, p.answer) for given, p in zip(answers, problems, strict=True) if given != p.answer]
        right = 0
        for given, answer in pairs:
            with contextlib.suppress(Exception):  # a score that raises is none
                right += reward.score(given, answer) == 1
        if right:
            name = f"{PREFIX}{reward.generator}"
            yield f"{name}: its score is 1 for {what} in {right} of {len(pairs)} trials: wrong answers count as solved"


@dataclass(frozen=True)
class GymProblems(Lazy):
    """Problem i of a split, made when asked for."""

    generator: str
    options: Options
    split: str
    seed: int = 0

    def problem(self, index: int) -> Problem:
        first = index * SPAN[self.split] + (self.seed % 1000) * 2_000_000
        for number in range(first, first + TRIES):
            entry = _entry(self.generator, self.options, number)
            if split_of(entry["question"]) == self.split:
                answer = "any that is right" if entry["answer"] is None else str(entry["answer"])
                tagged, source = TaggedAnswer(answer, entry), PREFIX + self.generator
                return Problem(entry["question"], tagged, template=TEMPLATE, source=source)
        raise ValueError(f"{PREFIX}{self.generator} has too few different problems to hold some of them out")


class GymReward:
    """reasoning-gym's ``score_answer``; the answer carries the problem, which takes seconds to make in some cases."""

    def __init__(self, generator: str, options: Options) -> None:
        self.generator, self.options = generator, options

    def __call__(self, response: str, answer: str, prompt: str) -> float:
        given = final_answer(response)
        return 0.0 if given is None else self.score(given.strip(), answer)

    def score(self, given: str, answer: str) -> float:
        """1 where it is right, at most one half else."""
        score = float(_dataset(self.generator, self.options, 0).score_answer(given, tag_of(answer)))
        return score if score >= 1 else score / 2

    def __reduce__(self) -> tuple[Any, tuple[str, Options]]:
        return _reward, (self.generator, self.options)


def _reward(generator: str, options: Options) -> GymReward:
    """In the worker, at its start: importing takes seconds, which no response should pay for."""
    _dataset(generator, options, 0)
    return GymReward(generator, options)


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------


def _gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise ValueError(f"{PREFIX}… needs reasoning-gym: {install('rpg-rl[gym]')} ({describe(error)})") from error
    return reasoning_gym


def _check_options(generator: str, options: Options) -> None:
    datasets = _gym().factory.DATASETS
    if generator not in datasets:
        text = choose("generator", generator, datasets).partition(" Known:")[0]
        raise ValueError(
            f"{PREFIX}{generator}: {text} (python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)')"
        )
    if generator == "composite":
        raise ValueError(f"{PREFIX}composite mixes others: write 0.5*{PREFIX}basic_arithmetic + 0.5*{PREFIX}countdown")
    names = {field.name for field in fields(datasets[generator][1])} - {"seed", "size"}
    for key, _ in options:
        if key not in names:
            raise ValueError(f"{PREFIX}{generator}: {choose('option', key, names)}")
    try:
        _dataset(generator, options, 0)
    except Exception as error:  # its config checks itself with assert
        raise ValueError(f"{PREFIX}{generator} cannot be made: {describe(error)}") from error


@lru_cache(maxsize=16)
def _dataset(generator: str, options: Options, block: int) -> Any:
    return _gym().create_dataset(
        generator, seed=block * BLOCK, size=BLOCK, **{key: _value(text) for key, text in options}
    )


@lru_cache(maxsize=4096)
def _entry(generator: str, options: Options, number: int) -> dict[str, Any]:
    entry: dict[str, Any] = _dataset(generator, options, number // BLOCK)[number % BLOCK]
    return entry


def _value(text: str) -> Any:
    """3, 0.5, true, [1, 2] as JSON; anything else as text."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text
