"""``rpg bench``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.config import RolloutConfig

if TYPE_CHECKING:
    from .step import Work

NO_TRL = "TRL is not installed, so this is rpg alone; to have both: pip install 'rpg-rl[audit]'"


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="speed and memory of the whole RL step against TRL, in one run",
        description="Time the whole RL step of the built-in run (rollout, reward, training) beside TRL's GRPOTrainer: "
        "same model, prompts and sizes, the two in turns.",
    )
    add = parser.add_argument
    prompts, samples, longest = RolloutConfig.prompts, RolloutConfig.samples, RolloutConfig.max_new_tokens
    add("--prompts", type=int, default=prompts, metavar="N", help=f"prompts in a step (default {prompts})")
    add("--samples", type=int, default=samples, metavar="N", help=f"responses to each (default {samples})")
    add("--max-new-tokens", type=int, default=longest, metavar="N", help=f"a response's limit (default {longest})")
    add("--repeats", type=int, default=10, metavar="N", help="steps of each to take the median of (default 10)")
    add("--threads", type=int, metavar="N", help="CPU threads of each (default: torch's own choice)")
    add("--device", default="cpu", metavar="D", help="cpu, cuda …; auto: a GPU if there is one (default cpu)")
    add("--alone", action="store_true", help="rpg only")
    add("--json", type=Path, metavar="FILE", help="also every number")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    from ..cli import Mistake

    try:
        work = _work(args)
    except ValueError as error:
        raise Mistake(str(error)) from error
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise Mistake(f"cannot write {args.json}: {'it is a folder' if args.json.is_dir() else 'no such folder'}")
    from .report import Report, show
    from .versus import SideFailed, compare

    notes = []
    sides: tuple[str, ...] = ("rpg", "trl")
    if args.alone:
        sides = ("rpg",)
    elif importlib.util.find_spec("trl") is None:
        sides = ("rpg",)
        notes.append(NO_TRL)
    try:
        report = Report(work, compare(work, sides, _watch), notes)
    except SideFailed as error:
        print(f"rpg bench: {error}", file=sys.stderr)
        return 1
    finally:
        _watch("")
    show(report)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise Mistake(f"cannot write {args.json}: {error.strerror}") from error
        print(f"wrote {args.json}", file=sys.stderr)
    return 0


def _work(args: argparse.Namespace) -> Work:
    least = {"prompts": 1, "samples": 2, "max_new_tokens": 1, "repeats": 1, "threads": 1}
    for name, number in least.items():
        value = getattr(args, name)
        if value is not None and value < number:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {number}; got {value}")
    import torch

    from ..train.parts import pick_device
    from .step import Work

    work = Work(
        prompts=args.prompts,
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        threads=args.threads or torch.get_num_threads(),
        device=str(pick_device(args.device)),
    )
    if work.responses % work.minibatches:
        raise ValueError(
            f"--prompts × --samples must be a multiple of {work.minibatches}, the optimiser steps of a step; "
            f"got {args.prompts} × {args.samples}"
        )
    return work


def _watch(text: str) -> None:
    """One line of progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
