"""A model and its tokenizer by name: builtin, a folder, a hub id, a .gguf file, a PEFT adapter. Errors are one line."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import BUILTIN, adapters, four_bits
from .errors import Explained, explain, refusal
from .gguf import load_gguf

PATIENCE = 10  # seconds for the first answer of the hub
SHARED = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder", "trust_remote_code")
OURS = {"dtype": "dtype", "torch_dtype": "dtype", "device_map": "device"}  # options that are settings of their own
TOKENIZERS = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "*.tiktoken", "tekken.json")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def load(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    options: Mapping[str, Any] | None = None,
    base_bits: int | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer). ``options`` go to from_pretrained: revision, token, trust_remote_code, …

    ``base_bits`` 4: the layers' weights are rounded to 4 bits on the way to the device, which never has them all dense.
    So they are for an adapter that was trained on such weights.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is said once, not at each retry
    options = {"trust_remote_code": False, **(options or {})}  # False: else transformers asks at the terminal
    for option, setting in OURS.items():
        if option in options:
            raise ValueError(f"model_options.{option}: give --{setting} instead")
    where = str(BUILTIN) if name == "builtin" else str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        model, tokenizer = _load(name, where, dtype, options)
        complete(tokenizer, model)
        make_savable(model)
        if base_bits or adapters.base_bits(model):
            four_bits.quantise_layers(model, device)
    except (Explained, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of transformers, tokenizers, safetensors, the hub: each has its own kinds
        raise ValueError(explain(name, error)) from error
    return model.to(device), tokenizer


def _load(name: str, where: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    if where.endswith(".gguf"):
        return load_gguf(name, _gguf_file(name, where, options), dtype)
    folder = Path(where)
    if not (name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.exists()):
        return _load_from_hub(name, dtype, options)
    inner = options.pop("subfolder", None) or ""
    if is_adapter(folder / inner):
        return _load_adapter(name, folder / inner, dtype, options)
    if is_adapter(folder):  # the subfolder is of the model that it is for
        return _load_adapter(name, folder, dtype, {**options, "subfolder": inner})
    if (folder / inner).is_dir():  # else it is of the model that this folder was made from
        folder, options["subfolder"] = folder / inner, inner
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        hint = f"give the file: {files[0]}" if files else "give a folder that save_pretrained wrote, or a hub id"
        missing = "there is no config.json in it" if folder.is_dir() else "there is no such folder, so no config.json"
        raise Explained(f"{name} is no model folder: {missing}; {hint}")
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        raise Explained(f"{name} has no tokenizer files: copy those of the model it was made from into it")
    return _from_pretrained(name, where, dtype, options)


def is_missing(name: str) -> bool:
    """Whether this can only be something on this machine, and is not there. (org/name/file.gguf is on the hub.)"""
    local = name.startswith((".", "/", "~", "runs/")) or (name.count("/") > 1 and not name.endswith(".gguf"))
    return local and not Path(name).expanduser().exists()


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _from_pretrained(name: str, where: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shared = {key: value for key, value in options.items() if key in SHARED}
    config = AutoConfig.from_pretrained(where, **shared)
    check_config(name, config)
    tokenizer = AutoTokenizer.from_pretrained(where, **shared)
    model, info = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise Explained(
            f"{name} lacks {len(missing)} of the model's weights, {missing[0]} for one: its files are not all"
        )
    return model, tokenizer


def check_config(name: str, config: Any) -> None:
    """That this is a causal language model with weights that can be trained."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    causal = {x for names in CAUSAL.values() for x in (names if isinstance(names, (list, tuple)) else [names])}
    remote = getattr(config, "auto_map", None) or {}
    kinds = getattr(config, "architectures", None) or []
    fits = any(kind in causal or kind.endswith("Model") for kind in kinds) or "AutoModelForCausalLM" in remote
    if kinds and not fits:
        raise Explained(f"{name} is a {kinds[0]}, no causal language model: give one whose class ends in ForCausalLM")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        how = quantised.get("quant_method", "") if isinstance(quantised, dict) else quantised.quant_method
        raise Explained(
            f"{name} has quantised weights ({how}), which cannot be trained: give the model it was made from"
        )


def complete(tokenizer: Any, model: Any) -> None:
    """A padding token, where there is none: the end token, or another special one. Padding is masked everywhere."""
    if tokenizer.pad_token_id is not None:
        return
    ends = end_ids_of(model.generation_config, model.config.get_text_config())
    chosen = tokenizer.eos_token or (tokenizer.convert_ids_to_tokens(ends[0]) if ends else None)
    chosen = chosen or next(iter(tokenizer.all_special_tokens), None)
    if chosen is None:
        raise Explained("the tokenizer has neither a padding nor an end token: set eos_token in tokenizer_config.json")
    tokenizer.pad_token = chosen


def end_ids_of(*holders: Any) -> list[int]:
    """The end tokens that a tokenizer or configs name."""
    named = [getattr(holder, "eos_token_id", None) for holder in holders]
    ends = [i for end in named if end is not None for i in (end if isinstance(end, list) else [end])]
    if wrong := [i for i in ends if not isinstance(i, int) or isinstance(i, bool)]:
        raise Explained(f"the model's eos_token_id must be a number, or several; got {str(wrong[0])[:60]!r}")
    return ends


def make_savable(model: Any) -> None:
    """transformers reads generation settings that contradict each other, and refuses to write them."""
    settings = model.generation_config
    for changes in ({}, {"do_sample": True}):  # what most lack: a temperature without sampling
        for key, value in changes.items():
            setattr(settings, key, value)
        try:
            settings.validate(strict=True)
            return
        except ValueError:
            continue
    ids = {key: getattr(settings, key) for key in ("bos_token_id", "eos_token_id")}
    model.generation_config = type(settings)(**ids)


# ---- adapters --------------------------------------------------------------------------------------------------------


def _load_adapter(name: str, folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    """The model that the adapter is for, with the adapter in it; the tokenizer that lies beside it, if one does."""
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise Explained(f"{name}: its adapter_config.json does not name the model it is for (base_model_name_or_path)")
    if not Path(base).exists() and Path(base).parts[-3:] == BUILTIN.parts[-3:]:  # of another installation
        base = "builtin"
    try:
        model, tokenizer = load(base, dtype=dtype, options=options)
    except ValueError as error:
        raise Explained(f"{name} is an adapter for {base}: {error}") from error
    if any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=options["trust_remote_code"])
    return adapters.restore(model, folder), tokenizer


# ---- the hub ---------------------------------------------------------------------------------------------------------


def _load_from_hub(name: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    if not HUB_ID.fullmatch(name):
        raise Explained(f"{name!r} is neither a folder nor a hub id: a hub id is org/name")
    file, offline = ask_hub(name, ["config.json", "adapter_config.json"], options)
    options = options | offline
    if file == "config.json":
        return _from_pretrained(name, name, dtype, options)
    import huggingface_hub

    kept = {key: value for key, value in options.items() if key in SHARED[:5]}
    folder = huggingface_hub.snapshot_download(name, allow_patterns=["adapter_*", "*.jinja", *TOKENIZERS], **kept)
    return _load_adapter(name, Path(folder), dtype, {k: v for k, v in options.items() if k != "revision"})


def ask_hub(repository: str, files: list[str], options: Mapping[str, Any]) -> tuple[str, dict[str, bool]]:
    """One request, not repeated, before transformers makes many: (which of these files is there, more options).

    Where there is no answer and the file is in the cache, ``local_files_only`` keeps transformers from asking again.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    if difflib.get_close_matches(repository.lower(), ["builtin"], 1, 0.8):
        raise Explained(f"there is no model {repository!r}; did you mean builtin?")
    revision, folder = options.get("revision"), options.get("subfolder")
    trouble: Exception | None = None
    if not (options.get("local_files_only") or hub.constants.HF_HUB_OFFLINE):
        for file in files:
            url = hub.hf_hub_url(repository, file, subfolder=folder, revision=revision)
            try:
                hub.get_hf_file_metadata(url, token=options.get("token"), timeout=PATIENCE)
                return file, {}
            except errors.EntryNotFoundError:
                continue
            except Exception as error:  # no answer, or one that says no
                trouble = error
                break
        if trouble is None:
            raise Explained(f"{repository} has no {files[0]}: see https://huggingface.co/{repository}/tree/main")
    for file in files:
        path = f"{folder}/{file}" if folder else file
        cached = hub.try_to_load_from_cache(repository, path, cache_dir=options.get("cache_dir"), revision=revision)
        if isinstance(cached, str) and not isinstance(trouble, errors.RepositoryNotFoundError):
            return file, {"local_files_only": True}
    raise Explained(refusal(repository, trouble, revision))


def _gguf_file(name: str, where: str, options: dict[str, Any]) -> Path:
    """On this machine; org/name/file.gguf is fetched, where there is no such file here."""
    path, parts = Path(where), where.split("/")
    if path.is_file():
        return path
    if name.startswith((".", "/", "~")) or len(parts) < 3:
        raise Explained(f"there is no file {name}; on the hub it is org/name/file.gguf")
    import huggingface_hub

    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    kept = {key: value for key, value in options.items() if key in SHARED[:5]}
    kept |= ask_hub(repository, [file], kept)[1]
    return Path(huggingface_hub.hf_hub_download(repository, file, **kept))
