"""Which pages of the cache are whose: of a prompt, or of the slot of a response. Rows take pages as they grow.

A row that has to wait for pages is set back: what it holds goes to the host, and comes back, bit for bit, when others
have ended. So it goes on with the same numbers, and gives the same tokens and log-probabilities. Where the host has no
room either, it will begin again after its first token, and draw the same tokens by the same random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.decode import LayerCache
from ..kernels.packed import to_device
from ..kernels.step import LENGTH, TOKEN

AT_ONCE = 16  # pages of a copy: torch takes pinned memory in powers of two
BACK = 512  # pages that come back at once


class Table:
    """The pages of each of some rows, in the order of their tokens: on the host, and where the kernels read it."""

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self.held_R = np.zeros(rows, dtype=np.int64)  # how many each has
        self.page_RM = torch.zeros(rows, columns, dtype=torch.int32, device=device)


class Pages:
    """The books of a cache of ``count`` pages, each for ``page`` tokens."""

    def __init__(self, count: int, page: int, sizes: tuple[int, int, int, int], device: torch.device):
        slots, prompts, prompt_room, room = sizes
        self.count, self.page = count, page
        self.prompts = Table(prompts, self.needed(prompt_room), device)
        self.slots = Table(slots, self.needed(room), device)
        self.reset()

    def reset(self) -> None:
        """All are free."""
        self.free = list(range(self.count))[::-1]
        self.prompt_pages = 0  # that prompts hold
        for table in (self.prompts, self.slots):
            for held in table.pages:
                held.clear()
            table.held_R[:] = 0

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def missing(self, slots: Sequence[int], tokens: Any) -> Any:
        """Pages that the responses in these slots lack, each for so many tokens; as arrays."""
        return np.maximum(-(-tokens // self.page) - self.slots.held_R[slots], 0)

    def extend(self, table: Table, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Give each row pages for so many tokens, where it has not enough; there must be enough."""
        added = []
        for row, count in zip(rows, tokens, strict=True):
            held = table.pages[row]
            for column in range(len(held), self.needed(count)):
                held.append(self.free.pop())
                added.append((row, column, held[-1]))
            table.held_R[row] = len(held)
        if added:
            row_N, column_N, page_N = to_device(torch.tensor(added).T.contiguous(), table.page_RM.device)
            table.page_RM[row_N, column_N] = page_N.int()
        if table is self.prompts:
            self.prompt_pages += len(added)

    def drop(self, table: Table, row: int) -> list[int]:
        """Its pages are free again; which they were."""
        held, table.pages[row], table.held_R[row] = table.pages[row], [], 0
        self.free += held
        if table is self.prompts:
            self.prompt_pages -= len(held)
        return held


@dataclass(frozen=True)
class SetBack:
    """A response that waits for pages."""

    request: int
    age: int  # tokens of it that were in the cache, and will be when it goes on
    state_5: Tensor  # its column of the state
    copies: list[Tensor]  # what its pages held, on the host

    @classmethod
    def from_first_token(cls, request: int, token: int, state_5: Tensor) -> SetBack:
        state_5 = state_5.clone()
        state_5[LENGTH], state_5[TOKEN] = 0, token
        return cls(request, 0, state_5, [])


def page_bytes(layers: Sequence[LayerCache]) -> int:
    """Of one page, in all layers."""
    return sum(part[0].nbytes for layer in layers for part in layer.parts)


def to_host(layers: Sequence[LayerCache], rows: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """For each row copies of its pages: of every part of every layer, some pages at a time, whosever they are."""
    parts, copies = [part for layer in layers for part in layer.parts], list[list[Tensor]]([] for _ in rows)
    owned = [(row, page) for row, held in enumerate(rows) for page in held]
    for i in range(0, len(owned), AT_ONCE):
        owners = Counter(row for row, _ in owned[i : i + AT_ONCE])  # in their order
        pages = torch.tensor([page for _, page in owned[i : i + AT_ONCE]], device=parts[0].device)
        for part in parts:
            found = part[pages]
            copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
            copy.copy_(found, non_blocking=True)
            for row, piece in zip(owners, torch.split(copy, list(owners.values())), strict=True):
                copies[row].append(piece)
    if parts[0].is_cuda:
        torch.cuda.synchronize()
    return copies


def from_host(layers: Sequence[LayerCache], rows: Sequence[Sequence[int]], copies: Sequence[Sequence[Tensor]]) -> None:
    """What was copied of each row, into these pages."""
    parts, first = [part for layer in layers for part in layer.parts], 0
    while first < len(rows):
        last, pages = first, list[int]()
        while last < len(rows) and (not pages or len(pages) + len(rows[last]) <= BACK):
            pages += rows[last]
            last += 1
        if pages:
            index = torch.tensor(pages, device=parts[0].device)
            for k, part in enumerate(parts):
                pieces = [piece for copy in copies[first:last] for piece in copy[k :: len(parts)]]
                whole = torch.empty(len(pages), *part.shape[1:], dtype=part.dtype, pin_memory=part.is_cuda)
                part[index] = torch.cat(pieces, out=whole).to(part.device, non_blocking=True)
        first = last
