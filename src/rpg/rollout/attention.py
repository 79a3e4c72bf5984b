"""A transformers model whose attention layers read a cache of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from ..kernels.custom_attention import configs_of, custom_attention


class Cache(Protocol):
    """Stands in for transformers' Cache: a layer gives its new keys and values to ``update``, then calls ``attend``."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor: ...

    def get_seq_length(self, layer_idx: int = 0) -> int: ...


@contextmanager
def attending(model: Any, cache: Cache) -> Iterator[None]:
    """Within, the model's attention layers read ``cache``."""
    training = model.training
    try:
        model.eval()
        with custom_attention(configs_of(model), cache.attend):
            yield
    finally:
        model.train(training)


def logits_after(model: Any, cache: Cache, ids: Tensor, position: Tensor, row: Tensor, last: Tensor) -> Tensor:
    """Logits [N,V] of the tokens at ids[row, last]: the whole model's, which may scale or cap those of its head.

    The head sees those states alone: logits of whole prompts would be the largest tensor of all.
    """
    head = model.get_output_embeddings()
    choose = head.register_forward_pre_hook(lambda _, args: (args[0][row, last, None],))
    try:
        logits: Tensor = model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True).logits
    finally:
        choose.remove()
    return logits[:, 0] if logits.shape[:2] == (len(row), 1) else logits[row, last]
