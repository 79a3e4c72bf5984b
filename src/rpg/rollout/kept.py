"""The kept sets of a call of generate: which tokens truncated sampling could draw at each state of each response.

Sets come in the order of the draws and are wanted in that of the responses. They are put one after the other into host
memory; a table says where the set of each token begins and how large it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.sample import Pool

HOST_BYTES = 2**34  # of the sets of one call at most
POOL = 2**24  # ids on a GPU, before they go to the host
AT_ONCE = 256  # responses whose sets are put in order together


class TooManyKept(ValueError):
    """The kept sets are too large to be held."""

    def __init__(self, size: str) -> None:
        super().__init__(
            f"rollout.top_p, top_k and min_p keep too many tokens at a state to remember them ({size}): give "
            "--rollout.top_k 100, lower rollout.top_p, or take --rollout.top_p 1"
        )


@dataclass(frozen=True, eq=False)
class KeptIds:
    """Of a response: the kept sets of its tokens, one after the other, each in the vocabulary's order."""

    ids: Any  # int32, [K]
    counts: Any  # int32, [T]: the size of each set

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, KeptIds) and np.array_equal(self.counts, other.counts)
        return same and np.array_equal(self.ids, other.ids)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class KeptStore:
    """Sets in host memory, and the table of requests, [R,T]."""

    def __init__(self, requests: int, tokens: int, device: torch.device):
        self.start_RT = torch.zeros(requests, tokens, dtype=torch.int64, device=device)
        self.size_RT = torch.zeros(requests, tokens, dtype=torch.int32, device=device)
        self.chunks: list[Any] = []
        self.total = 0

    def add(self, ids_K: Tensor) -> None:
        self.total += len(ids_K)
        if 4 * self.total > HOST_BYTES:
            raise TooManyKept(f"more than {HOST_BYTES >> 30} GiB in one step")
        self.chunks.append(ids_K.cpu().numpy())

    def put(self, request_A: Tensor, t_A: Tensor, kept_AV: Tensor) -> None:
        """The sets that these requests draw token t from."""
        size_A = kept_AV.sum(-1)
        self.start_RT[request_A, t_A] = self.total + size_A.cumsum(0) - size_A
        self.size_RT[request_A, t_A] = size_A.int()
        self.add(kept_AV.nonzero()[:, 1].int())

    def read(self, lengths: list[int]) -> list[KeptIds]:
        """Of every request."""
        ids = np.concatenate([np.empty(0, np.int32), *self.chunks])
        self.chunks.clear()
        starts, sizes = self.start_RT.cpu().numpy(), self.size_RT.cpu().numpy()
        out: list[KeptIds] = []
        for first in range(0, len(lengths), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            told = np.arange(starts.shape[1]) < np.array(lengths[some])[:, None]
            start, size = starts[some][told], sizes[some][told]
            ends = size.cumsum(dtype=np.int64)
            chosen = ids[np.repeat(start - ends + size, size) + np.arange(ends[-1])]
            last = np.cumsum(lengths[some])  # tokens up to the end of each response
            id_ends, token_ends = [0, *ends[last - 1].tolist()], [0, *last.tolist()]
            for i in range(len(last)):
                counts = size[token_ends[i] : token_ends[i + 1]]
                out.append(KeptIds(chosen[id_ends[i] : id_ends[i + 1]], counts))
        return out


class KeptPool:
    """The sets on a GPU between two looks of the host."""

    def __init__(self, slots: int, room: int, device: torch.device):
        self.pool = Pool(
            torch.zeros(POOL, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.zeros(slots, room, dtype=torch.int64, device=device),
            torch.zeros(slots, room, dtype=torch.int32, device=device),
        )

    def reset(self) -> None:
        self.pool.cursor_2.zero_()

    def spill(self, store: KeptStore, last: bool = False) -> None:
        """To the host, when the next steps may need the room."""
        used = int(self.pool.cursor_2[0])
        if used > len(self.pool.ids_P):
            raise TooManyKept(f"{used} in a few steps")
        if last or used > len(self.pool.ids_P) // 4:
            store.add(self.pool.ids_P[:used].to("cpu", copy=True))  # the pool is written again
            self.pool.cursor_2[1] += used
            self.pool.cursor_2[0] = 0
