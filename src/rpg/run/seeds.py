"""Every random choice of a run is a function of the run's seed, its purpose and the step: there is no state to save."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str, *place: int) -> int:
    """A seed of its own for each purpose and place."""
    sequence = np.random.SeedSequence((seed, zlib.crc32(purpose.encode()), *place))
    return int(sequence.generate_state(1, np.uint64)[0])


def permutation(count: int, seed: int, purpose: str, *place: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(stream(seed, purpose, *place))).permutation(count)
