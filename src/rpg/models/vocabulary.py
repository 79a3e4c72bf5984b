"""Which number each token has: what models that score or are merged with each other must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import BUILTIN
from .loading import TOKENIZERS


def clash(here: Mapping[str, int], there: Mapping[str, int]) -> str | None:
    """The first token of ``here`` that is another one there, in words."""
    token = next((token for token, i in here.items() if there.get(token) != i), None)
    return None if token is None else f"{token!r} is token {here[token]} here and {there.get(token, 'none')} there"


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    paths = {path for pattern in TOKENIZERS for path in folder.glob(pattern) if path.is_file()}
    return {path.name: path.read_bytes() for path in paths}


def vocabulary(folder: Path, trust: bool = False) -> dict[str, int]:
    """Of the tokenizer in a folder."""
    from transformers import AutoTokenizer

    numbers: dict[str, int] = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust).get_vocab()
    return numbers


def local_vocabulary(name: str, options: Mapping[str, Any]) -> dict[str, int] | None:
    """Of a model by name; None where its tokenizer is not on this machine, or cannot be read. The hub is not asked."""
    folder = BUILTIN if name == "builtin" else Path(name).expanduser()
    if not folder.exists() and (cached := _cached(name, options)) is not None:
        folder = cached
    inner = folder / (options.get("subfolder") or "")
    where = next((path for path in (inner, folder) if tokenizer_files(path)), None)
    if where is None:
        return None
    try:
        return vocabulary(where, bool(options.get("trust_remote_code")))
    except Exception:  # of transformers and tokenizers: each has its own kinds
        return None


def _cached(name: str, options: Mapping[str, Any]) -> Path | None:
    import huggingface_hub as hub

    kept = {key: value for key, value in options.items() if key in ("revision", "cache_dir")}
    try:
        file = hub.try_to_load_from_cache(name, "tokenizer_config.json", **kept)
    except ValueError:  # no name of a model on the hub
        return None
    return Path(file).parent if isinstance(file, str) else None
