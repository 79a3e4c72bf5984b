"""A transformers model whose attention layers read a cache of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

ATTENTION = "rpg-slots"


class Cache(Protocol):
    """Stands in for transformers' Cache: a layer gives its new keys and values to ``update``, then calls ``attend``."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor: ...

    def get_seq_length(self, layer_idx: int = 0) -> int: ...


_attending: list[Cache] = []  # the cache of the generation in progress


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer."""
    for name in ("softcap", "s_aux"):
        if rest.get(name) is not None:
            raise NotImplementedError(f"its attention has the option {name!r}, which is not known here")
    return _attending[-1].attend(module.layer_idx, query, key, value, scaling, sliding_window), None


@contextmanager
def attending(model: Any, cache: Cache) -> Iterator[None]:
    """Within, the model's attention layers read ``cache``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
    before = [config._attn_implementation for config in configs]
    training = model.training
    _attending.append(cache)
    try:
        for config in configs:
            config._attn_implementation = ATTENTION
        model.eval()
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        model.train(training)
        _attending.pop()


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
