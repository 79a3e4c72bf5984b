"""Pages of keys and values on a GPU: what attention reads and how fast, by the cache's precision; and a whole
generation with all the pages it could need, with half of them, and with a cache in 8 bits.

    python benchmarks/paged_cache.py --model 4b --rows 128 --prompt 178 --new 3072
"""

from __future__ import annotations

import argparse
import time

import torch

from rpg.bench.synthetic import make_model, make_tokenizer, random_prompts, sizes_for, vocabulary
from rpg.kernels.decode import FP8, PAGE, LayerCache, decode_attention
from rpg.rollout import NativeEngine


def attention_seconds(rows: int, length: int, shape: tuple[int, int, int], fp8: bool, repeats: int = 20) -> float:
    """Median of one layer's attention, every row with so many tokens of its own; four caches in turn, for the L2."""
    heads, key_heads, width = shape
    pages = -(-(length + 1) // PAGE)
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(rows, heads, width, **draw)
    key, value = torch.randn(2, rows, key_heads, width, **draw).unbind(0)
    table = torch.randperm(rows * pages, device="cuda").int().reshape(rows, pages)
    caches = []
    for _ in range(4):
        cache = LayerCache.empty(rows * pages, key[:, :, None], value[:, :, None], fp8)
        for page in torch.arange(rows * pages, device="cuda").split(256):
            new = torch.randn(2, len(page), PAGE, key_heads, width, **draw)
            cache.put(page[:, None], torch.arange(PAGE, device="cuda"), *new)
        caches.append(cache)
    none, row = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.arange(rows, device="cuda").int()
    lengths = torch.full_like(row, length)
    seconds = []
    for i in range(repeats + 4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        decode_attention(query, key, value, caches[i % 4], table[:1], table, none, none, row, lengths, width**-0.5)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return sorted(seconds[4:])[repeats // 2]


def generate_seconds(engine: NativeEngine, prompts: list[list[int]], new: int, seed: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.generate(prompts, 1, new, 1.0, seed)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="0.5b", help="a shape of rpg bench (0.5b)")
    for name, default in (("rows", 256), ("prompt", 178), ("new", 320)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    sizes = sizes_for("cuda", model=args.model)
    model = make_model(args.model, sizes)
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = config.num_attention_heads, config.num_key_value_heads, width
    length = args.prompt + args.new // 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.model}, {args.rows} rows\n")
    print(f"attention of a layer, {length} tokens a row      µs    TB/s")
    for name, fp8 in (("bfloat16", False), ("8 bits", True)):
        seconds = attention_seconds(args.rows, length, shape, fp8)
        read = 2 * args.rows * length * shape[1] * (width + 4 if fp8 else 2 * width)
        print(f"{name:40} {seconds * 1e6:9.0f} {read / seconds / 1e12:7.2f}", flush=True)

    prompts = random_prompts(args.rows, args.prompt, vocabulary(model))
    whole = args.rows * (-(-args.prompt // PAGE) + -(-args.new // PAGE)) * PAGE
    print("\na generation                          seconds  tokens/s  ms a step  set back")
    ways = [("all pages", {}), ("half of the pages", {"cache_tokens": whole // 2}), ("8 bits", {"cache_dtype": FP8})]
    for name, options in ways:
        engine = NativeEngine(model, make_tokenizer(vocabulary(model)), args.rows, warn=print, **options)
        engine.decoder.prepare(args.rows, args.rows, args.prompt, args.new)  # room for the long call: its graphs too
        generate_seconds(engine, prompts, min(args.new, 64), 1)
        seconds, timing = generate_seconds(engine, prompts, args.new, 2), engine.timing
        step = 1000 * timing.decode / timing.steps
        tokens = args.rows * args.new / seconds
        print(f"{name:36} {seconds:8.2f} {tokens:9,.0f} {step:10.2f} {timing.set_back:9}", flush=True)
        engine.release()


if __name__ == "__main__":
    main()
