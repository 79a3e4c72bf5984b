"""A GGUF file as a plain model: its weights dequantised, to be trained and saved like any other."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..console import install
from .errors import Explained

# tokens at which llama.cpp (src/llama-vocab.cpp, special_eog_ids) ends a response, whatever the file names besides
ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"),
    *("<end_of_turn>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"),
)
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL = (3, 4)  # token types: control, user-defined


def load_gguf(name: str, path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer), all from the one file."""
    try:
        import gguf
    except ImportError as error:
        raise Explained(f"a .gguf file needs the package gguf: {install('rpg-rl[gguf]')}") from error
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.initialization import no_init_weights

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise Explained(f"{name} is no GGUF file: it does not begin with GGUF")
    try:
        reader = gguf.GGUFReader(path)
        kind = str(reader.fields["general.architecture"].contents())
    except Exception as error:  # a file that was cut: whatever the reader stumbles over
        raise Explained(f"{name} is damaged: its header cannot be read ({error}); fetch it again") from error
    _check_rope(name, kind, reader)
    with _read_once(gguf, reader), contextlib.redirect_stderr(io.StringIO()):  # a bar of its own, whatever is set
        try:
            settings = reading.load_gguf_checkpoint(str(path))["config"]
        except ValueError as error:
            raise Explained(f"{name}: {error} Give the Hugging Face folder of the same model") from error
        settings.pop("_model_name_or_path", None)
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        tensors = reading.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
        with tempfile.TemporaryDirectory() as alone:  # else tokenizer files that lie beside it are taken
            Path(alone, path.name).symlink_to(path.resolve())
            tokenizer = transformers.AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
    loaded = model.load_state_dict(tensors["tensors"], strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", {})) if config.tie_word_embeddings else set()
    if lacking := [key for key in loaded.missing_keys if key not in tied]:
        raise Explained(f"{name} lacks {len(lacking)} of the weights of {type(model).__name__}, {lacking[0]} for one")
    ends = end_ids(reader)
    if ends:
        model.generation_config.eos_token_id = ends
    return model.eval(), tokenizer


@contextlib.contextmanager
def _read_once(gguf: Any, reader: Any) -> Iterator[None]:
    """Within, transformers uses this reader: to read a vocabulary takes seconds, and it would three times."""
    reader_class = gguf.GGUFReader
    gguf.GGUFReader = lambda *args, **kwargs: reader
    try:
        yield
    finally:
        gguf.GGUFReader = reader_class


def end_ids(reader: Any) -> list[int]:
    """Those that the file names, its end token first, and those known to end a response."""
    named = [_field(reader, f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens, types = _field(reader, "tokenizer.ggml.tokens") or [], _field(reader, "tokenizer.ggml.token_type") or []
    place = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind in SPECIAL}
    usual = [place[text] for text in ENDS if text in place]
    return list(dict.fromkeys(int(i) for i in (*named, *usual) if i is not None))


def _check_rope(name: str, kind: str, reader: Any) -> None:
    """transformers reads neither factors for single frequencies (Llama 3.1) nor a scaling: positions would be wrong."""
    scaling = _field(reader, f"{kind}.rope.scaling.type")
    factors = any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    if factors or (scaling not in (None, "none") and kind != "gpt-oss"):
        raise Explained(
            f"{name} scales its rotary positions, which are not read from GGUF: give the Hugging Face folder or hub id"
        )


def _field(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()
