"""Which prompts to sample: by a record of how often each was solved, those that teach nothing are sampled rarely."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...run.seeds import stream
from ...tasks import Problem
from ..progress import SamplingPosition
from .collect import Group

FLOOR = 0.1  # no prompt is left out more often than nine times of ten
WORTH_ASKING = 0.5  # at this chance of a signal, or above, a prompt is always sampled
HALF_LIFE = 50  # steps after which what was seen counts half: the policy has moved on
NOTHING_SEEN = 0.5  # of each kind, before any is seen (Jeffreys)


class PromptChoice:
    """The record is of problems: how many responses were right, and how many wrong. Where problems never come again it
    is of their levels: how many groups had both, and how many had not. It is part of ``position``."""

    def __init__(self, position: SamplingPosition, seed: int, samples: int, again: bool):
        self.position, self.seed, self.samples, self.again = position, seed, samples, again

    def takes(self, place: int, index: int, problem: Problem, step: int) -> bool:
        """Whether the problem at this place of the stream is sampled now. A problem left out comes again in the next
        pass."""
        if (key := self._key(index, problem)) not in self.position.record:
            return True
        chance = min(1.0, max(FLOOR, self.signal(key, step) / WORTH_ASKING))
        if chance < 1:
            drawn = np.random.Generator(np.random.Philox(stream(self.seed, "choice", place))).random()
            return bool(drawn < chance)
        return True

    def signal(self, key: str, step: int) -> float:
        """The chance that a group has right and wrong responses; of a problem, over what is known of its solve rate."""
        yes, no = self._seen(key, step)
        a, b = yes + NOTHING_SEEN, no + NOTHING_SEEN
        if not self.again:
            return a / (a + b)
        i = np.arange(self.samples)
        all_solved, none_solved = np.prod((a + i) / (a + b + i)), np.prod((b + i) / (a + b + i))
        return float(1 - all_solved - none_solved)

    def note(self, groups: Iterable[Group], step: int) -> None:
        for group in groups:
            key = self._key(group.index, group.problem)
            yes, no = self._seen(key, step)
            right, count = sum(response.solved for response in group.responses), len(group.responses)
            if not self.again:
                right, count = int(0 < right < count), 1
            self.position.record[key] = [yes + right, no + count - right, step]

    def _key(self, index: int, problem: Problem) -> str:
        return str(index) if self.again else f"{problem.source} level {problem.level}".strip()

    def _seen(self, key: str, step: int) -> tuple[float, float]:
        yes, no, when = self.position.record.get(key, (0.0, 0.0, step))
        left = 0.5 ** ((step - when) / HALF_LIFE)
        return yes * left, no * left
