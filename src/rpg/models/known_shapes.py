"""Shapes of well-known models, from their public config.json: what a plan needs where there is no network."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def _qwen(*values: int | bool, **more: int) -> dict[str, Any]:
    return {**dict(zip(COLUMNS, values, strict=True)), "rope_theta": 1e6, **more}


_0_5B = _qwen(151936, 32768, 896, 4864, 24, 14, 2, True)
_1_5B = _qwen(151936, 32768, 1536, 8960, 28, 12, 2, True)
_3B = _qwen(151936, 32768, 2048, 11008, 36, 16, 2, True)
_7B = _qwen(152064, 32768, 3584, 18944, 28, 28, 4, False)
_QWEN3_4B = _qwen(151936, 40960, 2560, 9728, 36, 32, 8, True, head_dim=128)

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-4B": ("Qwen3Config", _QWEN3_4B),
    "Qwen/Qwen2.5-0.5B": ("Qwen2Config", _0_5B),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2Config", _0_5B),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": ("Qwen2Config", _0_5B),
    "Qwen/Qwen2.5-1.5B": ("Qwen2Config", {**_1_5B, "max_position_embeddings": 131072}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2Config", _1_5B),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": ("Qwen2Config", _1_5B),
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen2Config", _3B),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen2Config", _7B),
}
"""Class of the config and its settings, by hub id."""


def known_config(name: str) -> Any | None:
    """The model's config; None: not known here."""
    if name not in KNOWN:
        return None
    import transformers

    kind, settings = KNOWN[name]
    return getattr(transformers, kind)(**rope(settings))


def rope(settings: dict[str, Any]) -> dict[str, Any]:
    """With rope as transformers 5 wants it."""
    rest = dict(settings)
    theta = rest.pop("rope_theta", 10000.0)
    return rest | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
