"""``rpg eval``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..api import evaluation_config
from ..console import Mistake, printed
from ..run.config import Config
from ..run.settings import add_flags, given
from ..trust import HELP as TRUST

if TYPE_CHECKING:
    from rich.console import Console

    from ..training.evaluate import Evaluation


# Settings of rpg train that an evaluation reads
COUNTING = (
    *("task", "device", "dtype", "seed", "model_options", "eval.problems", "eval.k", "eval.temperature", "eval.top_p"),
    *("rollout.engine", "rollout.vllm", "rollout.end_tokens", "rollout.max_prompt_tokens", "rollout.max_new_tokens"),
    "rollout.slots",
)
SHORT = (  # and has shorter names for
    *("eval.problems", "eval.k", "eval.temperature", "eval.top_p"),
    *("task.name", "task.test", "task.reward", "rollout.max_new_tokens"),
)


def add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="mean@k and pass@k of a model or a run on held-out problems",
        usage="rpg eval MODEL_OR_RUN [--task NAME_OR_FILE] [--k K] [--problems N] [--checkpoint best|last|N] [--json] "
        "[--section.key VALUE …]",
        description="mean@k and unbiased pass@k on held-out problems, with 95 % intervals.",
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
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the run's, else what rpg train takes")
    parser.add_argument("--reward", metavar="FILE:NAME", help="reward function of your own")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|N", help="which of a run's (default best)")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_flags(parser, Config, COUNTING, SHORT)
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    try:
        names = ("k", "problems", "temperature", "top_p", "max_new_tokens", "reward", "checkpoint", "trust")
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
