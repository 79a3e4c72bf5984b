"""Responses that are under way: what an engine leaves when it is stopped in the middle, and goes on from.

All of it is on the host, so weights may change in between, others may use the engine, and a checkpoint can hold it.
Only keys and values that are kept may still lie in the engine: ``NativeEngine.copy_cache`` brings them here, and so
does whoever else uses the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .engine import NotFinite, Rollout


@dataclass
class Partial:
    """One response, as far as it has got."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)  # what each token was drawn with
    versions: list[int] = field(default_factory=list)  # of the weights that drew it
    ended: bool = False  # by an end token
    over: bool = False
    cache: list[Tensor] = field(default_factory=list)
    """keys and values of all its tokens but the newest, where those of earlier weights are kept"""

    def drawn(self, tokens: list[int], logp: list[float], version: int, ended: bool, over: bool) -> None:
        """What it is now; the tokens that are new are of this version of the weights."""
        if not math.isfinite(sum(logp)):  # none of them is above 0, so only what is not finite gives such a sum
            raise NotFinite
        self.versions += [version] * (len(tokens) - len(self.tokens))
        self.tokens, self.logp, self.ended, self.over, self.cache = tokens, logp, ended, over, []


@dataclass
class Underway:
    """A group: the responses to one prompt. ``number`` is its owner's; ``seed`` decides its tokens."""

    number: int
    prompt: list[int]
    seed: int
    parts: list[Partial]
    cache: list[Tensor] = field(default_factory=list)  # of the prompt, where it is kept apart from the responses'

    @classmethod
    def begin(cls, number: int, prompt: Sequence[int], seed: int, n: int) -> Underway:
        return cls(number, list(prompt), seed, [Partial() for _ in range(n)])

    @property
    def over(self) -> bool:
        return all(part.over for part in self.parts)

    def rollouts(self) -> list[Rollout]:
        return [Rollout(part.tokens, part.logp, part.ended, versions=part.versions) for part in self.parts]


# Told which groups are over, and how many are not: gives groups to begin, or None to stop. It is asked at the beginning
# and whenever groups are over. On a GPU the next decoding steps run meanwhile: a group that ends in them after the last
# word is told of in the next call.
Feed = Callable[[list[Underway], int], "list[Underway] | None"]
