"""Sampling by vLLM alone, as it sets itself up: its graphs and its prefix cache are on, no engine of ours around it."""

from __future__ import annotations

import importlib.util
import tempfile
from time import perf_counter
from typing import Any

from ..console import install
from ..rollout.vllm import import_vllm
from .synthetic import Sizes, make_model, random_prompts, vocabulary
from .timing import Numbers, SideFailed, finish, fresh, timed

MEMORY = 0.8  # share of a GPU's memory that it may take
SPACE_GIB = 1  # for keys and values on a CPU, where it would take half of the memory


def vllm_generate(sizes: Sizes, with_logp: bool) -> Numbers:
    """One response to each prompt, by random weights of the same shape. ``with_logp``: with the log-probabilities of
    what was drawn, which RL needs."""
    if importlib.util.find_spec("vllm") is None:
        raise SideFailed(f"not installed: {install('rpg-rl[vllm]')}")
    vllm, rows = import_vllm(), sizes.prompts
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(sizes.model, sizes)
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(rows, sizes.prompt_tokens, vocabulary(model))]
        model.config.save_pretrained(folder)
        del model
        fresh(sizes.device)
        engine = vllm.LLM(folder, **_settings(sizes))

    def generate(new: int) -> float:
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0 if with_logp else None
        )
        begin = perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        finish(sizes.device)
        seconds = perf_counter() - begin
        given = [output.outputs[0] for output in outputs]
        if [len(response.token_ids) for response in given] != [new] * rows:
            raise ValueError(f"{sum(len(r.token_ids) for r in given)} tokens instead of {rows * new}")
        if with_logp and any(response.logprobs is None for response in given):
            raise ValueError("it gave no log-probabilities")
        return seconds

    few, new = max(1, sizes.new_tokens // 20), sizes.new_tokens
    seconds = timed(lambda: generate(new), sizes.device, sizes.repeats)
    step = 1000 * (seconds - timed(lambda: generate(few), sizes.device, 1, warmup=0)) / (new - few)
    return {"tokens/s": rows * new / seconds, "ms a step": step}


def _settings(sizes: Sizes) -> dict[str, Any]:
    room = {"kv_cache_memory_bytes": SPACE_GIB * 2**30} if sizes.device == "cpu" else {"gpu_memory_utilization": MEMORY}
    return room | {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": sizes.dtype,
        "max_model_len": sizes.prompt_tokens + sizes.new_tokens + 1,
        "max_num_seqs": sizes.prompts,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
