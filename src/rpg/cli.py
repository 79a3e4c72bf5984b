"""The ``rpg`` command: reads the line, hands it to a file of ``commands/``, and shows mistakes in one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .commands.algorithms import add_algorithms
from .commands.audit import add_audit
from .commands.bench import add_bench
from .commands.export import add_export
from .commands.merge import add_merge
from .commands.report import add_report
from .commands.tasks import add_tasks
from .commands.train import add_eval, add_train
from .console import Mistake, first_of_launch


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if first_of_launch():
            self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")
        time.sleep(1)  # torchrun ends all once one is gone: the first, which tells it, may be slower
        self.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    args.line = shlex.join(["rpg", *argv])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except Mistake as mistake:
        print(f"rpg {args.command}: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, a pager or head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser() -> Parser:
    parser = Parser(prog="rpg", description="KL-regularised policy gradients for language models.")
    parser.add_argument("--version", action="version", version=f"rpg {__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    adders = (add_train, add_eval, add_merge, add_tasks, add_report, add_export, add_audit, add_algorithms, add_bench)
    for add in adders:
        add(commands)
    return parser


if __name__ == "__main__":
    from rpg.cli import main  # run as a script this module has two names, and its Mistake would be two classes

    sys.exit(main())
