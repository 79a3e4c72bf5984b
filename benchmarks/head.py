"""The head together with the loss beside linear_logp and three bare products: errors, milliseconds, memory.

    python benchmarks/head.py [--tokens 16384] [--hidden 2560] [--vocab 151936] [--rows 1024 1664] [--columns 8192]
    python benchmarks/head.py --device cpu      # tiny, to see that it works

First gradients against float64. Then whole runs over blocks of so many tokens (rows) and so many columns of the
vocabulary at once, with the head's gradient in bfloat16 and in float32. At last each part of one block by itself, as
often as there are blocks: where the time is. "in 3": d states with the vocabulary in three parts at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from rpg.bench import logp as bench
from rpg.bench.synthetic import Sizes, sizes_for
from rpg.bench.timing import fresh, peak_gib, timed
from rpg.kernels import head_with_loss as together
from rpg.kernels import logp
from rpg.kernels.logp_torch import Slope

TYPES = {False: "bf16 sum", True: "float32 sum"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    for name in ("tokens", "hidden", "vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--rows", type=int, nargs="*", help="tokens of a block")
    parser.add_argument("--columns", type=int, nargs="*", help="of the vocabulary at once, multiples of 2048")
    args = parser.parse_args()
    sizes = sizes_for(args.device, **{name: getattr(args, name) for name in ("tokens", "hidden", "vocab", "repeats")})
    cpu = args.device == "cpu"
    rows = args.rows or ([16, 24] if cpu else [1024, 1280, 1664, 2048, 3328])
    columns = args.columns or ([2048] if cpu else [8192, 16384])
    on = "CPU" if cpu else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {on}: {sizes.tokens:,} × {sizes.hidden:,} × {sizes.vocab:,}, {sizes.dtype}")
    print(f"rpg train takes {together.rows_at_once(sizes.vocab, sizes.element):,} rows, {together.COLUMNS:,} columns")
    show_errors(sizes, rows[0])
    show_times(sizes, rows, columns)
    for count in rows:
        show_parts(sizes, count, columns[0])


def show_errors(sizes: Sizes, rows: int) -> None:
    sides: dict[str, bench.Learning] = {"linear_logp": partial(bench.both_ways, bench.linear_logp)}
    for in_float32, name in TYPES.items():
        count = -(-sizes.tokens // rows)
        sides[f"{count} blocks, {name}"] = partial(bench.in_blocks, count=count, in_float32=in_float32)
    print(f"\n{'against float64':<24}{'logp':>10}{'entropy':>10}{'d states':>10}{'d head':>10}")
    for name, learning in sides.items():
        found = bench.errors(learning, sizes)
        print(f"{name:<24}" + "".join(f"{value:>10.1e}" for value in found.values()))
        fresh(sizes.device)


def show_times(sizes: Sizes, rows: list[int], columns: list[int]) -> None:
    inputs = bench.make_inputs(sizes.tokens, sizes.hidden, sizes.vocab, sizes)
    print(f"\n{'':<44}{'ms':>9}{'× products':>12}{'peak GiB':>10}")
    products = 0.0

    def show(name: str, run: Callable[[], object]) -> float:
        fresh(sizes.device)
        milliseconds = 1000 * timed(run, sizes.device, sizes.repeats)
        times = f"{milliseconds / products:>12.3f}" if products else f"{'':>12}"
        print(f"{name:<44}{milliseconds:>9.2f}{times}{peak_gib(sizes.device):>10.2f}", flush=True)
        bench.clear(inputs)
        return milliseconds

    if sizes.device != "cpu":
        print_waits(bench.with_loss(inputs, sizes, rows[0], in_float32=True)[0])
    products = show("three bare products", partial(bench.three_products, inputs))
    show("linear_logp", partial(bench.both_ways, bench.linear_logp, inputs))
    for width in columns:
        for count in rows:
            for in_float32, kind in TYPES.items():
                run, _ = bench.with_loss(inputs, sizes, count, in_float32, width)
                show(f"together, {count:,} rows, {width:,} columns, {kind}", run)


def print_waits(run: Callable[[], object]) -> None:
    """Whether the host waits for the GPU between blocks, which would leave it idle."""
    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        print("the host never waits for the GPU")
    except RuntimeError as error:
        print(f"the host waits for the GPU: {str(error).splitlines()[0]}")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_parts(count: int, a_NV: torch.Tensor, weight_VH: torch.Tensor, out_NH: torch.Tensor) -> None:
    """The states' gradient, the vocabulary in so many parts at once: its product has few rows, and may leave
    multiprocessors idle."""
    width = a_NV.shape[1] // count // 8 * 8
    end = count * width
    a_PNC = a_NV[:, :end].unflatten(1, (count, width)).transpose(0, 1)
    weight_PCH = weight_VH[:end].view(count, width, -1)
    how = {"out_dtype": torch.float32} if a_NV.is_cuda else {}
    sums_PNH = torch.bmm(a_PNC, weight_PCH, **how)
    if end < a_NV.shape[1]:
        logp._product(a_NV[:, end:], weight_VH[end:], sums_PNH[0], add=True)
    out_NH.copy_(sums_PNH.sum(0))


@torch.no_grad()
def show_parts(sizes: Sizes, rows: int, columns: int) -> None:
    """Of one block, times the number of blocks."""
    rows = min(rows, sizes.tokens)
    inputs = bench.make_inputs(rows, sizes.hidden, sizes.vocab, sizes)
    hidden_NH, weight_VH, target_N = inputs.hidden_NH.detach(), inputs.weight_VH.detach(), inputs.target_N
    kernels, space = logp.fastest(hidden_NH), together._Space(rows, weight_VH, columns)
    sums, top_WN, power_NV = space.of(rows)
    random_NV = torch.randn(rows, len(weight_VH), device=sizes.device, dtype=weight_VH.dtype)  # zeros would be faster
    ones_N, out_NH = sums.new_ones(rows), torch.empty_like(hidden_NH)
    half_VH, float_VH = torch.zeros_like(weight_VH), torch.zeros_like(weight_VH, dtype=space.wide)

    def widths() -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        parts = [(first, weight_VH[first : first + columns]) for first in range(0, len(weight_VH), columns)]
        return [(first, some_VH, space.logits[:, : len(some_VH)]) for first, some_VH in parts]

    def forward() -> None:
        for _, some_VH, logits_NC in widths():
            logp._product(hidden_NH, some_VH.T, logits_NC)

    def observe() -> None:
        for first, _, logits_NC in widths():
            power_NC = power_NV[:, first : first + columns]
            kernels.observe_powers(sums, top_WN, power_NC, logits_NC, target_N, first, 1.0)

    by = Slope(ones_N, ones_N, ones_N, None)
    parts: dict[str, Callable[[], object]] = {
        "logits": forward,
        "observe": observe,
        "slope": lambda: kernels.slope_of_powers(by, top_WN, power_NV, ones_N, target_N, 1.0),
        "d states": lambda: torch.mm(random_NV, weight_VH, out=out_NH),
        **{f"in {n}": partial(in_parts, n, random_NV, weight_VH, out_NH) for n in (2, 3, 4, 8)},
        "d head": lambda: torch.mm(random_NV.T, hidden_NH, out=half_VH),
        "+= half": lambda: together._add_product(random_NV.T, hidden_NH, half_VH),
        "+= float32": lambda: together._add_product(random_NV.T, hidden_NH, float_VH),
    }
    count = -(-sizes.tokens // rows)
    print(f"\nparts, {count} × {rows:,} rows, {columns:,} columns, ms in all: ", end="")
    times = []
    for name, run in parts.items():
        try:
            times.append(f"{name} {1000 * count * timed(run, sizes.device, sizes.repeats):.2f}")
        except (RuntimeError, TypeError) as error:  # torch has no such product
            times.append(f"{name}: {str(error).splitlines()[0]}")
    print(", ".join(times), flush=True)
    fresh(sizes.device)


if __name__ == "__main__":
    main()
