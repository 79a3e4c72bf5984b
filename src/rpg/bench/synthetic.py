"""What the parts are measured on: sizes, models of known shapes with random weights, prompts of numbers, a reward."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..models.known_shapes import KNOWN, rope

# ---- sizes -----------------------------------------------------------------------------------------------------------


def size(default: Any, cpu: Any, meaning: str) -> Any:
    return field(default=default, metadata={"cpu": cpu, "meaning": meaning})


@dataclass(frozen=True)
class Sizes:
    """A flag a field: its default on a GPU, and on a CPU, where the parts are only there to be tried out in seconds."""

    model: str = size(
        "0.5b", "tiny", "a shape (17m, 0.5b, 1.5b, 4b, tiny: random weights), builtin, a folder or a hub id"
    )
    small: str = size("17m", "tiny", "the small model, whose limit is launches rather than memory")
    prompts: int = size(256, 8, "rollout: prompts, one response each")
    slots: int = size(512, 16, "rows decoded at once by the small model and in the whole step")
    prompt_tokens: int = size(178, 12, "tokens of a prompt")
    new_tokens: int = size(320, 16, "tokens of a response")
    peer_new_tokens: int = size(64, 8, "tokens that transformers' continuous batching samples: its step takes long")
    draws: int = size(65536, 2048, "samples of two tokens for the test of the distribution")
    tokens: int = size(16384, 64, "logp: tokens")
    hidden: int = size(2560, 32, "logp: hidden size")
    vocab: int = size(151936, 512, "logp: vocabulary")
    groups: int = size(64, 4, "train and step: prompts")
    samples: int = size(8, 4, "train and step: responses to each")
    micro: int = size(64, 8, "responses in one pass of TRL")
    matmul: int = size(8192, 256, "side of the square product that measures the matrix rate")
    copy: int = size(2**31, 2**24, "bytes of the copy that measures the memory rate")
    repeats: int = size(3, 1, "of what takes seconds; medians are shown")
    device: str = "cuda"
    quick: bool = False

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return 4 if self.device == "cpu" else 2


FLAGS = tuple(f for f in fields(Sizes) if f.metadata)
HALVED = ("peer_new_tokens", "draws", "tokens", "groups")


def sizes_for(device: str, quick: bool = False, **flags: Any) -> Sizes:
    """The defaults of the device, halved where that can be for --quick, with the flags that are not None."""
    cpu = {f.name: f.metadata["cpu"] for f in FLAGS} if device == "cpu" else {}
    sizes = Sizes(**cpu, device=device)
    if quick:
        halves = {name: max(2, getattr(sizes, name) // 2) for name in HALVED}
        sizes = replace(sizes, quick=True, repeats=1, **halves)
    return replace(sizes, **{name: value for name, value in flags.items() if value is not None})


# ---- models ----------------------------------------------------------------------------------------------------------

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
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def check_model(name: str) -> None:
    """A mistake in a name is reported before anything is measured, and the hub asked once."""
    if name in SHAPES or name == "builtin" or (Path(name).expanduser() / "config.json").is_file():
        return
    if name.count("/") != 1 or Path(name).expanduser().exists():
        shapes = ", ".join(SHAPES)
        raise ValueError(f"no model {name!r}: neither a shape ({shapes}), builtin, a model's folder nor a hub id")
    import transformers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is said once, not at each retry
    try:
        transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # of transformers and the hub: each has its own kinds
        raise ValueError(f"cannot load the model {name!r}: {' '.join(str(error).split())[:200]}") from error


def make_model(name: str, sizes: Sizes, dtype: str | None = None, seed: int = 0, **changes: Any) -> Any:
    """A model on the device that never ends a response by itself, so that all lengths are equal."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = getattr(torch, dtype or sizes.dtype)
    if name in SHAPES:
        architecture, settings = SHAPES[name]
        config = getattr(transformers, architecture)(**(rope(settings | changes) | NO_SPECIAL_TOKENS))
        torch.manual_seed(seed)
        with torch.device(sizes.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    else:
        from ..models.policy import Policy

        model = Policy.load(name, device=sizes.device, dtype=kind).model
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model.eval()


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


# ---- prompts and their reward ----------------------------------------------------------------------------------------


@cache
def make_tokenizer(vocabulary: int) -> Any:
    """Token i is the number i. The end token is one that the model does not have: no response ends with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0} | {str(i): i for i in range(1, vocabulary)} | {"<eos>": vocabulary}
    core = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Without token 0, the padding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(1, vocab, (count, length), generator=generator).tolist()
    return ids


def last_digit_odd(response: str, answer: str, prompt: str) -> float:
    """A reward that differs from response to response and costs nothing. Loading this file does not load torch."""
    return float(response[-1:] in tuple("13579"))
