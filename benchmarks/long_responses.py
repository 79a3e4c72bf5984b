"""Long responses on a GPU: is what the pages give right, how fast is a step, what does each phase take?

    python benchmarks/long_responses.py                          # about three minutes on an H200
    python benchmarks/long_responses.py --parts e                # decoding steps alone
    python benchmarks/long_responses.py --device cpu             # tiny shapes, to see that it runs

Random weights, nothing is downloaded. Five parts, each printed as soon as it is there: a part that fails is a line, and
one that would begin after --seconds is left out. Floors are bytes and operations counted, over rates measured here.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rpg.bench.synthetic import Sizes, make_model, make_tokenizer, random_prompts, sizes_for, vocabulary
from rpg.bench.timing import finish, fresh, measure_ceilings, timed
from rpg.costs.memory import Shape, estimate
from rpg.costs.operations import Ceilings, Operations
from rpg.kernels.decode import FP8, LayerCache
from rpg.kernels.merged import merging
from rpg.plan.plan import plan
from rpg.rollout import NativeEngine, Rollout, Sampling
from rpg.rollout.attention import attending
from rpg.rollout.pages import page_bytes
from rpg.run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig, TaskConfig
from rpg.run.folder import RunFolder
from rpg.run.logs import RunLogs
from rpg.run.settings import flat
from rpg.run.view import View
from rpg.training.loop import Trainer
from rpg.training.oom_retry import pick_layout

STEPS = 24  # of part e
CACHES: dict[str, torch.dtype | None] = {"16 bits": None, "8 bits": FP8}  # on a CPU the first has 32


@dataclass(frozen=True)
class Work:
    """What is measured. On a CPU the shapes are tiny."""

    device: str
    checked: str = "17m"
    short: str = "0.5b"
    long: str = "4b"
    trained: str = "4b"
    rows: int = 128
    lengths: tuple[int, ...] = (512, 1500, 3000)  # held when the steps that are timed begin
    steps: int = 64
    prompt: int = 178
    new: int = 3072
    groups: int = 16
    samples: int = 16
    trained_tokens: int = 512

    @property
    def sizes(self) -> Sizes:
        return sizes_for(self.device, model=self.checked)


TINY = {"checked": "tiny", "short": "tiny", "long": "tiny", "trained": "tiny", "rows": 4, "lengths": (20, 70, 130)}
TINY |= {"steps": 12, "prompt": 12, "new": 64, "groups": 3, "samples": 4, "trained_tokens": 12}


def engine_of(model: Any, slots: int, **options: Any) -> NativeEngine:
    """On a CPU the steps of a GPU, without graphs."""
    return NativeEngine(model, make_tokenizer(vocabulary(model)), slots, warn=print, graphs=True, **options)


# ---- a: right ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def logp_error(model: Any, prompts: list[list[int]], groups: list[list[Rollout]]) -> tuple[float, float]:
    """Of the drawn tokens' log-probabilities, against a plain forward pass: the largest, and the mean."""
    off = []
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            ids = torch.tensor([[*prompt, *rollout.tokens]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            logp = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
            off.append((logp - torch.tensor(rollout.logp)).abs())
    every = torch.cat(off)
    return float(every.max()), float(every.mean())


def same(groups: list[list[Rollout]], others: list[list[Rollout]]) -> str:
    pairs = [pair for group, other in zip(groups, others, strict=True) for pair in zip(group, other, strict=True)]
    return f"{sum(one.tokens == other.tokens for one, other in pairs)} of {len(pairs)} the same"


def right(work: Work) -> Iterator[str]:
    new, samples = (200, 4) if work.device == "cuda" else (40, 4)
    yield f"log-probabilities of drawn tokens, {work.checked}, {new} tokens a response          largest     mean"
    for kind in ("float32", "bfloat16"):
        model = make_model(work.checked, work.sizes, kind)
        prompts = random_prompts(8, 100, vocabulary(model))
        for name, cache in {f"of {kind}": None, "of 8 bits": FP8}.items():
            found = engine_of(model, 32, cache_dtype=cache).generate(prompts, samples, new, 1.0, 1)
            largest, mean = logp_error(model, prompts, found)
            yield f"  {kind} model, cache {name:38} {largest:10.2g} {mean:8.1g}"
    model = make_model(work.checked, work.sizes, "float32")
    prompts = random_prompts(8, 100, vocabulary(model))
    expected = engine_of(model, 32).generate(prompts, samples, new, 1.0, 1)
    tokens = (8 * 128 + 32 * new) * 2 // 5  # two fifths of what they need
    yield "responses that wait for pages, float32"
    for name, share in (("all kept on the host", None), ("an eighth of the cache", 1 / 8), ("none kept", 0.0)):
        engine = engine_of(model, 32, cache_tokens=tokens)
        decoder = engine.decoder
        assert decoder is not None
        assert decoder.buffers is not None
        if share is not None:
            decoder.host_bytes = int(share * page_bytes(decoder.buffers.layers) * tokens / decoder.page)
        if work.device == "cpu":  # whose responses are too short for pages of that size
            decoder.page = 16
            engine.release()
        found = engine.generate(prompts, samples, new, 1.0, 1)
        timing = engine.timing
        assert timing is not None
        error = logp_error(model, prompts, found)[0]
        waited = f"set back {timing.set_back}, begun again {timing.begun_again}"
        yield f"  {name:26} {same(found, expected)}, {waited}, largest error {error:.2g}"


# ---- b: a usual rollout ----------------------------------------------------------------------------------------------


def usual(work: Work, ceilings: Ceilings) -> Iterator[str]:
    rows, new = (256, 320) if work.device == "cuda" else (8, 16)
    model = make_model(work.short, work.sizes)
    operations = Operations.of(model, work.sizes.element)
    shape = Shape.of(model.config.get_text_config())
    prompts = random_prompts(rows, work.prompt, vocabulary(model))
    yield f"{work.short}, {rows} × ({work.prompt} + {new})         tokens/s   ms a step   floor   × floor"
    for name, cache in CACHES.items():
        engine = engine_of(model, rows, cache_dtype=cache)
        best = None
        for seed in range(3):  # the first captures
            finish(work.device)
            begin = time.perf_counter()
            engine.generate(prompts, 1, new, 1.0, seed)
            finish(work.device)
            seconds, timing = time.perf_counter() - begin, engine.timing
            assert timing is not None
            if best is None or seconds < best[0]:
                best = seconds, timing
        assert best is not None
        counted = floor_of(operations, shape, work, cache)
        floor = 1000 * counted.decode_seconds(ceilings, rows, work.prompt, new / 2)
        step = 1000 * best[1].decode / best[1].steps
        yield f"  cache of {name:18} {rows * new / best[0]:9,.0f} {step:11.2f} {floor:7.3f} {step / floor:9.2f}"
        engine.release()


def floor_of(operations: Operations, shape: Shape, work: Work, cache: torch.dtype | None) -> Operations:
    return replace(operations, cache=shape.cache_bytes(work.sizes.element, "auto" if cache is None else "fp8"))


# ---- c: long rows ----------------------------------------------------------------------------------------------------


def long(work: Work, ceilings: Ceilings) -> Iterator[str]:
    """Prompts that fill the cache to a length, and the steps from there."""
    model = make_model(work.long, work.sizes)
    operations = Operations.of(model, work.sizes.element)
    shape, rows = Shape.of(model.config.get_text_config()), work.rows
    yield f"{work.long}, {rows} rows, {work.steps} tokens each from   ms a step   floor   × floor   prompts s"
    for name, cache in CACHES.items():
        points = []
        for length in work.lengths:
            engine = engine_of(model, rows, cache_dtype=cache)
            engine.expect(length)
            engine.generate(random_prompts(rows, 16, vocabulary(model)), 1, work.steps, 1.0, 1)  # captures
            engine.generate(random_prompts(rows, length, vocabulary(model)), 1, work.steps, 1.0, 2)
            timing = engine.timing
            assert timing is not None
            step, middle = 1000 * timing.decode / timing.steps, length + work.steps / 2
            floor = 1000 * floor_of(operations, shape, work, cache).decode_seconds(
                ceilings, rows, length, work.steps / 2
            )
            points.append((middle, step))
            row = f"{step:9.2f} {floor:7.2f} {step / floor:9.2f} {timing.prefill:11.2f}"
            yield f"  cache of {name:9} {length:8,} tokens  {row}"
            engine.release()
            fresh(work.device)
        at, slope = fitted(points)
        whole = sum(at + slope * (work.prompt + t) for t in range(work.new)) / 1000
        yield (
            f"  → {rows} × ({work.prompt} + {work.new:,}) from a line through these: {whole:.1f} s of decoding, "
            f"{rows * work.new / whole:,.0f} tokens/s"
        )


def fitted(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The line of least squares: its value at 0, and its slope."""
    xs, ys = zip(*points, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a in xs)
    return y - slope * x, slope


# ---- d: both phases --------------------------------------------------------------------------------------------------


class LastRow(View):
    row: dict[str, Any]

    def step(self, row: Any) -> None:
        self.row = row


def phases(work: Work) -> Iterator[str]:
    """Two steps of rpg train with offload; what each phase took of memory and time, beside what the plan says."""
    with TemporaryDirectory(prefix="rpg-bench-") as name:
        folder = Path(name)
        model = make_model(work.trained, work.sizes)
        tokenizer = make_tokenizer(vocabulary(model))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        texts = [" ".join(map(str, ids)) for ids in random_prompts(2 * work.groups + 8, 32, vocabulary(model))]
        task = folder / "task.jsonl"
        task.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
        del model
        fresh(work.device)
        config = Config(
            steps=10**9,
            device=work.device,
            model=str(folder / "model"),
            output=str(folder / "run"),
            task=TaskConfig(name=str(task), reward="rpg.bench.synthetic:last_digit_odd"),
            rollout=RolloutConfig(
                prompts=work.groups,
                samples=work.samples,
                max_new_tokens=work.trained_tokens,
                max_prompt_tokens=256,  # some tokenizers split every digit
                dynamic=False,
                overlong=False,
            ),
            optim=OptimConfig(lr=1e-9, warmup=0, schedule="constant", minibatches=2, offload=True),
            eval=EvalConfig(every=0, problems=1),
            checkpoint=CheckpointConfig(keep=0),
            log=LogConfig(tensorboard=False, report=False, view="none"),
        )
        view = LastRow()
        with (
            Trainer(config, RunFolder(folder / "run"), view) as trainer,
            RunLogs(folder / "run", config.log, "bench", flat(config)) as logs,
        ):
            layout, room = pick_layout(trainer.policy, config, held=False), trainer.oom_retry
            begun = replace(layout, slots=min(layout.slots, work.groups * work.samples))
            about = trainer.policy.model, config, begun, room.tokens, room.recompute, False, not trainer.policy.apart
            planned = estimate(*about, gpu=work.device == "cuda")
            yield (
                f"{work.trained}, offload, {work.groups} × {work.samples} responses of {work.trained_tokens}: "
                f"{layout.slots} rows at a time planned, {begun.slots} here, micro-batches of {room.tokens:,}"
            )
            for step in (1, 2):
                trainer.step(step, logs)
            row = view.row
            prompt = len(trainer.policy.encode(texts[0]))
            seconds = plan(config, "h200", prompt_tokens=prompt).high.seconds  # nothing ends before the limit
            yield "  GB                        taken   planned"
            for phase in ("sampling", "training"):
                taken = row.get(f"memory/gpu_{phase}_gb", float("nan")) * 2**30 / 1e9
                yield f"  {phase:20} {taken:10.2f} {getattr(planned, phase) / 1e9:9.2f}"
            yield f"  moved                {'':10} {planned.moved / 1e9:9.2f}"
            yield "  seconds                   taken   planned     ratio"
            for part in ("rollout", "train", "offload", "step"):
                taken, said = row[f"time/{part}"], getattr(seconds, part)
                yield f"  {part:20} {taken:10.2f} {said:9.2f} {taken / said:9.2f}"


# ---- e: steps alone --------------------------------------------------------------------------------------------------


def alone(work: Work, ceilings: Ceilings) -> Iterator[str]:
    """Rows that hold so many random keys and values at once: no prompt is read, the step is replayed."""
    usual = (work.short, 256, (178, 338, 498)), (work.long, work.rows, work.lengths)
    for name, rows, lengths in usual if work.device == "cuda" else usual[1:]:
        model = make_model(name, work.sizes)
        operations, shape = Operations.of(model, work.sizes.element), Shape.of(model.config.get_text_config())
        yield f"{name}, {rows} rows that hold                   ms a step   floor   × floor"
        for title, cache in CACHES.items():
            step = step_of(model, rows, max(lengths) + 64, cache)
            counted = floor_of(operations, shape, work, cache)
            for length in lengths:
                ms = 1000 * timed(lambda step=step, length=length: step(length), work.device, 3) / STEPS
                floor = 1000 * counted.decode_seconds(ceilings, rows, 0, length + STEPS / 2)
                yield f"  cache of {title:9} {length:8,} tokens  {ms:9.3f} {floor:7.3f} {ms / floor:9.2f}"
            del step
            fresh(work.device)


def step_of(model: Any, rows: int, room: int, kind: torch.dtype | None) -> Callable[[int], None]:
    """STEPS steps of so many rows, which hold a given number of tokens each."""
    engine = engine_of(model, rows, cache_dtype=kind)
    decoder = engine.decoder
    assert decoder is not None
    assert decoder.buffers is not None
    _, heads, _, width = decoder.buffers.layers[0].keys_CGTD.shape
    like, layers = torch.empty(1, heads, 1, width, dtype=model.dtype, device=model.device), len(decoder.buffers.layers)
    b = decoder.prepare(rows, 1, 64, room)
    for _ in range(layers):
        cache = LayerCache.empty(b.pages.count, like, like, kind is not None, b.pages.page)
        for x in cache.parts:
            x.random_(0, 256).bitwise_and_(0xF7) if x.dtype == torch.uint8 else x.uniform_(0, 0.02)  # no NaN
        b.layers.append(cache)
    b.pages.extend(b.pages.prompts, [0], [1])
    b.pages.extend(b.pages.slots, list(range(rows)), [room] * rows)
    b.limit_1.fill_(10**8)
    b.uniform_SR.uniform_()

    @torch.inference_mode()
    def steps(length: int) -> None:
        state = [torch.full((rows,), x, dtype=torch.int32) for x in (0, 1, 0, length, 5)]
        state[2] = torch.arange(rows, dtype=torch.int32)
        b.state_5S[:, :rows] = torch.stack(state).to(model.device)
        with attending(model, b), merging():
            for _ in range(STEPS):
                decoder.step(rows, Sampling(room))

    return steps


# ---- all -------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="abcde", help="of a (right), b (usual), c (long), d (phases), e (steps)")
    parser.add_argument("--seconds", type=float, default=200, help="no part begins later (200)")
    args = parser.parse_args()
    begin = time.perf_counter()
    work = Work(args.device, **(TINY if args.device == "cpu" else {}))  # type: ignore[arg-type]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    ceilings = measure_ceilings(replace(work.sizes, quick=True))
    fresh(args.device)
    rates = f"{ceilings.flops / 1e12:.3g} TFLOP/s, {ceilings.bytes / 1e12:.3g} TB/s"
    print(f"{name}, torch {torch.__version__}: {rates} measured\n", flush=True)
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "a": lambda: right(work),
        "b": lambda: usual(work, ceilings),
        "c": lambda: long(work, ceilings),
        "d": lambda: phases(work),
        "e": lambda: alone(work, ceilings),
    }
    for letter in args.parts:
        since = time.perf_counter() - begin
        if since > args.seconds:
            print(f"{letter}: left out, {since:.0f} s are over", flush=True)
            continue
        try:
            for line in parts[letter]():
                print(line, flush=True)
        except Exception:  # the parts after it are worth having
            print(f"{letter} failed: {traceback.format_exc()}", flush=True)
        fresh(args.device)
        print(f"  ({time.perf_counter() - begin:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
