"""Tiny models whose heads are as wide as vLLM wants them on a CPU, and what the forward pass says of a response."""

import gc
import importlib.util
from contextlib import contextmanager

import pytest
import torch
import transformers

from rpg.kernels.sample_torch import truncate

VOCABULARY = 80
ENDS = [1, 2]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 9, 2, 8], [7, 8] * 20, [12, 13]]
CLOSE = 3e-5  # in float32, with logits of up to ten

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"
)


def make(kind="qwen2", width=32, tied=True, dtype=torch.float32, seed=0, **options):
    """Two layers, two heads of ``width`` to one of keys; weights so large that distributions are far from flat."""
    config = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[
        kind
    ](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2)
            else:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


@contextmanager
def starting():
    """A function that starts an engine, which is closed after: a process has one at a time."""
    from rpg.rollout.vllm import VllmEngine

    made = []

    def start(model, ends=ENDS, longest=200, slots=32, **options):
        options.setdefault("kv_cache_memory_bytes", 2**25)
        made.append(VllmEngine(model, ends, longest, slots, options))
        return made[-1]

    gc.collect()  # what is left of one that did not start
    yield start
    for engine in made:
        engine.close()


@torch.no_grad()
def forward_logp(model, prompt, tokens, temperature=1.0, **how):
    ids = torch.tensor([[*prompt, *tokens]])
    logits_TV = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return truncate(logits_TV, **how).log_softmax(-1)[torch.arange(len(tokens)), tokens]


def worst(model, prompts, groups, **how):
    """The largest difference to the forward pass."""
    return max(
        float((forward_logp(model, prompt, r.tokens, **how) - torch.tensor(r.logp)).abs().max())
        for prompt, group in zip(prompts, groups, strict=True)
        for r in group
    )


def flat(groups):
    return [rollout for group in groups for rollout in group]


def tokens(groups):
    return [r.tokens for r in flat(groups)]
