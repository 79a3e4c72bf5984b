"""Problems that stand twice in the training set, or in the training set and in a test set.

The same problem: equal words, numbers and signs, blind to case, spacing, punctuation, LaTeX's layout and the
instructions that datasets wrap around a problem. A near-duplicate: of all runs of five such words in the two, at least
four fifths are in both (Jaccard similarity; candidates by MinHash, which misses one in 4,000 of them). Many of these
are variants with other numbers, so those with the same answer are counted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .task import ENDLESS, Problem
from .templates import PLACE, TEMPLATES

NEAR = 0.8
RUN = 5  # words
BANDS, ROWS = 16, 4  # of MinHash
CROWD = 50  # candidates of one key that are looked at
FEW = 0.001  # near repeats within the training set, as a share: not told at every start
MOST = 30_000  # problems that are compared when a task is loaded: some two seconds

Text = tuple[int, ...]  # the numbers of a problem's words

# what datasets and our templates say around a problem, and nothing that a problem says itself
OURS = [part.strip() for text in TEMPLATES.values() for part in text.split(PLACE) if part.strip()]
WRAPPERS = re.compile(
    r"solve the following math problem[^.\n]*\.( the last line of your response[^\n]*?the answer to the problem\.)?"
    r"|remember to put your answer on its own line after [\"']?answer:[\"']?\.?"
    r"|(let's think|think|please reason|reason|solve it) step by step(,| and)[^.\n]*(\\boxed|####|answer:)[^\n]*"
    r"|(please )?(put|give|present|write|output) (your|the) final answer (with)?in \\boxed\{[^}]*\}\.?"
    r"|the last line of your response should be[^\n]*answer[^\n]*|" + "|".join(map(re.escape, OURS)),
    re.IGNORECASE,
)
HINTS = ("step by step", "final answer", "answer:", "last line")  # one of them is in every wrapper: a quick look
LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|text(?:bf|it|rm)?|mathrm|mathbf|quad|qquad)(?![A-Za-z])|\\[,;:! ()\[\]]"
)
FRACTION = re.compile(r"\\[dt]?frac(?:([0-9])([0-9])|(?![A-Za-z]))")  # \frac12 is \frac{1}{2}
WORD = re.compile(r"[a-z]+|\d+|[-+*/^=<>()\[\]|_&%]|[^\W\da-z_]")


def wrapped(prompt: str) -> bool:
    """Whether the prompt tells how to answer."""
    return bare(prompt) != prompt


def bare(prompt: str) -> str:
    """Without what is wrapped around it."""
    low = prompt.lower()
    return WRAPPERS.sub(" ", prompt) if any(hint in low for hint in HINTS) else prompt


def word_list(prompt: str) -> list[str]:
    """What makes a problem this problem."""
    text = FRACTION.sub(r" frac \1 \2 ", LAYOUT.sub(" ", bare(prompt)))
    return WORD.findall(text.lower())


def merge(problems: Sequence[Problem]) -> tuple[list[Problem], int]:
    """Without the copies of a row (same prompt, same answer), and how many they were. The first stays."""
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        kept.setdefault((problem.prompt, problem.answer), problem)
    return list(kept.values()), len(problems) - len(kept)


@dataclass(frozen=True)
class Pair:
    """A problem and the one that it repeats."""

    problem: Problem
    other: Problem
    same: bool  # else nearly

    @property
    def same_answer(self) -> bool:
        return word_list(self.problem.answer) == word_list(self.other.answer)


@dataclass(frozen=True)
class Overlap:
    """``pairs`` has one entry for each problem that has a like; the most similar one."""

    pairs: tuple[Pair, ...]
    of: int  # problems that were looked at

    @property
    def same(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.same)

    @property
    def matters(self) -> bool:
        """Not only variants, with other answers."""
        return any(pair.same or pair.same_answer for pair in self.pairs)

    @property
    def near(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if not pair.same)


def notes(train: Sequence[Problem], tests: Mapping[str, Sequence[Problem]]) -> Iterator[str]:
    """A line for each thing that a user should know, where all problems can be looked at in two seconds."""
    if not train:
        return
    tests = {name: test for name, test in tests.items() if 0 < len(test) < ENDLESS}
    if len(train) + sum(map(len, tests.values())) > MOST:
        yield f"{len(train):,} problems are too many to look for duplicates at every start: rpg tasks does"
        return
    index = Index(train)
    overlaps = {name: index.overlap(test) for name, test in tests.items()}
    within = index.repeated
    if not within.same and len(within.near) < FEW * within.of:  # every collection has some
        within = Overlap((), within.of)
    yield from lines(within, {name: overlap for name, overlap in overlaps.items() if overlap.matters})


def lines(within: Overlap, tests: Mapping[str, Overlap]) -> Iterator[str]:
    conflicts = [pair for pair in within.same if not pair.same_answer]
    if within.pairs:
        first = _first(within.same or within.near)
        yield f"train: {_count(within)} repeat an earlier one, such as {first}"
    if conflicts:
        pair = conflicts[0]
        answers = f"{pair.other.answer[:30]!r} and {pair.problem.answer[:30]!r}"
        yield f"train: {len(conflicts)} of them have another answer there, such as {_first(conflicts)}: {answers}"
    for name, overlap in tests.items():
        if overlap.pairs:
            first = _first(overlap.same or overlap.near)
            yield f"{name}: {_count(overlap)} are in the training set and stay there, such as {first}"


def _count(overlap: Overlap) -> str:
    """ "12 of 500 problems (and 3 nearly, 2 of them with the same answer)"""
    near = overlap.near
    text = f"{len(overlap.same):,} of {overlap.of:,} problems"
    if not near:
        return text
    equal = sum(pair.same_answer for pair in near)
    return f"{text} (and {len(near)} nearly, {equal} of them with the same answer)"


def _first(pairs: Sequence[Pair]) -> str:
    text = " ".join(bare(pairs[0].problem.prompt).split())
    return repr(text if len(text) <= 60 else text[:59] + "…")


# ---- comparing -------------------------------------------------------------------------------------------------------


class Index:
    """The problems of a training set, by their words."""

    def __init__(self, train: Sequence[Problem]) -> None:
        self._train = list(train)
        self._numbers: dict[str, int] = {}
        self._texts = [self._text(problem) for problem in self._train]
        self._runs: dict[int, set[Text]] = {}
        self._same: dict[Text, int] = {}
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(BANDS)]
        pairs = []
        for place, (text, keys) in enumerate(zip(self._texts, _keys(self._texts), strict=True)):
            if (like := self._find(text, keys)) is not None:
                pairs.append(Pair(self._train[place], self._train[like[0]], like[1]))
            if self._same.setdefault(text, place) == place:
                for band, key in zip(self._bands, keys, strict=True):
                    band.setdefault(key, []).append(place)
        self.repeated = Overlap(tuple(pairs), len(self._train))  # problems that repeat an earlier one

    def overlap(self, test: Sequence[Problem]) -> Overlap:
        """Test problems that are in the training set; a pair is (test problem, training problem)."""
        texts = [self._text(problem) for problem in test]
        pairs = []
        for problem, text, keys in zip(test, texts, _keys(texts), strict=True):
            if (like := self._find(text, keys)) is not None:
                pairs.append(Pair(problem, self._train[like[0]], like[1]))
        return Overlap(tuple(pairs), len(test))

    def _text(self, problem: Problem) -> Text:
        return tuple(self._numbers.setdefault(word, len(self._numbers)) for word in word_list(problem.prompt))

    def _find(self, text: Text, keys: Sequence[bytes]) -> tuple[int, bool] | None:
        """(place of the most similar problem, whether it is the same)"""
        if text in self._same:
            return self._same[text], True
        others = {place for band, key in zip(self._bands, keys, strict=True) for place in band.get(key, [])[:CROWD]}
        if not others:
            return None
        runs = _runs(text)
        for place in others - self._runs.keys():
            self._runs[place] = _runs(self._texts[place])
        similarity, place = max((_jaccard(runs, self._runs[place]), -place) for place in others)
        return (-place, False) if similarity >= NEAR else None


def _runs(text: Text) -> set[Text]:
    return {text[i : i + RUN] for i in range(max(1, len(text) - RUN + 1))}


def _jaccard(a: set[Text], b: set[Text]) -> float:
    both = len(a & b)
    return both / (len(a) + len(b) - both)


def _keys(texts: Sequence[Text]) -> Iterator[list[bytes]]:
    """Of each text, BANDS keys; two texts are likely to have one in common if they have most of their runs in common.

    MinHash: the least of the hashes of a text's runs, for BANDS * ROWS hash functions, of which ROWS make a key.
    """
    import numpy as np

    if not texts:
        return
    padded = [text if len(text) >= RUN else (*text, *[2**40] * (RUN - len(text))) for text in texts]
    lengths = np.array([len(text) for text in padded])
    flat = np.fromiter((word for text in padded for word in text), np.uint64, lengths.sum())
    rng = np.random.Generator(np.random.Philox(0))
    hashes = np.zeros(len(flat) - RUN + 1, np.uint64)
    for i, factor in enumerate(rng.integers(1, 2**63, RUN, dtype=np.uint64) | np.uint64(1)):
        hashes += flat[i : len(hashes) + i] * factor
    whole = np.ones(len(hashes), bool)  # runs that do not reach into the next text
    for back in range(1, RUN):
        whole[np.cumsum(lengths)[:-1] - back] = False
    hashes = hashes[whole]
    hashes ^= hashes >> np.uint64(29)
    starts = np.concatenate([[0], np.cumsum(lengths - RUN + 1)[:-1]])
    least = np.empty((len(padded), BANDS * ROWS), np.uint32)
    for i, factor in enumerate(rng.integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)):
        least[:, i] = np.minimum.reduceat((hashes * factor) >> np.uint64(32), starts)
    size = ROWS * least.itemsize
    for row in least:
        data = row.tobytes()
        yield [data[i * size : (i + 1) * size] for i in range(BANDS)]
