"""`rpg recipes`: the settings that come with rpg, by name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..console import Mistake, check_writable, one_line
from ..find_recipe import recipe_file, recipes
from ..run.config import Config
from ..run.settings import build

EXAMPLES = """\
examples:
  rpg recipes                                            what there is
  rpg recipes builtin/dapo                               one of them, as it is
  rpg recipes gsm8k/qwen2.5-coder-0.5b/dapo -o my.yaml   a copy to change: rpg train --config my.yaml
  rpg train --config builtin/dapo --steps 20             run it by its name, from anywhere"""
ROW = "{:<51} {:<20} {:<32} {:<16} {}"


def add_recipes(commands: Any) -> None:
    parser = commands.add_parser(
        "recipes",
        help="the recipes that come with rpg: settings by name, for rpg train --config NAME",
        description="Settings of whole runs, by name: rpg train --config NAME takes them from anywhere.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="with NAME: write it into this file")
    parser.set_defaults(run=run_recipes)


def run_recipes(args: argparse.Namespace) -> int:
    if args.name is None:
        if args.output:
            raise Mistake("-o goes with a NAME")
        print("\n".join(_rows()))
        return 0
    with one_line("", ValueError):
        text = recipe_file(Path(args.name)).read_text(encoding="utf-8")
    if args.output is None:
        sys.stdout.write(text)
        return 0
    check_writable(args.output)
    if args.output.exists():
        raise Mistake(f"{args.output} exists already: give another file with -o")
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}; rpg train --config {args.output}")
    return 0


def _rows() -> Iterator[str]:
    """A line a recipe, an empty one between folders."""
    yield ROW.format("name", "method", "model", "task", "needs")
    folder = None
    for name, file in recipes().items():
        config = build(Config, file=file)
        if folder != (folder := name.rpartition("/")[0]):
            yield ""
        yield ROW.format(name, config.algorithm, config.model, config.task.name, _needs(config))


def _needs(config: Config) -> str:
    """What the run takes besides rpg itself."""
    teacher = f", the run {config.reference.model}" if config.reference.model else ""
    return ("a CPU" if config.model == "builtin" else "a GPU, the hub") + teacher
