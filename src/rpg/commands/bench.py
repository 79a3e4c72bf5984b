"""``rpg bench``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.sizes import FLAGS, sizes_for
from ..console import Mistake
from ..run.config import RolloutConfig

if TYPE_CHECKING:
    from ..bench.rows import Findings
    from ..bench.sizes import Sizes
    from ..bench.step import Work

NO_TRL = "TRL is not installed, so this is rpg alone; to have both: pip install 'rpg-rl[audit]'"
PARTS = ("rollout", "logp", "train", "step", "scaling")
SHARED = ("prompts", "samples", "repeats")  # flags of the step of the built-in run too, with other defaults
LEAST = {"prompts": 1, "samples": 2, "max_new_tokens": 1, "repeats": 1, "threads": 1}


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
    add("--device", default="auto", metavar="D", help="cpu, cuda …; auto: a GPU if there is one (default)")
    add("--json", type=Path, metavar="FILE", help="also every number")
    add("--markdown", type=Path, metavar="FILE", help="also the tables as a page (with PART)")
    add("--quick", action="store_true", help="half of what can be halved (with PART)")
    add("--alone", action="store_true", help="rpg only (without PART)")
    add("--max-new-tokens", type=int, metavar="N", help="a response's limit (without PART)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    for field in FLAGS:
        kind, meaning = type(field.default), f"{field.metadata['meaning']} (default {field.default} on a GPU)"
        if field.name in SHARED:
            own = {"repeats": 10}.get(field.name) or getattr(RolloutConfig, field.name)
            meaning += f"; without PART of the built-in step (default {own})"
        add(f"--{field.name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "NAME", help=meaning)
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    try:
        for path in (args.json, args.markdown):
            _check_file(path)
        _check_numbers(args)
        device = _device(args.device)
        if args.part is not None or device.startswith("cuda"):
            if args.alone or args.max_new_tokens is not None:
                name = "alone" if args.alone else "max-new-tokens"
                raise ValueError(f"--{name} goes with the built-in step: without a part, with --device cpu")
            from ..bench.shapes import check_model

            sizes = _sizes(args, device)
            for name in (sizes.model, sizes.small):
                check_model(name)
            return _run_parts(args, PARTS if args.part in (None, "all") else (args.part,), sizes)
        work = _work(args, device)
    except ValueError as error:
        raise Mistake(str(error)) from error
    return _run_step(args, work)


# ---- the parts -------------------------------------------------------------------------------------------------------


def _sizes(args: argparse.Namespace, device: str) -> Sizes:
    given = {field.name: getattr(args, field.name) for field in FLAGS}
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    return sizes_for(device, args.quick, **given)


def _run_parts(args: argparse.Namespace, parts: tuple[str, ...], sizes: Sizes) -> int:
    from ..bench.suite import run_suite
    from ..bench.table import markdown, show

    command = getattr(args, "line", "rpg bench")

    def save(findings: Findings) -> None:
        if args.json is not None:
            _write(args.json, json.dumps(findings.as_dict(), indent=1, ensure_ascii=False) + "\n")
        if args.markdown is not None:
            _write(args.markdown, markdown(findings, command))

    try:
        findings = run_suite(parts, sizes, _watch, save)
    finally:
        _watch("")
    show(findings)
    for path in (args.json, args.markdown):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
    return 1 if all(section.error or not section.rows for section in findings.sections[1:]) else 0


# ---- the step of the built-in run ------------------------------------------------------------------------------------


def _run_step(args: argparse.Namespace, work: Work) -> int:
    from ..bench.report import Report, show
    from ..bench.versus import SideFailed, compare

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
        _write(args.json, json.dumps(report.as_dict(), indent=1) + "\n")
        print(f"wrote {args.json}", file=sys.stderr)
    return 0


def _work(args: argparse.Namespace, device: str) -> Work:
    import torch

    from ..bench.step import Work

    own = set(vars(args)) & {field.name for field in FLAGS} - set(SHARED)
    strange = [name for name in sorted(own) if getattr(args, name) is not None] + ["quick"] * args.quick
    strange += ["markdown"] * (args.markdown is not None)
    if strange:
        raise ValueError(f"--{strange[0].replace('_', '-')} goes with a part: {', '.join(PARTS)} or all")
    work = Work(
        prompts=args.prompts or Work.prompts,
        samples=args.samples or Work.samples,
        max_new_tokens=args.max_new_tokens or Work.max_new_tokens,
        repeats=args.repeats or Work.repeats,
        threads=args.threads or torch.get_num_threads(),
        device=device,
    )
    if work.responses % work.minibatches:
        raise ValueError(
            f"--prompts × --samples must be a multiple of {work.minibatches}, the optimiser steps of a step; "
            f"got {work.prompts} × {work.samples}"
        )
    return work


# ---- both ------------------------------------------------------------------------------------------------------------


def _check_numbers(args: argparse.Namespace) -> None:
    least = dict.fromkeys((f.name for f in FLAGS if f.type == "int"), 1) | LEAST
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}; got {value}")


def _check_file(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")


def _device(name: str) -> str:
    from ..training.setup import pick_device

    return str(pick_device(name))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Mistake(f"cannot write {path}: {error.strerror}") from error


def _watch(text: str) -> None:
    """One line of progress on a terminal; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
