"""Sampling and scoring, dealt to the ranks: every rank does its share and gets the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..rollout import Engine, Rollout
from ..tasks import Scorer, Scores
from .ranks import World, deal


def generate(
    world: World, engine: Engine, prompts: Sequence[Sequence[int]], n: int, *args: Any, **options: Any
) -> list[list[Rollout]]:
    """As ``engine.generate``. The responses do not depend on the number of ranks."""
    if world.size == 1:
        return engine.generate(prompts, n, *args, **options)
    hands = deal(prompts, world.size)
    mine = [prompts[i] for i in hands[world.rank]]
    found = world.together(lambda: engine.generate(mine, n, *args, **options))
    out: list[list[Rollout]] = [[] for _ in prompts]
    for hand, packed in zip(hands, world.gather(_packed(found)), strict=True):
        rollouts = _unpacked(packed)
        for place, i in enumerate(hand):
            out[i] = rollouts[place * n : (place + 1) * n]
    return out


def _packed(groups: list[list[Rollout]]) -> tuple[Any, ...]:
    """As arrays, which travel faster."""
    flat = [r for group in groups for r in group]
    lengths = np.array([len(r.tokens) for r in flat], dtype=np.int64)
    tokens = np.fromiter(chain.from_iterable(r.tokens for r in flat), np.int64)
    logp = np.fromiter(chain.from_iterable(r.logp for r in flat), np.float64)
    return lengths, tokens, logp, [r.finished for r in flat]


def _unpacked(packed: tuple[Any, ...]) -> list[Rollout]:
    lengths, tokens, logp, finished = packed
    ends = np.cumsum(lengths)[:-1]
    parts = zip(np.split(tokens, ends), np.split(logp, ends), finished, strict=False)
    return [Rollout(t.tolist(), p.tolist(), done) for t, p, done in parts]


def score(world: World, scorer: Scorer, items: Sequence[tuple[str, str, str]]) -> Scores:
    """As ``scorer.score``."""
    if world.size == 1:
        return scorer.score(items)
    mine = items[world.rank :: world.size]
    parts = world.gather(world.together(lambda: scorer.score(mine)))
    whole = Scores([0.0] * len(items), {}, [], [False] * len(items))
    whole.parts.update((name, [0.0] * len(items)) for part in parts for name in part.parts)
    for rank, part in enumerate(parts):
        at = slice(rank, None, world.size)
        whole.values[at], whole.solved[at] = part.values, part.solved
        for name, values in part.parts.items():
            whole.parts[name][at] = values
        for name, number in part.failures.items():
            whole.failures[name] = whole.failures.get(name, 0) + number
        whole.messages.extend(text for text in part.messages if text not in whole.messages)
    return whole
