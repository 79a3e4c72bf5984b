"""A base in 4 bits: what it holds, what it costs, and whether it learns the same.

    python benchmarks/four_bits.py [--parts abc] [--model FOLDER] [--config FILE] [--minutes M] [-- flags of rpg train]

a  a model of 7B (--shape; random weights, made on the device layer by layer) does one step of training in --limit GB:
   peaks beside those of the plan
b  the same run with a base in 4 bits and with one in bfloat16, --minutes each: accuracy at both ends, seconds of a
   step, how far sampler and trainer are apart, peaks beside those of the plan. What stands behind -- goes to rpg train.
c  the product with weights in 4 bits beside the one with bfloat16: rounding error, microseconds of a decoding step's
   rows (in a CUDA graph, over matrices that no cache holds) and of a training pass
d  not unless named: the kernel of a decoding step with other sizes of its programs

Each part is a process of its own: one that fails does not end the others. The tables come last.
``--tiny`` tries the script itself: on any machine, with sizes that say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUIET = ["--log.view", "none", "--checkpoint.keep", "0", "--log.tensorboard", "false", "--log.report", "false"]
LORA = ["--peft.method", "lora"]
SAME = ["--optim.micro_tokens", "8192", "--optim.recompute", "true"]  # else activations, which vary, are most of it
SHAPES = {  # hidden, ffn, layers, heads, key heads, words
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "tiny": (64, 128, 2, 4, 2, 64),
}
MATRICES = {"7b": [(512, 3584), (3584, 3584), (18944, 3584), (3584, 18944)], "tiny": [(48, 128)]}  # rows of the weight
ROWS, TRAINED_ROWS = (1, 8, 16, 32, 64, 128, 256), (4096, 16384)
PROMPT, RESPONSE, SAMPLES = 512, 128, 4
REWARD = "import random\n\n\ndef f(response, answer, prompt):\n    return random.random()\n"
Row = dict[str, Any]


# ---- a: one step of a 7B model ---------------------------------------------------------------------------------------


def write_shape(folder: Path, shape: str) -> None:
    """config.json, and the built-in tokenizer."""
    from transformers import AutoTokenizer, Qwen2Config

    from rpg.models import BUILTIN

    hidden, ffn, layers, heads, key_heads, words = SHAPES[shape]
    Qwen2Config(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)


def random_model(name: str, *, dtype: Any, device: Any, base_bits: int | None = None, **_: Any) -> tuple[Any, Any]:
    """In the place of rpg's own loading: no file of weights is read, and the device never has them all dense."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.initialization import no_init_weights

    from rpg.models.four_bits import FourBitLinear

    with no_init_weights():  # places in host memory that nobody writes to
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)

    def fill(parameter: Any) -> Any:
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        return nn.Parameter(value.normal_(0, 0.02, generator=generator))

    for path, layer in list(model.named_modules()):
        for key, parameter in list(layer.named_parameters(recurse=False)):
            one = key == "weight" and parameter.dim() == 1
            setattr(layer, key, fill(parameter) if not one else nn.Parameter(torch.ones_like(parameter, device=device)))
        if base_bits and type(layer) is nn.Linear and layer is not model.get_output_embeddings():
            model.set_submodule(path, FourBitLinear(layer, device))
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def large(args: argparse.Namespace) -> list[Row]:
    """a: one step"""
    import torch

    import rpg
    from rpg.models import policy
    from rpg.plan.plan import plan
    from rpg.plan.table import show
    from rpg.run.config import Config
    from rpg.run.settings import build

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(args.limit * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_shape(folder / "model", args.shape)
        count, prompt, response = (8, 64, 16) if args.tiny else (2048, PROMPT, RESPONSE)
        problems = [{"prompt": f"{i % 9 + 1}+" + "1+" * (prompt // 2 - 2) + "1=", "answer": "1"} for i in range(count)]
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
        (folder / "test.jsonl").write_text("\n".join(json.dumps(x | {"prompt": "2+1="}) for x in problems[:1]))
        (folder / "reward.py").write_text(
            "import random\n\n\ndef f(response, answer, prompt):\n    return random.random()\n"
        )
        settings: dict[str, Any] = {
            "model": str(folder / "model"),
            "dtype": "bfloat16" if on_gpu else "float32",
            "algorithm": "grpo",
            "steps": 1,
            "output": str(folder / "run"),
            "task.name": str(folder / "train.jsonl"),
            "task.test": str(folder / "test.jsonl"),
            "task.reward": f"{folder / 'reward.py'}:f",
            "rollout.samples": SAMPLES,
            "rollout.max_new_tokens": response,
            "rollout.max_prompt_tokens": prompt,
            "rollout.prompts": 2,
            "rollout.slots": None if on_gpu else 8,
            "optim.minibatches": 1,
            "optim.offload": False,
            "eval.problems": 1,
            "eval.k": 1,
            "checkpoint.keep": 0,
            "log.report": False,
            "log.tensorboard": False,
            "log.view": "plain",
            "peft.method": "lora",
            "peft.base_bits": 4,
        }
        slots = plan(build(Config, flags=settings), args.card).layout.slots
        settings["rollout.prompts"] = 2 if args.tiny else slots // SAMPLES  # all slots are in use
        planned = plan(build(Config, flags=settings), args.card)
        show(planned)
        policy.load = random_model  # type: ignore[assignment]
        begin = time.perf_counter()
        rpg.train(**settings)
        seconds = time.perf_counter() - begin
        rows = read(folder / "run" / "metrics.jsonl")
    step = next(row for row in rows if "ess" in row)
    if on_gpu:
        print(f"reserved at most: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB of {args.limit:g}")
    facts = {"seconds in all": seconds, "slots": slots, "tokens of a step": step["tokens"]}
    facts |= {"micro-batch, tokens": planned.micro_tokens, "recomputed": planned.recompute}
    facts |= {f"seconds of {name}": step.get(f"time/{name}", 0.0) for name in ("rollout", "train", "step")}
    facts |= {"mismatch, KL": step["mismatch/kl"]}
    return [{"": name, "measured": value} for name, value in facts.items()] + peaks(rows, planned)


def peaks(rows: list[Row], planned: Any) -> list[Row]:
    """Of torch's allocator, in GB of 10^9."""
    table = []
    for phase in ("sampling", "training"):
        measured = max((row.get(f"memory/gpu_{phase}_gb", 0.0) for row in rows), default=0.0) * 2**30 / 1e9
        plan_gb = getattr(planned.memory, phase) / 1e9
        table.append({"": f"peak, {phase}, GB", "measured": measured, "plan": plan_gb, "ratio": measured / plan_gb})
    return table


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- b: the same run twice -------------------------------------------------------------------------------------------


def twice(args: argparse.Namespace) -> list[Row]:
    """b: the same run twice"""
    table: list[Row] = []
    found: dict[str, tuple[list[Row], Any]] = {}
    for name, bits in (("bf16", []), ("4-bit", ["--peft.base_bits", "4"])):
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--model", args.model, "--seed", str(args.seed), *LORA, *bits]
            flags += ["--minutes", str(args.minutes), "--steps", "10000", "--eval.every", "0"]
            flags += ["--optim.offload", "false", "--optim.lr", str(args.lr), *QUIET, *SAME]
            flags += [*(["--config", args.config] if args.config else []), *args.flags]
            command = [sys.executable, "-m", "rpg", "train", "--output", f"{folder}/run", *flags]
            subprocess.run(command, check=True)
            rows = read(Path(folder) / "run" / "metrics.jsonl")
            found[name] = rows, planned_of(Path(folder) / "run" / "config.yaml", args.card_of_runs)
        key = next(k.removesuffix("_low") for row in rows for k in row if k.startswith("eval/") and k.endswith("_low"))
        scores = [row for row in rows if key in row]
        steps = [row for row in rows if "ess" in row]
        for when, score in (("start", scores[0]), ("end", scores[-1])):
            interval = [score[f"{key}{side}"] for side in ("_low", "_high")]
            table.append(
                {"": f"{name}: {key}, {when}", "measured": score[key], "low": interval[0], "high": interval[1]}
            )
        table.append({"": f"{name}: steps", "measured": len(steps)})
        for part in ("step", "rollout", "train"):
            seconds = statistics.median(row.get(f"time/{part}", 0.0) for row in steps[1:] or steps)
            table.append({"": f"{name}: seconds of {part}, median", "measured": seconds})
        for kl in ("mismatch/kl", "mismatch/max_log_ratio"):
            table.append({"": f"{name}: {kl}, median", "measured": statistics.median(row[kl] for row in steps)})
        table += [row | {"": f"{name}: {row['']}"} for row in peaks(*found[name])]
    less = zip(peaks(*found["bf16"]), peaks(*found["4-bit"]), strict=True)
    for one, other in less:
        measured, plan_gb = (one[column] - other[column] for column in ("measured", "plan"))
        ratio = measured / plan_gb if plan_gb else 0.0
        table.append({"": f"less with 4 bits: {one['']}", "measured": measured, "plan": plan_gb, "ratio": ratio})
    return table


def planned_of(settings: Path, card: str) -> Any:
    from rpg.plan.plan import plan
    from rpg.run.config import Config
    from rpg.run.settings import build

    with tempfile.TemporaryDirectory() as folder:
        return plan(build(Config, file=settings, flags={"output": f"{folder}/other"}), card)


# ---- c: the product --------------------------------------------------------------------------------------------------


def products(args: argparse.Namespace) -> list[Row]:
    """c: the product"""
    return [row for matrix in MATRICES[args.shape] for row in of_matrix(*matrix, args.tiny)]


def of_matrix(columns: int, width: int, tiny: bool) -> list[Row]:
    import torch
    from torch.nn.functional import linear

    from rpg.kernels import nf4
    from rpg.kernels.merged import merging

    dense, packed = weights(columns, width)
    dtype, shape, count = dense[0].dtype, f"{columns}x{width}", len(dense)
    rounded = nf4.dequantise(*packed[0], dtype)
    before, nf4.has_triton = nf4.has_triton, lambda x: False
    same = torch.equal(rounded, nf4.dequantise(*packed[0], dtype))
    nf4.has_triton = before
    us = microseconds(lambda: [nf4.dequantise(*pair, dtype) for pair in packed], count)
    error = distance(rounded, dense[0])
    table: list[Row] = [{"": f"{shape}, made dense", "error": error, "kernel = torch": same, "dense us": us}]

    def few() -> None:
        with merging():
            [nf4.linear(x, *pair, None) for pair in packed]

    for rows in (1, 16) if tiny else ROWS:
        x = torch.randn(rows, width, device=dense[0].device, dtype=dtype)
        with torch.no_grad(), merging():
            found = nf4.linear(x, *packed[0], None)
        row: Row = {"": f"{shape}, {rows} rows", "error": distance(found, linear(x.double(), dense[0].double()))}
        row["of the kernel"] = distance(found, linear(x.double(), rounded.double()))
        row["bf16 us"] = microseconds(lambda: [linear(x, weight) for weight in dense], count)
        row["dense us"] = microseconds(lambda: [nf4.linear(x, *pair, None) for pair in packed], count)
        row["decode us"] = microseconds(few, count)
        table.append(row)
    for rows in (32,) if tiny else TRAINED_ROWS:
        x = torch.randn(rows, width, device=dense[0].device, dtype=dtype, requires_grad=True)
        dy = torch.randn(rows, columns, device=x.device, dtype=dtype)
        row = {"": f"{shape}, {rows} rows, forward and backward"}
        row["bf16 us"] = microseconds(lambda: linear(x, dense[0]).backward(dy), 1, graph=False)
        row["dense us"] = microseconds(lambda: nf4.linear(x, *packed[0], None).backward(dy), 1, graph=False)
        table.append(row)
    return table


def weights(columns: int, width: int) -> tuple[list[Any], list[Any]]:
    """So many that no cache holds them all."""
    import torch

    from rpg.kernels import nf4

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    copies = max(2, min(64, int(6e8 / (columns * width * 2)))) if on_gpu else 2
    dense = [torch.randn(columns, width, device=device, dtype=dtype) * width**-0.5 for _ in range(copies)]
    return dense, [nf4.quantise(weight) for weight in dense]


def distance(one: Any, other: Any) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def tuned(args: argparse.Namespace) -> list[Row]:
    """d: the kernel of the product with other sizes, microseconds"""
    import torch

    from rpg.kernels.nf4 import _kernels, _table

    kernels = _kernels()
    usual = kernels.COLUMNS, kernels.STEP, kernels.STAGES, kernels.WARPS
    table: list[Row] = []
    made = [(*matrix, *weights(*matrix)[1:]) for matrix in MATRICES[args.shape][1:]]
    for sizes in itertools.product((16, 32, 64), (64, 128), (1, 3), (2, 4)):
        kernels.COLUMNS, kernels.STEP, kernels.STAGES, kernels.WARPS = sizes
        row: Row = {"": "columns {}, step {}, stages {}, warps {}".format(*sizes) + " (as it is)" * (sizes == usual)}
        for columns, width, packed in made:
            for rows in (8, 64):
                x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
                bench = lambda: [kernels.product(x, *pair, _table(x.device), None) for pair in packed]  # noqa: E731
                try:
                    row[f"{columns}x{width}, {rows}"] = microseconds(bench, len(packed))
                except Exception as error:  # too much shared memory, say
                    row[f"{columns}x{width}, {rows}"] = type(error).__name__
        table.append(row)
    return table


def microseconds(work: Callable[[], object], count: int, graph: bool = True) -> float:
    """Of one of ``count`` products: the shortest of some runs."""
    import torch

    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin) / count
    work()
    torch.cuda.synchronize()
    run = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / count)
    return best


# ---- the parts -------------------------------------------------------------------------------------------------------

PARTS = {"a": large, "b": twice, "c": products, "d": tuned}


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_table(rows: list[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([text(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=True))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", default="abc", help="which of them")
    add("--limit", type=float, default=24.0, help="a: GB of memory that the process may have")
    add("--card", default="rtx4090", help="a: the card of the plan")
    add("--shape", default="7b", choices=list(SHAPES), help="a, c: sizes of the model")
    add("--model", default="builtin", help="b: the model")
    add("--config", help="b: settings of rpg train")
    add("--lr", type=float, default=1e-4, help="b: of the adapter; recipes have that of whole models")
    add("--minutes", type=float, default=1.0, help="b: of each run, without its evaluations")
    add("--seed", type=int, default=0, help="b: of both runs")
    add("--card-of-runs", default="h200", help="b: the card of the plan")
    add("--json", type=Path, help="where the tables go as well")
    add("--tiny", action="store_true", help="try the script itself")
    add("--child", type=Path, help=argparse.SUPPRESS)
    add("flags", nargs="*", help="b: of rpg train")
    args = parser.parse_args()
    if args.tiny:
        args.shape = "tiny"
    if args.child is not None:
        args.child.write_text(json.dumps(PARTS[args.parts](args)))
        return
    tables: dict[str, list[Row] | str] = {}
    for part in args.parts:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            given = sys.argv[1:]
            cut = given.index("--") if "--" in given else len(given)
            own = [*given[:cut], "--parts", part, "--child", str(out), *given[cut:]]
            try:
                subprocess.run([sys.executable, __file__, *own], check=True)
                tables[part] = json.loads(out.read_text())
            except (subprocess.CalledProcessError, OSError, ValueError):
                tables[part] = f"failed: {traceback.format_exc(limit=0).strip()}"
        print(f"part {part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(tables, indent=1))
    for part, rows in tables.items():
        print(f"\n{PARTS[part].__doc__}")
        show_table(rows) if isinstance(rows, list) else print(rows)


if __name__ == "__main__":
    main()
