"""``gym:GENERATOR`` and ``gym:GENERATOR?option=value&…``: reasoning-gym's problems, scored by its own functions.

A problem belongs to one split for good, by a hash of its prompt, as with the built-in tasks. What is scored is the
final answer alone; the score is reasoning-gym's, which gives some wrong answers a little.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, overload
from urllib.parse import parse_qsl

from ..names import choose
from .answers import final_answer
from .builtin import TEST, TRAIN, split_of
from .importing import describe
from .tagged import Tagged, tag_of
from .task import ENDLESS, Problem, Task

PREFIX = "gym:"
TEMPLATE = (
    "{prompt}\n\nThink step by step. Then write the final answer, and nothing else, between <answer> and </answer>."
)
BLOCK = 10_000  # problems of one generator; reasoning-gym makes problem i from seed + i
SPAN = {TRAIN: 4, TEST: 64}  # of reasoning-gym's problems, for one of ours: a tenth of them is held out
TRIES = 2000

Options = tuple[tuple[str, str], ...]  # names and values, as they are written


def load_gym(name: str, seed: int = 0) -> Task:
    generator, _, query = name.removeprefix(PREFIX).partition("?")
    options = tuple(sorted(parse_qsl(query, keep_blank_values=True)))
    _known(generator, options)
    train = GymProblems(generator, options, TRAIN, seed)
    test = GymProblems(generator, options, TEST)
    train[0], test[0]  # a generator that cannot be used fails here
    return Task(f"{PREFIX}{generator}", train, test, GymReward(generator, options))


@dataclass(frozen=True)
class GymProblems(Sequence[Problem]):
    """Problem i of a split, made when asked for."""

    generator: str
    options: Options
    split: str
    seed: int = 0

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first = index * SPAN[self.split] + (self.seed % 1000) * 2_000_000
        for number in range(first, first + TRIES):
            entry = _entry(self.generator, self.options, number)
            if split_of(entry["question"]) == self.split:
                answer = "any that is right" if entry["answer"] is None else str(entry["answer"])
                return Problem(
                    entry["question"], Tagged(answer, number), template=TEMPLATE, source=PREFIX + self.generator
                )
        raise ValueError(f"{PREFIX}{self.generator} has too few different problems to hold some of them out")


class GymReward:
    """reasoning-gym's ``score_answer``, with the problem made anew from its number, which the answer carries."""

    def __init__(self, generator: str, options: Options) -> None:
        self.generator, self.options = generator, options

    def __call__(self, response: str, answer: str, prompt: str) -> float:
        number = tag_of(answer)
        given = final_answer(response)
        if given is None:
            return 0.0
        dataset = _dataset(self.generator, self.options, number // BLOCK)
        return float(dataset.score_answer(given.strip(), _entry(self.generator, self.options, number)))

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
        raise ValueError(f"{PREFIX}… needs reasoning-gym: pip install 'rpg-rl[gym]' ({describe(error)})") from error
    return reasoning_gym


def _known(generator: str, options: Options) -> None:
    datasets = _gym().factory.DATASETS
    if generator not in datasets:
        text = choose("generator", generator, datasets).partition(" Known:")[0]
        raise ValueError(
            f"{PREFIX}{generator}: {text} (python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)')"
        )
    known = {field.name for field in fields(datasets[generator][1])} - {"seed", "size"}
    for key, _ in options:
        if key not in known:
            raise ValueError(f"{PREFIX}{generator}: {choose('option', key, known)}")
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
