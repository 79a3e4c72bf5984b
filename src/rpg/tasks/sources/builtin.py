"""The tasks that need no download: problems made from a seed, graded in difficulty, with a held-out split.

arithmetic   ``7+3*8-4``            work it out; the response ends in ``answer 27``
countdown    ``make 24 from 3 5 9`` reach the target with every number once; it ends in ``answer 3*5+9``

Only what follows the last ``answer`` is looked at: the steps before it are the model's own affair.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from ..task import Lazy, Problem, Task

LARGEST = 199  # no number on the way to an answer is larger, none is negative
TRAIN, TEST = "train", "test"


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def reduce_once(terms: Sequence[str]) -> list[str]:
    """``7 + 3 * 8`` -> ``7 + 24``: the first product, else the first sum or difference."""
    at = terms.index("*") if "*" in terms else 1
    return [*terms[: at - 1], str(apply(int(terms[at - 1]), terms[at], int(terms[at + 1]))), *terms[at + 2 :]]


def apply(a: int, operator: str, b: int) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def terms_of(expression: str) -> list[str]:
    return re.findall(r"\d+|[-+*()]", expression)


def arithmetic(rng: random.Random) -> Problem:
    """Level n has n + 1 operations."""
    level = rng.randint(1, 4)
    while True:
        terms = [str(rng.randint(1, 20))]
        for _ in range(level + 1):
            operator = rng.choice("++--*")
            terms += [operator, str(rng.randint(2, 9) if operator == "*" else rng.randint(1, 20))]
        work = terms
        while len(work) > 1 and all(0 <= int(term) <= LARGEST for term in work[::2]):
            work = reduce_once(work)
        if len(work) == 1 and 0 <= int(work[0]) <= LARGEST:
            return Problem(f"{''.join(terms)}\n", work[0], level)


def ask_arithmetic(text: str) -> Problem | None:
    """``7 + 3*8 - 4``, as somebody writes it, with its answer."""
    terms = re.sub(r"\s|=\s*$", "", text)
    if not re.fullmatch(r"\d{1,9}(?:[-+*]\d{1,9}){0,31}", terms):
        return None
    work = terms_of(terms)
    while len(work) > 1:
        work = reduce_once(work)
    return Problem(f"{terms}\n", str(int(work[0])))


def score_arithmetic(response: str, answer: str, prompt: str) -> float:
    return float(final(response) == answer)


# ---- countdown -------------------------------------------------------------------------------------------------------


def countdown(rng: random.Random) -> Problem:
    """Level 1 has three small numbers, level 2 larger ones, level 3 four numbers. Every problem has a solution."""
    level = rng.randint(1, 3)
    while True:
        numbers = [rng.randint(1, 9 if level != 2 else 20) for _ in range(4 if level == 3 else 3)]
        value = numbers[0]
        for number in numbers[1:]:
            value = apply(value, rng.choice("+-*"), number)
            if not 0 <= value <= LARGEST:
                break
        else:
            shown = rng.sample(numbers, len(numbers))
            return Problem(f"make {value} from {' '.join(map(str, shown))}\n", str(value), level)


def ask_countdown(text: str) -> Problem | None:
    found = re.fullmatch(r"make (\d{1,9}) from (\d{1,9}(?: \d{1,9}){1,31})", " ".join(text.split()))
    return None if found is None else Problem(f"{found[0]}\n", found[1])


def chains(numbers: Sequence[int]) -> Iterator[tuple[list[str], int]]:
    """Every ``a∘b∘c`` worked out from left to right, with its value."""
    for order in set(permutations(numbers)):
        yield from _extend([str(order[0])], order[0], order[1:])


def _extend(terms: list[str], value: int, rest: Sequence[int]) -> Iterator[tuple[list[str], int]]:
    if not rest:
        yield terms, value
        return
    for operator in "+-*":
        yield from _extend([*terms, operator, str(rest[0])], apply(value, operator, rest[0]), rest[1:])


def score_countdown(response: str, answer: str, prompt: str) -> float:
    """The expression is worked out from left to right, uses each number once and gives the target."""
    terms = terms_of(final(response) or "")
    numbers = terms_of(prompt.partition("from")[2])
    if "".join(terms) != final(response) or not re.fullmatch(r"\d+(?:[-+*]\d+)*", "".join(terms)):
        return 0.0
    value = int(terms[0])
    for operator, number in zip(terms[1::2], terms[2::2], strict=True):
        value = apply(value, operator, int(number))
    return float(value == int(answer) and sorted(terms[::2]) == sorted(numbers))


# ---- both ------------------------------------------------------------------------------------------------------------


def final(response: str) -> str | None:
    """What follows the last ``answer``, or None."""
    answer = re.search(r"answer ([-+*()\d]{1,64})\s*$", response[-200:])
    return answer.group(1) if answer else None


def mixed(rng: random.Random) -> Problem:
    return (arithmetic if rng.random() < 0.5 else countdown)(rng)


def ask_mixed(text: str) -> Problem | None:
    return ask_arithmetic(text) or ask_countdown(text)


def score_mixed(response: str, answer: str, prompt: str) -> float:
    return (score_countdown if prompt.startswith("make") else score_arithmetic)(response, answer, prompt)


def split_of(prompt: str) -> str:
    """A problem belongs to one split for good, whatever the seed: a tenth of all problems is held out."""
    return TEST if zlib.crc32(prompt.encode()) % 10 == 0 else TRAIN


@dataclass(frozen=True)
class Generated(Lazy):
    """Problem i of a split, made when asked for."""

    make: Callable[[random.Random], Problem]
    split: str
    seed: int = 0

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"{self.split}/{self.seed}/{index}")
        while split_of((problem := self.make(rng)).prompt) != self.split:
            pass
        return problem


_MAKERS = {
    "arithmetic": (arithmetic, score_arithmetic, ask_arithmetic),
    "countdown": (countdown, score_countdown, ask_countdown),
    "mixed": (mixed, score_mixed, ask_mixed),
}


def _make(name: str, seed: int = 0) -> Task:
    make, score, ask = _MAKERS[name]
    return Task(name, Generated(make, TRAIN, seed), Generated(make, TEST), score, trusted=True, ask=ask)


BUILTIN = {name: partial(_make, name) for name in _MAKERS}
