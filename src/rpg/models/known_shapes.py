"""Shapes of well-known models, from their public config.json: what a plan needs where there is no network."""

from __future__ import annotations

from typing import Any

QWEN = {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6}
_0_5B = {
    **QWEN,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_1_5B = {
    **QWEN,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_3B = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_7B = {
    **QWEN,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_QWEN3_4B = {**QWEN, "max_position_embeddings": 40960, "hidden_size": 2560, "intermediate_size": 9728,
             "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
             "tie_word_embeddings": True}  # fmt: skip

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
