"""``rpg tasks``: what there is to train on, and what is in one of them."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ..console import Mistake, install, printable
from ..tasks.overlap import Index, lines
from ..tasks.sources.builtin import BUILTIN
from ..tasks.sources.datasets import DATASETS, FOLDER
from ..tasks.sources.mixture import finite
from ..tasks.task import ENDLESS, Problem, Task

LONGEST = 1200  # characters of an example that are shown

TASKS_EXAMPLES = """\
examples:
  rpg tasks                                  what there is
  rpg tasks gsm8k                            counts, kinds of answers, examples as the model sees them, duplicates
  rpg tasks dapo-math-17k-en --test "aime24, amc23"
                                             and which test problems are in the training set
  rpg tasks train.parquet --answer-key final"""

GYM = "gym:GENERATOR?option=value"
OTHERS = {
    "train.jsonl": "a file (.jsonl, .json, .parquet): a problem a row, prompt/question/problem and answer/solution/…",
    "org/name@subset#split": "any dataset on the Hugging Face hub; subset and split may be left out",
    GYM: "a generator of reasoning-gym",
    "my_task.py:make": "a function of your own that returns a rpg.tasks.Task",
    "0.7*gsm8k + 0.3*math": "several at once, in exact proportions",
}
ABOUT = {
    "arithmetic": "+, - and * of 3 to 6 whole numbers from 1 to 20, no brackets, nothing below 0 or above 199; endless",
    "countdown": "reach a number with given numbers, endless",
    "mixed": "the one or the other at random",
}
KINDS = {
    "whole number": re.compile(r"[-+]?\d+|[-+]?\d{1,3}(,\d{3})+"),
    "decimal": re.compile(r"[-+]?\d*\.\d+|[-+]?\d+\."),
    "fraction": re.compile(r"[-+]?\d+/\d+|-?\\[dt]?frac\{-?\d+\}\{-?\d+\}"),
    "several values": re.compile(r"[(\[{\\].*,.*|[^,]*,.*"),
    "formula": re.compile(r".*[\\^_=+*/{}$|<>-].*", re.DOTALL),
}


def add_tasks(commands: Any) -> None:
    parser = commands.add_parser(
        "tasks",
        help="what there is to train on; what is in a dataset, and what of it is in the test set",
        description="What task.name and task.test can be. With NAME: that task, with duplicates and overlap counted.",
        epilog=TASKS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="as for task.name")
    add("--test", metavar="NAMES", help="as for task.test")
    add("--prompt-key", metavar="COLUMN", help="as for task.prompt_key")
    add("--answer-key", metavar="COLUMN", help="as for task.answer_key")
    parser.set_defaults(run=run_tasks)


def run_tasks(args: argparse.Namespace) -> int:
    if args.name is None:
        if args.test or args.prompt_key or args.answer_key:
            raise Mistake("--test, --prompt-key and --answer-key go with a NAME")
        _list()
        return 0
    from ..tasks.loading import load_task

    try:
        task = load_task(args.name, 0, args.test, args.prompt_key, args.answer_key, look=False)
    except ValueError as error:
        raise Mistake(str(error)) from error
    _show(task)
    return 0


def _list() -> None:
    print(f"{'datasets':<18} {'train':>7} {'test':>6}")
    for name, row in DATASETS.items():
        train, test = (part.problems if part else "" for part in (row.train, row.test))
        hubs = dict.fromkeys(part.hub.partition("#")[0] for part in (row.train, row.test) if part)
        print(f"  {name:<16} {train:>7} {test:>6}  {row.about}\n{'':<35}{', '.join(hubs)}")
    print(f"  {FOLDER}=FOLDER takes them from files there instead of the hub: gsm8k-train.jsonl, math-500.parquet, …")
    others = OTHERS if find_spec("reasoning_gym") else OTHERS | {GYM: f"{OTHERS[GYM]} ({install('rpg-rl[gym]')})"}
    for title, names in (("built in", {name: ABOUT[name] for name in BUILTIN}), ("others", others)):
        print(f"\n{title}")
        for name, about in names.items():
            print(f"  {name:<27} {about}")


def _show(task: Task) -> None:
    from ..tasks.templates import fill

    _say(f"{task.name}: {ABOUT[task.name]}" if task.name in ABOUT else task.name)
    for title, problems in [("train", task.train), *((f"test {name}", test) for name, test in task.tests.items())]:
        _say(f"  {title}: {describe(problems)}")
    for problem in _examples(task):
        print()
        _say(f"answer {problem.answer[:200]}, template {_short(problem.template)}")
        if problem.system:
            _say(f"  (system) {_short(problem.system)}")
        for line in fill(problem.template, problem.prompt)[:LONGEST].expandtabs().splitlines():
            _say(f"  {line}".rstrip())
    print()
    for note in task.notes:
        _say(note)
    train = finite(task.train)
    if len(task.train) and not train:
        print("problems are made when asked for; a tenth of all possible ones is held out")
        return
    index = Index(train)
    tests = {name: index.overlap(test) for name, test in task.tests.items() if len(test) < ENDLESS}
    for line in lines(index.repeated, tests):
        _say(line)
    for name, overlap in tests.items():
        if train and not overlap.pairs:
            _say(f"{name}: none of its problems is in the training set")


def _say(line: str) -> None:
    print(printable(line))


def describe(problems: Sequence[Problem]) -> str:
    """1,319 problems; whole number 98 %, decimal 2 %; levels 1–5"""
    if len(problems) >= ENDLESS:
        return "endless"
    if not problems:
        return "none"
    kinds = Counter(kind_of(problem.answer) for problem in problems)
    shares = ", ".join(f"{kind} {count / len(problems):.1%}" for kind, count in kinds.most_common())
    levels = sorted({problem.level for problem in problems if problem.level})
    graded = f"; levels {levels[0]}–{levels[-1]}" if len(levels) > 1 else ""
    return f"{len(problems):,} problems; answers: {shares}{graded}"


def kind_of(answer: str) -> str:
    text = answer.strip().strip("$").strip()
    return next((kind for kind, form in KINDS.items() if form.fullmatch(text)), "text")


def _examples(task: Task, count: int = 3) -> list[Problem]:
    """From the beginning, the middle and the end, where there is one."""
    problems = task.train if len(task.train) else next(iter(task.tests.values()))
    size = len(problems) if len(problems) < ENDLESS else count
    places = sorted({i * (size - 1) // max(count - 1, 1) for i in range(count)}) if size else []
    return [problems[place] for place in places]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
