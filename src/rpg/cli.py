"""The ``rpg`` command: reads the line, hands it to a file of ``commands/``, and shows mistakes in one line."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .commands.algorithms import add_algorithms
from .commands.audit import add_audit
from .commands.bench import add_bench
from .commands.evaluate import add_eval
from .commands.export import add_export
from .commands.merge import add_merge
from .commands.push import add_push
from .commands.recipes import add_recipes
from .commands.replay import add_replay
from .commands.report import add_report
from .commands.sample import add_chat, add_sample
from .commands.study import add_study
from .commands.tasks import add_tasks
from .commands.train import add_train
from .console import (
    Mistake,
    choose,
    complain,
    discard,
    first_of_launch,
    more_than_core,
    namesake,
    open_streams,
    printable,
    reaches,
)
from .run.settings import unknown_argument, unknown_flag
from .secrets import hidden, instead, keep_hidden

COMMANDS_ELSEWHERE = {  # what others call them: for "did you mean"
    "train": ("fit", "run", "grpo", "finetune", "sft"),
    "train --resume": ("resume", "continue"),
    "train --dry-run": ("plan", "estimate", "dry-run"),
    "algorithms": ("methods", "losses", "list"),
    "sample": ("generate", "infer", "predict"),
    "chat": ("talk", "repl"),
    "push": ("upload", "publish", "share"),
    "tasks": ("data", "datasets"),
    "recipes": ("recipe", "configs", "examples"),
    "audit": ("check", "verify"),
    "replay": ("compare", "record"),
    "export verl": ("verl",),
    "export trl": ("trl",),
}
OF_CORE = ("algorithms", "audit")  # the commands that need torch and no more
SPINS = "500"  # a few microseconds; benchmarks/busy_core.py measures what it costs and what it saves
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Parser(argparse.ArgumentParser):
    """One line for a mistake, with the nearest word that is none."""

    settings: type | None = None  # whose flags it has: see add_flags

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if not isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(action, choose("value", str(value), map(str, action.choices)))
        meant = next((ours for ours, others in COMMANDS_ELSEWHERE.items() if value in others), None)
        if meant and meant.split()[0] in action.choices:
            self.error(f"unknown command {value!r}. Did you mean {self.prog} {meant}?")
        self.error(choose("command", str(value), action.choices))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        namespace, rest = super().parse_known_args(args, namespace)
        for arg in rest:
            if arg.startswith("--") and arg != "--":
                self.error(unknown_flag(arg.partition("=")[0], self._option_string_actions, self.settings))
        if rest:
            first = next((arg for arg in rest if arg.startswith("-")), rest[0])
            self.error(unknown_argument(first, self._option_string_actions, self.settings))
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        if first_of_launch():
            self.exit(2, printable(hidden(f"{self.prog}: {message} ({self.prog} --help)")) + "\n")
        time.sleep(1)  # torchrun ends all once one is gone: the first, which tells it, may be slower
        self.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    _let_threads_sleep()
    open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if first_of_launch() and (why := namesake()):
        complain(f"rpg: {why}")
    if args.command not in OF_CORE and (why := more_than_core()):
        parser.exit(2, f"rpg {args.command} {why}\n")
    _keep_secrets(args)
    args.line = hidden(shlex.join(["rpg", *argv]))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except Mistake as mistake:
        complain(printable(hidden(f"rpg {args.command}: {mistake}")))
        return 2
    except BrokenPipeError:  # the reader, a pager or head, has seen enough
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        complain(f"rpg {args.command}: cannot write its output: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not reaches(stream, stream.flush):
                discard(stream)


def _let_threads_sleep() -> None:
    """Threads that wait for each other spin, by default for milliseconds: where another program takes a core, a run
    would fall to a quarter of its speed. GNU's OpenMP reads this when torch is loaded."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _keep_secrets(args: argparse.Namespace) -> None:
    """Secrets among the flags are used, and kept out of all that is written. (Trackers write sys.argv down.)"""
    for path in keep_hidden(vars(args)):
        if first_of_launch():
            better = instead(path).partition(", --")[0]
            print(
                f"rpg {args.command}: --{path} is used and written nowhere, but others can see it in the list of "
                f"processes{'' if 'flag' in better else f': better {better}'}",
                file=sys.stderr,
            )
    sys.argv[:] = map(hidden, sys.argv)


def build_parser() -> Parser:
    parser = Parser(prog="rpg", description="KL-regularised policy gradients for language models.")
    parser.add_argument("--version", action="version", version=f"rpg {__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    adders = (
        add_train,
        add_eval,
        add_sample,
        add_chat,
        add_merge,
        add_push,
        add_tasks,
        add_recipes,
        add_report,
        add_study,
        add_replay,
        add_export,
        add_audit,
        add_algorithms,
        add_bench,
    )
    for add in adders:
        add(commands)
    return parser


if __name__ == "__main__":
    from rpg.cli import main  # run as a script this module has two names, and its Mistake would be two classes

    sys.exit(main())
