"""Blocks of response tokens that go through the head and the loss together, smaller than what the body takes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Block:
    tokens: slice  # of a micro-batch's response tokens, row by row
    rows: slice  # the responses that they are of; the first and the last perhaps in part


def cut(lengths: Sequence[int], most: int, whole: bool) -> list[Block] | None:
    """Responses of these lengths in blocks of at most ``most`` tokens; ``whole``: none is cut, and there are no blocks
    (None) if one is longer than that. Blocks of responses that may be cut differ by a token."""
    ends = [0, *accumulate(lengths)]
    total = ends[-1]
    if total == 0:
        return None
    if whole:
        places = _between_responses(ends, most)
    else:
        count = -(-total // most)
        places = [total * i // count for i in range(count + 1)]
    if any(stop - start > most for start, stop in zip(places, places[1:])):
        return None
    return [
        Block(slice(start, stop), slice(bisect_right(ends, start) - 1, bisect_left(ends, stop)))
        for start, stop in zip(places, places[1:])
    ]


def _between_responses(ends: Sequence[int], most: int) -> list[int]:
    """As many responses as go into each block."""
    places = [0]
    for before, end in zip(ends, ends[1:]):
        if end - places[-1] > most and before > places[-1]:
            places.append(before)
    return [*places, ends[-1]] if ends[-1] > places[-1] else places
