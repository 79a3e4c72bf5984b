"""Models of known shapes with random weights, made on the device, and a tokenizer whose words are numbers."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..models.known_shapes import KNOWN, rope
from .sizes import Sizes

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
                             "tie_word_embeddings": True}),
    "17m": ("LlamaConfig", {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
                            "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 32768,
                            "tie_word_embeddings": True}),
    "0.5b": KNOWN["Qwen/Qwen2.5-0.5B"],
    "1.5b": KNOWN["Qwen/Qwen2.5-1.5B"],
    "4b": KNOWN["Qwen/Qwen3-4B"],
}  # fmt: skip


def check_model(name: str) -> None:
    """A mistake in a name is known before anything is measured, and the hub asked once."""
    if name in SHAPES or name == "builtin":
        return
    if (Path(name).expanduser() / "config.json").is_file():
        return
    if name.count("/") != 1 or Path(name).expanduser().exists():
        known = ", ".join(SHAPES)
        raise ValueError(f"no model {name!r}: neither a shape ({known}), builtin, a model's folder nor a hub id")
    import transformers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is said once, not at each retry
    try:
        transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # of transformers and the hub: each has its own kinds
        raise ValueError(f"cannot load the model {name!r}: {' '.join(str(error).split())[:200]}") from error


def make_model(name: str, sizes: Sizes, dtype: str | None = None, seed: int = 0, **changes: Any) -> Any:
    """A model that never ends a response by itself, so that all lengths are equal."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = getattr(torch, dtype or sizes.dtype)
    if name in SHAPES:
        architecture, settings = SHAPES[name]
        config = getattr(transformers, architecture)(**_settings(settings | changes))
        torch.manual_seed(seed)
        with torch.device(sizes.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    else:
        from ..models.policy import Policy

        model = Policy.load(name, device=sizes.device, dtype=kind).model
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model.eval()


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Without special tokens."""
    return rope(settings) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@cache
def make_tokenizer(vocabulary: int) -> Any:
    """Token i is the word i. The end token is one that the model does not have: no response ends with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0} | {str(i): i for i in range(1, vocabulary)} | {"<eos>": vocabulary}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Without token 0, the padding."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(1, vocab, (count, length), generator=generator).tolist()
    return found


def save_model(sizes: Sizes, folder: Path) -> int:
    """Model and tokenizer as a Hugging Face folder, for sides that load one; its vocabulary."""
    model = make_model(sizes.model, sizes)
    model.save_pretrained(folder)
    make_tokenizer(vocabulary(model)).save_pretrained(folder)
    return vocabulary(model)
