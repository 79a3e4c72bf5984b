"""``rpg report``"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Mistake, check_writable, flat_text, one_line, printable

if TYPE_CHECKING:
    from ..report import RunData

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
    from ..report import write

    if args.output is None and len(args.runs) > 1:
        raise Mistake("several runs have no folder in common: name the page with -o FILE")
    output: Path = args.output or args.runs[0] / "report.html"
    if args.output is not None:
        check_writable(output)
    runs, dead = _read(args.runs)
    if not runs:
        raise Mistake("; ".join(dead))
    check_writable(output)
    for trouble in dead:
        print(printable(f"left out: {trouble}"), file=sys.stderr)
    with one_line(f"cannot write {output}: ", OSError):
        write(runs, output)
    print(f"wrote {output} ({len(runs)} run{'s' if len(runs) > 1 else ''})", file=sys.stderr)
    return 0


def _read(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """The runs, each once, and what is wrong with the folders that are none."""
    from ..report import find_runs, read_run

    runs: dict[Path, RunData] = {}
    dead = []
    for path in paths:
        try:
            for folder in find_runs(path):
                if (place := folder.resolve()) not in runs:
                    runs[place] = read_run(os.path.relpath(place))
        except (ValueError, OSError) as error:
            dead.append(flat_text(error))
    return list(runs.values()), dead
