"""Models without their weights: parameters that have shapes but no bytes (torch's meta device)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..console import flat_text
from . import BUILTIN, adapters, four_bits
from .errors import Explained, explain
from .known_shapes import known_config
from .loading import SHARED, ask_hub, check_config, is_adapter


@dataclass(frozen=True)
class Shell:
    model: Any
    parameters: int
    trained: int
    known_from: str  # where its shape is from


def shell(
    name: str,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    method: str | None = None,
    adapter: str = "{}",
    base_bits: int | None = None,
) -> Shell:
    """The model that ``name`` means in a run; with ``method`` an adapter of PEFT, its options as JSON, on it, and with
    ``base_bits`` 4 the layers under that in 4 bits."""
    return _shell(name, dtype, json.dumps(dict(options), default=str), method, adapter, base_bits)


@lru_cache(maxsize=16)
def _shell(
    name: str, dtype: torch.dtype, options: str, method: str | None, adapter: str, base_bits: int | None
) -> Shell:
    import transformers

    adapters.check_bits(base_bits, method, json.loads(adapter))
    base, saved_method, saved_options, saved_bits = _adapter(name)
    config, known_from = config_of(base, json.loads(options))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    parameters = sum(p.numel() for p in model.parameters())
    if base_bits or saved_bits:
        four_bits.quantise_layers(model, "meta")
    if kind := method or saved_method:
        model = adapters.attach(model, kind, json.loads(adapter) or saved_options, base)
    return Shell(model, parameters, sum(p.numel() for p in model.parameters() if p.requires_grad), known_from)


def config_of(name: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The model's config, and where it is from: its folder or file, models/known_shapes.py, or the hub or its cache."""
    from transformers import AutoConfig

    path = BUILTIN if name == "builtin" else Path(name).expanduser()
    kept = {"trust_remote_code": False} | {key: value for key, value in options.items() if key in SHARED}
    if name.endswith(".gguf"):
        return _of_gguf(name, path)
    inner = path / (kept.get("subfolder") or "")
    if path.is_dir():  # where it has no such subfolder, that is of the model it was made from
        path, kept["subfolder"] = inner if inner.is_dir() else path, ""
    here = (path / "config.json").is_file()
    if not here and (name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()):
        raise ValueError(f"{name} is no model folder: there is no config.json in it")
    if not here and (shape := known_config(name)) is not None:
        return shape, "shapes that rpg knows"
    try:
        if not here:
            kept |= ask_hub(name, ["config.json"], kept)[1]
        config = AutoConfig.from_pretrained(path if here else name, **kept)
        check_config(name, config)
    except Explained:
        raise
    except Exception as error:  # of transformers and the hub: each has its own kinds
        raise ValueError(explain(name, error)) from error
    return config, "its config.json"


def _of_gguf(name: str, path: Path) -> tuple[Any, str]:
    """Its header says what the model is; a file that is not here is not fetched for that."""
    from transformers import AutoConfig
    from transformers import modeling_gguf_pytorch_utils as reading

    if not path.is_file():
        raise ValueError(f"the shape of {name} is in the file, which is not here: fetch it, or plan with the hub id")
    try:
        settings = dict(reading.load_gguf_checkpoint(str(path))["config"])
        settings.pop("_model_name_or_path", None)
        return AutoConfig.for_model(settings.pop("model_type"), **settings), "the file's header"
    except Exception as error:  # whatever the reader stumbles over
        raise ValueError(f"{name}: its header cannot be read: {flat_text(error)}") from error


def _adapter(name: str) -> tuple[str, str | None, dict[str, Any], int | None]:
    """(base model, method, options, bits of the base) of a folder that holds an adapter; else the name alone."""
    file = Path(name).expanduser() / "adapter_config.json"
    if not is_adapter(file.parent):
        return name, None, {}, None
    settings = json.loads(file.read_text(encoding="utf-8"))
    options = {key: settings[key] for key in ("r", "target_modules", "use_dora") if key in settings}
    bits = four_bits.saved_bits(file.parent)
    return str(settings["base_model_name_or_path"]), str(settings["peft_type"]).lower(), options, bits
