"""``rpg study``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Mistake, complain, estimated_duration, one_line

if TYPE_CHECKING:
    from ..study.design import Study

PAGE = "study.html"
EXAMPLES = """\
examples:
  rpg study studies/builtin-lag.yaml --dry-run       its runs, in order, and how long they should take
  rpg study studies/builtin-lag.yaml --minutes 60    an hour of them; the same line again goes on
  rpg study runs/study-builtin-lag                   what has come of it so far; nothing is run
  rpg study runs/study-builtin-lag --json            the same for a program"""


def add_study(commands: Any) -> None:
    parser = commands.add_parser(
        "study",
        help="methods or settings × seeds, each tuned, compared with intervals",
        description="Run the arms of a study, each tuned and with several seeds on one budget, and say what differs. "
        "FILE says what to run (docs/study.md); RESULTS shows what came of it, and writes the page again.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "study",
        type=Path,
        metavar="FILE|RESULTS",
        help="a study's file (.yaml), or what one has written: its folder, or results.jsonl alone",
    )
    add("-o", "--output", type=Path, metavar="FOLDER", help="where it writes (default: runs/study-NAME)")
    add("--dry-run", action="store_true", help="list the runs and estimate their time; nothing is run")
    add("--jobs", type=int, metavar="N", help="runs at a time (default: the file's)")
    add("--minutes", type=float, metavar="M", help="stop after so many, to go on with the same line later")
    add("--retry-failed", action="store_true", help="make runs that failed again, from the beginning")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run_study)


def run_study(args: argparse.Namespace) -> int:
    if args.study.is_dir() or args.study.suffix == ".jsonl":
        _show(args.study, args)
        return 0
    from ..study.design import read_study

    with one_line("", ValueError):
        study = read_study(args.study)
    folder: Path = args.output or study.default_folder
    jobs = study.config.jobs if args.jobs is None else args.jobs
    if jobs < 1 or (args.minutes is not None and not args.minutes > 0):
        raise Mistake("--jobs must be at least 1, and --minutes more than 0")
    if args.dry_run:
        _dry_run(study, folder, jobs)
        return 0
    from ..study.design import check_runs
    from ..study.runner import Runner

    with one_line("", ValueError):
        check_runs(study)
    if jobs > 1 and study.config.budget.minutes is not None:
        complain(
            f"warning: {jobs} runs at a time take time from each other: minutes are a fair budget with --jobs 1 alone"
        )
    runner = Runner(study, folder, jobs, complain)
    with one_line("", ValueError):
        done = runner.go(args.minutes, args.retry_failed)
    _show(folder, args)
    return 0 if done else 3


def _show(results: Path, args: argparse.Namespace) -> None:
    from ..run.logs import write_whole
    from ..study import page
    from ..study.outcome import outcome
    from ..study.results import read_results
    from ..study.text import markdown

    with one_line("", ValueError):
        study, rows = read_results(results)
    result = outcome(study, rows)
    where = (results if results.is_dir() else results.parent) / PAGE
    with one_line("", OSError):
        write_whole(where, page.html(result))
    complain(f"page: {where}")
    if args.json:
        print(json.dumps(result, ensure_ascii=False, indent=1))
    else:
        sys.stdout.write(markdown(result))


def _dry_run(study: Study, folder: Path, jobs: int) -> None:
    """Its runs in their order. What is planned is each arm's run; what tuning changes takes the same time."""
    from ..plan.plan import plan

    print(f"{study.name}: {study.planned} runs in {folder}, {jobs} at a time")
    seconds: dict[str, float] = {}
    for arm in study.arms:
        with one_line(f"{arm.name}: ", ValueError):
            seconds[arm.name] = plan(arm.config).middle.run
    total = 0.0
    for number, run in enumerate((*study.tuning, *study.compared()), 1):
        total += seconds[run.arm.name]
        waits = run.part == "compare" and study.candidates
        title = f"{run.arm.name}, seed {run.seed} (once it is tuned)" if waits else run.title
        print(f"{number:4}  {run.part:7}  {title}")
    print(
        f"estimated: {estimated_duration(total)} of runs, {estimated_duration(total / jobs)} if {jobs} at a time do "
        "not slow each other down; start-up and checkpoints not counted"
    )
