"""Whole calls of sampling beside vLLM's: one model, the same prompts and lengths, one run.

    python benchmarks/whole_calls.py [--model 4b] [--work 32x4x178+3072 …] [--vllm | --vllm-only] [--json FILE]
    python benchmarks/whole_calls.py --model tiny --device cpu --work 3x2x12+16      # to see that it runs

A work is prompts x responses to each x tokens of a prompt + tokens of a response. Random weights, no response can end.
rpg with a cache in 16 and in 8 bits; with --vllm also vLLM (graphs and prefix cache on), without and with the
log-probabilities of what was drawn, which rpg always gives. Each side is a process of its own. A short call comes
first, which also captures what is replayed, then one whole call that counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from rpg.bench.synthetic import Sizes, make_model, make_tokenizer, random_prompts, sizes_for, vocabulary
from rpg.bench.timing import apart, error_line, finish, measure_ceilings
from rpg.bench.vllm import MEMORY, SPACE_GIB
from rpg.costs.memory import Shape
from rpg.costs.operations import Operations
from rpg.kernels.decode import FP8
from rpg.rollout import NativeEngine
from rpg.rollout.vllm import import_vllm

LIMIT = 500.0  # seconds of a side
SHORT = 24  # tokens of the call that warms up


class Work(NamedTuple):
    prompts: int
    samples: int
    prompt: int
    new: int

    @classmethod
    def read(cls, text: str) -> Work:
        prompts, samples, lengths = text.split("x")
        prompt, new = lengths.split("+")
        return cls(*map(int, (prompts, samples, prompt, new)))

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.new


def by_rpg(sizes: Sizes, works: list[Work], bits: int) -> list[dict[str, float]]:
    model, rows = make_model(sizes.model, sizes), max(work.prompts * work.samples for work in works)
    kind = FP8 if bits == 8 else None
    tokenizer = make_tokenizer(vocabulary(model))
    engine = NativeEngine(model, tokenizer, rows, warn=print, graphs=True, cache_dtype=kind)
    found = []
    for work in works:
        prompts = random_prompts(work.prompts, work.prompt, vocabulary(model))
        assert engine.decoder is not None
        with torch.inference_mode():
            engine.decoder.prepare(work.prompts * work.samples, work.prompts, work.prompt, work.new)
        for new in (SHORT, work.new):
            finish(sizes.device)
            begin = perf_counter()
            engine.generate(prompts, work.samples, new, 1.0, new)
            finish(sizes.device)
            seconds = perf_counter() - begin
        timing = engine.timing
        assert timing is not None
        engine.release()
        row = {"seconds": seconds, "prompts s": timing.prefill, "ms a step": 1000 * timing.decode / timing.steps}
        found.append(row | {"rows at a time": float(min(rows, work.prompts * work.samples))})
    return found


def by_vllm(sizes: Sizes, works: list[Work]) -> list[list[dict[str, float]]]:
    vllm = import_vllm()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(sizes.model, sizes)
        vocab = vocabulary(model)
        model.config.save_pretrained(folder)
        make_tokenizer(vocab).save_pretrained(folder)  # 0.26 asks for one, though it reads and writes no text
        del model
        torch.cuda.empty_cache()
        on_cpu = sizes.device == "cpu"
        room = {"kv_cache_memory_bytes": SPACE_GIB * 2**30} if on_cpu else {"gpu_memory_utilization": MEMORY}
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": sizes.dtype,
            "max_model_len": max(work.prompt + work.new for work in works) + 1,
            "max_num_seqs": max(work.prompts * work.samples for work in works),
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        engine = vllm.LLM(folder, **room, **settings)
    found = []
    for work in works:
        ids = random_prompts(work.prompts, work.prompt, vocab)  # each as often as it has responses: the cache shares it
        prompts = [{"prompt_token_ids": prompt} for prompt in ids for _ in range(work.samples)]
        pair = []
        for logprobs in (None, 0):
            for new in (SHORT, work.new):
                how = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
                sampling = vllm.SamplingParams(max_tokens=new, logprobs=logprobs, **how)
                engine.reset_prefix_cache()
                begin = perf_counter()
                outputs = engine.generate(prompts, sampling, use_tqdm=False)
                seconds = perf_counter() - begin
            counts = [len(response.token_ids) for output in outputs for response in output.outputs]
            if counts != [work.new] * (work.prompts * work.samples):
                raise ValueError(f"{sum(counts)} tokens instead of {work.tokens}")
            pair.append({"seconds": seconds})
            print(f"vLLM, logprobs {logprobs}: {seconds:.2f} s", file=sys.stderr, flush=True)
        found.append(pair)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="4b")
    parser.add_argument("--work", type=Work.read, nargs="+", default=[Work(32, 4, 178, 3072)])
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--vllm-only", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes, rows = sizes_for(args.device, model=args.model), list[dict[str, Any]]()

    def keep(name: str, found: list[dict[str, float]]) -> None:
        for work, row in zip(args.work, found, strict=True):
            rows.append({"side": name, "work": work, "tokens/s": work.tokens / row["seconds"], **row})
            print(f"  {name}: {rows[-1]}", file=sys.stderr, flush=True)

    ceilings = apart(measure_ceilings, replace(sizes, quick=True), limit=LIMIT)
    sides = [("rpg, 16 bits", by_rpg, 16), ("rpg, 8 bits", by_rpg, 8)]
    for name, side, bits in sides if not args.vllm_only else ():
        try:
            keep(name, apart(side, sizes, args.work, bits, limit=LIMIT))
        except Exception as error:  # the other sides are worth having
            print(f"{name}: {error_line(error)}", flush=True)
    if args.vllm or args.vllm_only:
        try:
            pairs = apart(by_vllm, sizes, args.work, limit=LIMIT)
            keep("vLLM", [pair[0] for pair in pairs])
            keep("vLLM with log-probabilities", [pair[1] for pair in pairs])
        except Exception as error:
            print(f"vLLM: {error_line(error)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows))
    model = make_model(args.model, replace(sizes, device="meta"))
    operations, shape = Operations.of(model, sizes.element), Shape.of(model.config.get_text_config())
    print(f"{args.model}: {ceilings.flops / 1e12:.3g} TFLOP/s, {ceilings.bytes / 1e12:.3g} TB/s measured\n")
    print("| work | side | tokens/s | × vLLM | seconds | ms a step | × floor |\n|---|---|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: args.work.index(row["work"])):
        work, plain = row["work"], next((r for r in rows if r["side"] == "vLLM" and r["work"] == row["work"]), None)
        times = f"{row['tokens/s'] / plain['tokens/s']:.2f}" if plain else ""
        steps = ""
        if "ms a step" in row:
            counted = replace(
                operations, cache=shape.cache_bytes(sizes.element, "fp8" if "8 bits" in row["side"] else "auto")
            )
            count = work.prompts * work.samples
            floor = counted.decode_seconds(ceilings, count, work.prompt, work.new / 2, groups=work.prompts)
            steps = f"{row['ms a step']:.2f} | {row['ms a step'] / 1000 / floor:.2f}"
        text = f"{work.prompts} × {work.samples} × ({work.prompt} + {work.new})"
        print(
            f"| {text} | {row['side']} | {row['tokens/s']:,.0f} | {times} | {row['seconds']:.2f} | {steps or ' | '} |"
        )


if __name__ == "__main__":
    main()
