"""``rpg train`` and ``rpg eval``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import configure, evaluation_config, fit
from ..console import Mistake, clock, first_of_launch, printed, several
from ..run.config import Config
from ..run.settings import add_flags, given

if TYPE_CHECKING:
    from rich.console import Console

    from ..training.evaluate import Evaluation

HERE = ""  # --dry-run without a device: this machine's
SIGNALS = {"SIGINT": 130, "SIGTERM": 143}


def add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model; without arguments the built-in one, on the built-in task",
        usage="rpg train [--config FILE] [--algorithm NAME] [--steps N] [--output DIR] [--seed N] [--device D] "
        "[--resume] [--dry-run [DEVICE]] [--section.key VALUE …]",
        description="Train a model with a policy-gradient method. Settings come from a YAML file, then from flags.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML (see recipes/)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --output, from its newest checkpoint"
    )
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const=HERE,
        metavar="DEVICE",
        help="print what the run would need and take, and stop: on this machine's device, or on h200, h100, a100, "
        "l40s, rtx4090 or cpu",
    )
    add_flags(parser, Config)
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    stack = contextlib.ExitStack()
    try:
        config = configure(args.config, flags=given(args, Config), resume=args.resume)
        if args.dry_run is not None:
            if several():
                raise ValueError("--dry-run plans for one process: leave torchrun out (docs/multi-gpu.md for several)")
            return _dry_run(config, args.dry_run, args.resume)
        from ..distributed.ranks import joined
        from ..training.loop import Failed

        world = stack.enter_context(joined(config.device))
    except ValueError as error:
        if not first_of_launch():  # the first says it
            time.sleep(1)  # torchrun ends all once one is gone, and the first may be slower
            return 2
        raise Mistake(str(error)) from error
    with stack:
        try:
            summary = fit(config, resume=args.resume, world=world)
        except Failed as error:
            return world.failed(str(error), 2 if error.setup else 1)
        if world.first:
            print(_closing(summary, config))
        return SIGNALS.get(summary["stopped_by"], 0)


def _dry_run(config: Config, device: str, resume: bool) -> int:
    from ..plan.plan import plan
    from ..plan.table import show

    planned = plan(config, device or None)
    show(replace(planned, disk=replace(planned.disk, holds_run=planned.disk.holds_run and not resume)))
    return 0


def _closing(summary: dict[str, Any], config: Config) -> str:
    lines = []
    for task, scores in summary["eval"].items():
        interval = f"[{scores['last_low']:.1%}, {scores['last_high']:.1%}]"
        best = f"best {scores['best']:.1%} at step {scores['best_step']}"
        lines.append(f"{task} {scores['metric']}: {scores['first']:.1%} → {scores['last']:.1%} {interval}, {best}")
    on_gpu = summary["peak_gpu_memory_gb"]
    memory = f"{summary['peak_memory_gb']:.2f} GB" if on_gpu is None else f"{on_gpu:.1f} GB of the GPU's memory"
    lines.append(f"{summary['step']} steps in {clock(summary['seconds'])}, {memory} at most")
    page = Path(config.output) / "report.html"
    lines.append(f"{page if config.log.report else config.output}")
    return "\n".join(lines)


# ---- rpg eval --------------------------------------------------------------------------------------------------------


def add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="mean@k and pass@k of a model or a run on held-out problems",
        usage="rpg eval MODEL_OR_RUN [--task NAME_OR_FILE] [--k K] [--problems N] [--checkpoint best|last|N] [--json] "
        "[--section.key VALUE …]",
        description="mean@k and unbiased pass@k on held-out problems, with 95 %% intervals. Of the settings of rpg "
        "train those of task, rollout and eval, the device and the dtype have a meaning here.",
    )
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="builtin, a Hugging Face folder, a hub id, or a run's folder"
    )
    parser.add_argument(
        "--task",
        metavar="NAME_OR_FILE",
        help="tasks, datasets or files, several with commas; default: the run's own, else arithmetic",
    )
    parser.add_argument("--k", type=int, metavar="K", help="responses to each problem (default 32)")
    parser.add_argument("--problems", type=int, metavar="N", help="problems (default 256)")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the run's, else 1; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="default: the run's, else 1")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the run's, else 80")
    parser.add_argument("--reward", metavar="FILE:NAME", help="reward function of your own")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|N", help="which of a run's (default best)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_flags(parser, Config)
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    try:
        names = ("k", "problems", "temperature", "top_p", "max_new_tokens", "reward", "checkpoint")
        options = {name: getattr(args, name) for name in names}
        config = evaluation_config(args.model, args.task, flags=given(args, Config), warn=_warn, **options)
        from ..training.evaluate import evaluate_model

        evaluations = evaluate_model(config)
    except ValueError as error:
        raise Mistake(str(error)) from error
    if args.json:
        values = {name: value for each in evaluations for name, value in each.metrics().items()}
        print(json.dumps(values | {"model": config.model}, indent=1))
    else:
        _show(evaluations, config)
    return 0


def _warn(text: str) -> None:
    print(f"rpg eval: {text}", file=sys.stderr)


def _show(evaluations: list[Evaluation], config: Config) -> None:
    with printed() as to:
        for one in evaluations:
            to.print(f"{config.model}, {one.problems} problems × {one.k}, temperature {config.eval.temperature:g}")
            _show_set(one, to)
        if len(evaluations) > 1:
            mean = sum(one.mean.mean for one in evaluations) / len(evaluations)
            to.print(f"mean@{evaluations[0].k} of the {len(evaluations)} sets: {mean:.1%}")


def _show_set(one: Evaluation, to: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in (one.task, "value", "95 % interval"):
        table.add_column(title, justify="left" if title == one.task else "right")
    rows = {f"mean@{one.k}": one.mean} | {f"pass@{k}": value for k, value in one.passed.items() if k > 1}
    for name, value in rows.items():
        table.add_row(name, f"{value.mean:.1%}", f"{value.low:.1%} – {value.high:.1%}")
    to.print(table)
    if len(one.by_level) > 1:
        to.print("by level: " + "  ".join(f"{level}: {mean:.1%}" for level, mean in one.by_level.items()))
    to.print(f"response length {one.length:.1f} tokens, {one.truncated:.1%} cut")
    if any(one.failures.values()):
        to.print("reward function failed: " + ", ".join(f"{n} {what}" for what, n in one.failures.items() if n))
