"""``rpg report``"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..console import Mistake, check_writable, one_line

REPORT_EXAMPLES = """\
examples:
  rpg report runs/latest                     one run, to runs/latest/report.html
  rpg report runs/grpo-* runs/dapo-* -o compare.html
                                             several: algorithms in one chart, seeds averaged, Last/Best table
  rpg report runs -o all.html                every run in a folder"""


def add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="runs as one self-contained page",
        description="Curves, tables and sampled responses of one RUN or several, on one page that needs no network.",
        epilog=REPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a folder of runs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html in RUN)")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from ..report import find_runs, read_run, write

    if args.output is None and len(args.runs) > 1:
        raise Mistake("several runs have no folder in common: name the page with -o FILE")
    output: Path = args.output or args.runs[0] / "report.html"
    with one_line("", ValueError), one_line("", OSError):
        folders = dict.fromkeys(folder.resolve() for path in args.runs for folder in find_runs(path))
    check_writable(output)
    with one_line("", ValueError), one_line("", OSError):
        runs = [read_run(os.path.relpath(folder)) for folder in folders]
    with one_line(f"cannot write {output}: ", OSError):
        write(runs, output)
    print(f"wrote {output} ({len(runs)} run{'s' if len(runs) > 1 else ''})", file=sys.stderr)
    return 0
