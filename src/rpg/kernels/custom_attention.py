"""A function of ours in place of a transformers model's attention, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

ATTENTION = "rpg"

# layer, query [B,H,L,D], key and value [B,G,L,D], scale, window -> [B,L,H,D]
Attend = Callable[[int, Tensor, Tensor, Tensor, float | None, int | None], Tensor]
_attend: ContextVar[Attend] = ContextVar("attend")


def configs_of(model: Any) -> list[Any]:
    """Where the layers of a model look up how to attend."""
    return list({id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values())


@contextmanager
def custom_attention(configs: list[Any], attend: Attend) -> Iterator[None]:
    """Within, layers with these configs attend by this function."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _interface)
    before = [config._attn_implementation for config in configs]
    token = _attend.set(attend)
    try:
        for config in configs:
            config._attn_implementation = ATTENTION
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        _attend.reset(token)


def _interface(
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
    """What transformers calls."""
    for name in ("softcap", "s_aux"):
        if rest.get(name) is not None:
            raise NotImplementedError(f"its attention has the option {name!r}, which is not known here")
    return _attend.get()(getattr(module, "layer_idx", 0), query, key, value, scaling, sliding_window), None
