"""Sampling and scoring, dealt to the ranks: every rank does its share and gets the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..rewards.failing import added
from ..rollout import Engine, KeptIds, Rollout
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
    groups = world.fail_together(lambda: engine.generate(mine, n, *args, **options))
    out: list[list[Rollout]] = [[] for _ in prompts]
    for hand, packed in zip(hands, world.gather(_packed(groups)), strict=True):
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
    kept = [r.kept for r in flat if r.kept is not None]
    sets = None
    if kept:
        counts, ids = np.concatenate([k.counts for k in kept]), np.concatenate([k.ids for k in kept])
        sets = counts, ids, np.array([len(k.ids) for k in kept], dtype=np.int64)
    return lengths, tokens, logp, [r.finished for r in flat], sets


def _unpacked(packed: tuple[Any, ...]) -> list[Rollout]:
    lengths, tokens, logp, finished, sets = packed
    ends = np.cumsum(lengths)[:-1]
    kept: list[KeptIds | None] = [None] * len(finished)
    if sets is not None:
        counts, ids, sizes = sets
        pairs = zip(np.split(ids, np.cumsum(sizes)[:-1]), np.split(counts, ends), strict=True)
        kept = [KeptIds(*pair) for pair in pairs]
    rollouts = zip(np.split(tokens, ends), np.split(logp, ends), finished, kept, strict=False)
    return [Rollout(t.tolist(), p.tolist(), done, some) for t, p, done, some in rollouts]


def score(world: World, scorer: Scorer, items: Sequence[tuple[str, str, str]]) -> Scores:
    """As ``scorer.score``."""
    if world.size == 1:
        return scorer.score(items)
    mine = items[world.rank :: world.size]
    by_rank = world.gather(world.fail_together(lambda: scorer.score(mine)))
    whole = Scores([0.0] * len(items), {}, [], [False] * len(items))
    whole.calls.update(added(share.calls for share in by_rank))
    whole.parts.update((name, [0.0] * len(items)) for share in by_rank for name in share.parts)
    for rank, share in enumerate(by_rank):
        at = slice(rank, None, world.size)
        whole.values[at], whole.solved[at] = share.values, share.solved
        for name, values in share.parts.items():
            whole.parts[name][at] = values
        for name, number in share.failures.items():
            whole.failures[name] = whole.failures.get(name, 0) + number
        whole.messages.extend(text for text in share.messages if text not in whole.messages)
    return whole
