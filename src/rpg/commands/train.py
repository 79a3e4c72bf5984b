"""``rpg train``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..api import configure, fit
from ..console import (
    Mistake,
    clock,
    discard,
    first_of_launch,
    fixed,
    own_command,
    printable,
    reaches,
    several,
    steps_text,
)
from ..run.auto import refuse_ruin, settled
from ..run.config import Config
from ..run.folder import read_rows
from ..run.settings import add_flags, given
from ..run.view import opening
from ..trust import HELP as TRUST

HERE = ""  # --dry-run without a device: this machine's
SHORT, LOOKED_AT = 60, 64  # characters of a prompt that is shown; samples it is looked for in
SIGNALS = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


def add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model; without arguments the built-in one, on the built-in task",
        usage="rpg train [--config FILE] [--algorithm NAME] [--steps N] [--output DIR] [--seed N] [--device D] "
        "[--resume] [--dry-run [DEVICE]] [--section.key VALUE …]",
        description="Train a model with a policy-gradient method. Settings come from a YAML file, then from flags.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings: a YAML file, or a recipe by name (rpg recipes)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --output, or else the latest, from its last checkpoint",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const=HERE,
        metavar="DEVICE",
        help="print what the run would need and take, and stop, with exit code 1 if something is crossed (✗): on this "
        "machine's device, or on h200, h100, a100, l40s, rtx4090 or cpu",
    )
    add_flags(parser, Config)
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        try:
            config = configure(args.config, flags=given(args, Config), resume=args.resume, trust=args.trust)
            if args.dry_run is not None:
                if several():
                    raise ValueError(
                        "--dry-run plans for one process: leave torchrun out (docs/multi-gpu.md for several)"
                    )
                return _dry_run(config, args.dry_run, args.resume)
            refuse_ruin(settled(config))
            shown = stack.enter_context(opening(config, first_of_launch(), "torch and "))
            from ..distributed.ranks import joined  # imports torch, which takes seconds
            from ..training.failures import Failed

            world = stack.enter_context(joined(config.device))
        except ValueError as error:
            if not first_of_launch():  # the first says it
                time.sleep(1)  # torchrun ends all once one is gone, and the first may be slower
                return 2
            raise Mistake(str(error)) from error
        try:
            summary = fit(config, resume=args.resume, world=world, shown=shown)
            config = replace(config, output=summary["folder"])
        except Failed as error:
            return world.failed(str(error), 2 if error.setup else 1)
        if world.first:
            closing = _closing(summary, config)
            if not reaches(sys.stdout, lambda: print(closing, flush=True)):
                discard(sys.stdout)
        return SIGNALS.get(summary["stopped_by"], 0)


def _dry_run(config: Config, device: str, resume: bool) -> int:
    from ..plan.plan import plan
    from ..plan.table import refused, show

    planned = plan(config, device or None)
    planned = replace(planned, disk=replace(planned.disk, holds_run=planned.disk.holds_run and not resume))
    show(planned)
    return int(refused(planned))


def _closing(summary: dict[str, Any], config: Config) -> str:
    lines = []
    for task, scores in summary["eval"].items():
        name = f"{task} {scores['metric']}: {scores['first']:.1%}"
        if scores["last_step"] == 0:
            lines.append(f"{name} at the start" + (", not evaluated since" if summary["step"] else ""))
            continue
        interval = f"[{scores['last_low']:.1%}, {scores['last_high']:.1%}]"
        best = f"best {scores['best']:.1%} at step {scores['best_step']}"
        lines.append(f"{name} → {scores['last']:.1%} {interval}, {best}")
    on_gpu = summary["peak_gpu_memory_gb"]
    memory = f"{fixed(2)(summary['peak_memory_gb'])} GB" if on_gpu is None else f"{on_gpu:.1f} GB of the GPU's memory"
    lines.append(f"{steps_text(summary['step'])} in {clock(summary['seconds'])}, {memory} at most")
    return "\n".join([*lines, "next:", *(f"  {line}" for line in _next_commands(config))])


def _next_commands(config: Config) -> Iterator[str]:
    """What to do with the run, to be copied into the shell as it is."""
    run, rpg = Path(config.output), own_command()
    page = run / "report.html"
    on_mac, on_desktop = sys.platform == "darwin", any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    opener = shutil.which("open" if on_mac else "xdg-open") if on_mac or on_desktop else None
    if page.is_file():
        yield f"{Path(opener).name} {shlex.quote(str(page))}" if opener else f"{page}"
    if config.checkpoint.keep:
        yield f"{rpg} eval {shlex.quote(str(run))}"
        yield f"{rpg} sample {shlex.quote(str(run))} {shlex.quote(_prompt_of(run))}"


def _prompt_of(run: Path) -> str:
    """A short prompt of the run's, as an example."""
    for row in itertools.islice(read_rows(run / "samples.jsonl", []), LOOKED_AT):
        prompt = str(row.get("prompt", "")).strip()
        if 0 < len(prompt) <= SHORT and prompt == printable(prompt):
            return prompt
    return "your prompt"
