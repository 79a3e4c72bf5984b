"""Small GGUF files, written as llama.cpp does."""

import gguf
import numpy as np

import tiny

SPECIAL = {"<|endoftext|>": 37, "<|im_start|>": 38, "<|im_end|>": 39}
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>b"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # blocks of 32 numbers are quantised together
MODELS = {
    "llama": {"name": "llama", **SIZES},
    "llama-tied": {"name": "llama-tied", **SIZES},
    "qwen2": {"name": "qwen2-grouped", **{k: v for k, v in SIZES.items() if k != "head_dim"}},
}


def made(name, **more):
    return tiny.make(**MODELS[name], **more)


def permuted(weight, heads):
    """llama.cpp rotates neighbours where transformers rotates halves."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tokens():
    """A byte-level vocabulary: letters, two merges, and special tokens."""
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)] + list("0123456") + ["Ċ", "Ġ"]
    return [*letters, "ab", "abc", *SPECIAL][: tiny.VOCABULARY]


def write(path, model, kind=gguf.GGMLQuantizationType.F32, ends=True, **fields):
    config = model.config
    arch = {"llama": "llama", "qwen2": "qwen2"}[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens())
    writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens()])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_chat_template(CHAT)
    if ends:
        writer.add_eos_token_id(SPECIAL["<|im_end|>"])
        writer.add_bos_token_id(SPECIAL["<|endoftext|>"])
        writer.add_pad_token_id(SPECIAL["<|endoftext|>"])
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map({"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[arch], 2)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in key or "k_proj" in key):
            weight = permuted(weight, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if weight.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
