"""What a captured decoding step reads and writes: pages of keys and values, and the books of rows and slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.decode import LayerCache, Unfinished, decode_attention
from ..kernels.packed import Packing, attend
from ..kernels.sample import Pool
from ..kernels.step import DEAD, LENGTH, PROMPT, PROMPT_LENGTH, SLOT
from .engine import Sampling
from .kept import KeptPool
from .pages import Pages

END_ROOM = 16  # end tokens


class Slots:
    """Keys and values, and all else that a captured step reads or writes: its addresses never change."""

    is_compileable = False

    def __init__(
        self, sizes: tuple[int, int, int, int], cache_tokens: int | None, page: int, fp8: bool, device: torch.device
    ):
        self.sizes = sizes
        self.slots, self.prompts, self.prompt_room, self.room = slots, prompts, prompt_room, room = sizes
        prompt_pages, row_pages = -(-prompt_room // page), -(-room // page)
        count = slots * row_pages + prompts * prompt_pages
        if cache_tokens is not None:  # a response can always go on alone, and the next prompt be read beside it
            count = min(count, max(row_pages + 2 * prompt_pages, cache_tokens // page))
        self.pages, self.fp8 = Pages(count, page, sizes, device), fp8
        self.layers: list[LayerCache] = []
        self.state_5S = torch.full((5, slots), DEAD, dtype=torch.int32, device=device)
        self.tokens_SR = torch.zeros(slots, room, dtype=torch.int32, device=device)
        self.logp_SR = torch.zeros(slots, room, device=device)
        self.uniform_SR = torch.zeros(slots, room, dtype=torch.float64, device=device)
        self.count_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ended_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limit_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.ends_E = torch.full((END_ROOM,), -1, dtype=torch.int64, device=device)
        self.kept: KeptPool | None = None  # where kept sets go, once they were asked for
        self.state_5A = self.state_5S  # of the step in progress
        self.samples = 1  # of the step in progress: neighbouring rows whose prompt is read for all of them at once
        self.reading: Packing | None = None
        self.page_N = self.place_N = self.limit_1  # where the tokens that are read go

    def pool(self, state_5A: Tensor, sampling: Sampling) -> tuple[Pool, Tensor] | None:
        """Where fused_sample puts the kept sets of these rows."""
        return (self.kept.pool, state_5A) if self.kept is not None and sampling.gives_kept else None

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.reading is not None:
            if layer == len(self.layers):
                self.layers.append(LayerCache.empty(self.pages.count, key, value, self.fp8, self.pages.page))
            self.layers[layer].put(self.page_N, self.place_N, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        if self.reading is not None:
            scaling = query.shape[3] ** -0.5 if scaling is None else scaling
            query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
            return attend(query, key, value, self.reading, scaling, window)[None]
        return self.decode(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], scaling, window)[:, None]

    @property
    def decoding(self) -> bool:
        """One token a row, not prompts."""
        return self.reading is None

    def decode(
        self,
        layer: int,
        query_AHD: Tensor,
        key_AGD: Tensor,
        value_AGD: Tensor,
        scaling: float | None,
        window: int | None,
        unfinished: Unfinished | None = None,
    ) -> Tensor:
        rows = self.state_5A
        return decode_attention(
            query_AHD,
            key_AGD,
            value_AGD,
            self.layers[layer],
            self.pages.prompts.page_RM,
            self.pages.slots.page_RM,
            rows[PROMPT],
            rows[PROMPT_LENGTH],
            rows[SLOT],
            rows[LENGTH],
            query_AHD.shape[2] ** -0.5 if scaling is None else scaling,
            window,
            unfinished,
            self.samples,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.layers)
