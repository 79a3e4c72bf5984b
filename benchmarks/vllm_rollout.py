"""Tokens a second of the vLLM engine and of the native one: the same model, prompts and lengths, in turns.

    .venv-vllm/bin/python benchmarks/vllm_rollout.py            # built-in model, and one of the shape of SmolLM2-135M

End tokens are off, so that both sample the same number of tokens. Runs in the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
import transformers

from rpg.models.policy import Policy
from rpg.rollout import Engine, NativeEngine
from rpg.rollout.vllm import VllmEngine

SMOLLM = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def model_of(name: str) -> torch.nn.Module:
    if name == "builtin":
        return Policy.load("builtin").model
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM)).eval()


def speed(engine: Engine, prompts: list[list[int]], n: int, new: int, seed: int) -> float:
    begin = time.perf_counter()
    found = engine.generate(prompts, n, new, seed=seed)
    seconds = time.perf_counter() - begin
    return sum(len(r.tokens) for group in found for r in group) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["builtin", "135m"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    how = parser.parse_args()
    for name in how.models:
        model = model_of(name)
        size = model.get_input_embeddings().weight.shape[0]
        prompts = [[4 + (7 * i + j) % (size - 4) for j in range(how.prompt_tokens)] for i in range(how.prompts)]
        ends = [size + 10]  # no token has this number
        slots = how.prompts * how.samples
        native = NativeEngine(model, SimpleNamespace(eos_token_id=None), slots, end_ids=ends)
        vllm = VllmEngine(model, ends, how.prompt_tokens + how.new_tokens, slots)
        rows: dict[str, list[float]] = {"native": [], "vllm": []}
        for seed in range(how.repeats + 1):
            for label, engine in (("native", native), ("vllm", vllm)):
                found = speed(engine, prompts, how.samples, how.new_tokens, seed)
                if seed:  # the first is a warm-up
                    rows[label].append(found)
        vllm.sync()
        begin = time.perf_counter()
        vllm._ready()
        synced = time.perf_counter() - begin
        middle = {label: statistics.median(values) for label, values in rows.items()}
        print(
            f"{name}: native {middle['native']:.0f} tok/s, vLLM {middle['vllm']:.0f} tok/s "
            f"({middle['vllm'] / middle['native']:.2f}×), sync {1000 * synced:.0f} ms"
        )
        vllm.close()


if __name__ == "__main__":
    main()
