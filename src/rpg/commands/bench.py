"""``rpg bench``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.synthetic import FLAGS, check_model, sizes_for
from ..console import install, one_line
from ..run.config import RolloutConfig

if TYPE_CHECKING:
    from ..bench.step import StepWork
    from ..bench.synthetic import Sizes
    from ..bench.table import BenchReport

NO_TRL = "TRL is not installed, so this is rpg alone; to have both: "
PARTS = ("rollout", "logp", "train", "step", "scaling")
SHARED = {"prompts": RolloutConfig.prompts, "samples": RolloutConfig.samples, "repeats": 10}  # built-in step's defaults
LEAST = {field.name: 1 for field in FLAGS if field.type == "int"} | {"samples": 2, "max_new_tokens": 1, "threads": 1}


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="speed and memory, each part beside its peers and beside the counted floor, in one run",
        description="Without PART on a CPU: the whole RL step of the built-in run (rollout, reward, training) beside "
        "TRL's GRPOTrainer: same model, prompts and sizes, the two in turns. With PART, or on a GPU: that part, or "
        "all of them, on models of known shapes with random weights.",
    )
    add = parser.add_argument
    add("part", nargs="?", choices=(*PARTS, "all"), metavar="PART", help=f"{', '.join(PARTS)} or all")
    add("--device", default="auto", metavar="D", help="cpu, cuda or gpu …; auto: a GPU if there is one (default)")
    add("--json", type=Path, metavar="FILE", help="also every number")
    add("--markdown", type=Path, metavar="FILE", help="also the tables as a page (with PART)")
    add("--quick", action="store_true", help="half of what can be halved (with PART)")
    add("--alone", action="store_true", help="rpg only (without PART)")
    add("--max-new-tokens", type=int, metavar="N", help="a response's limit (without PART)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    for field in FLAGS:
        kind, meaning = type(field.default), f"{field.metadata['meaning']} (default {field.default} on a GPU)"
        if field.name in SHARED:
            meaning += f"; without PART of the built-in step (default {SHARED[field.name]})"
        add(f"--{field.name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "NAME", help=meaning)
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    with one_line("", ValueError):
        for path in (args.json, args.markdown):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ValueError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
        for name, least in LEAST.items():
            if (value := getattr(args, name)) is not None and value < least:
                raise ValueError(f"{_flag(name)} must be at least {least}; got {value}")
        from ..training.setup import pick_device

        device = str(pick_device(args.device))
        if args.part is None and not device.startswith("cuda"):
            run = partial(_run_step, args, _work(args, device))
        else:
            run = partial(_run_parts, args, _sizes(args, device))
    return run()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---- the parts -------------------------------------------------------------------------------------------------------


def _sizes(args: argparse.Namespace, device: str) -> Sizes:
    if args.alone or args.max_new_tokens is not None:
        name = "alone" if args.alone else "max_new_tokens"
        raise ValueError(f"{_flag(name)} goes with the built-in step: without a part, with --device cpu")
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    sizes = sizes_for(device, args.quick, **{field.name: getattr(args, field.name) for field in FLAGS})
    for name in (sizes.model, sizes.small):
        check_model(name)
    return sizes


def _run_parts(args: argparse.Namespace, sizes: Sizes) -> int:
    from ..bench.suite import run_suite
    from ..bench.table import markdown, show

    def save(report: BenchReport) -> None:
        _write(args.json, json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
        _write(args.markdown, markdown(report, getattr(args, "line", "rpg bench")))

    try:
        report = run_suite(PARTS if args.part in (None, "all") else (args.part,), sizes, _watch, save)
    finally:
        _watch("")
    show(report)
    for path in (args.json, args.markdown):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
    return 1 if all(section.error or not section.rows for section in report.sections[1:]) else 0


# ---- the step of the built-in run ------------------------------------------------------------------------------------


def _work(args: argparse.Namespace, device: str) -> StepWork:
    import torch

    from ..bench.step import StepWork

    for name in (*sorted({field.name for field in FLAGS} - set(SHARED)), "quick", "markdown"):
        if getattr(args, name) not in (None, False):
            raise ValueError(f"{_flag(name)} goes with a part: {', '.join(PARTS)} or all")
    work = StepWork(
        prompts=args.prompts or StepWork.prompts,
        samples=args.samples or StepWork.samples,
        max_new_tokens=args.max_new_tokens or StepWork.max_new_tokens,
        repeats=args.repeats or StepWork.repeats,
        threads=args.threads or torch.get_num_threads(),
        device=device,
    )
    if work.responses % work.minibatches:
        raise ValueError(
            f"--prompts × --samples must be a multiple of {work.minibatches}, the optimiser steps of a step; "
            f"got {work.prompts} × {work.samples}"
        )
    return work


def _run_step(args: argparse.Namespace, work: StepWork) -> int:
    from ..bench.step import compare
    from ..bench.timing import SideFailed
    from ..bench.whole import StepReport, show

    missing = not args.alone and importlib.util.find_spec("trl") is None
    sides = ("rpg",) if args.alone or missing else ("rpg", "trl")
    try:
        report = StepReport(work, compare(work, sides, _watch), [NO_TRL + install("rpg-rl[audit]")] if missing else [])
    except SideFailed as error:
        print(f"rpg bench: {error}", file=sys.stderr)
        return 1
    finally:
        _watch("")
    show(report)
    if args.json is not None:
        _write(args.json, json.dumps(report.as_dict(), indent=1) + "\n")
        print(f"wrote {args.json}", file=sys.stderr)
    return 0


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        with one_line(f"cannot write {path}: ", OSError):
            path.write_text(text, encoding="utf-8")


def _watch(text: str) -> None:
    """One line of progress on a terminal; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
