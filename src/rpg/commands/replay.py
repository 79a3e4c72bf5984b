"""``rpg replay``"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Mistake, check_writable, one_line

if TYPE_CHECKING:
    from ..replay import Replayed

REPLAY_HELP = """\
One optimiser step's batch of rollouts, and the model as it was: the gradient that each method would take there. Side by
side: its norm, its noise over groups, what the clip and the KL do to it, and its cosine to the gradient with exact
weights. BATCH is a file that `rpg train --log.record`, TRL, verl or your own trainer wrote, or a run that recorded."""

REPLAY_EXAMPLES = """\
examples:
  rpg train --log.record 20                  writes the last optimiser step of step 20, and the weights before it
  rpg replay runs/latest                     the usual methods on it; the page lies beside the batch
  rpg replay batch.safetensors --model Qwen/Qwen3-0.6B --methods 'rpg-*' grpo
  rpg replay runs/latest --methods all --json replay.json"""


def add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="every method's gradient on one recorded batch",
        description=REPLAY_HELP,
        epilog=REPLAY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("batch", type=Path, metavar="BATCH", help="a recorded batch, or the folder of a run that recorded one")
    add("--model", help="the weights as they were before that step (default: those that the batch names)")
    add("--methods", nargs="+", default=[], metavar="NAME", help="presets, patterns or all (default: a dozen)")
    add("-o", "--output", type=Path, metavar="FILE", help="the page (default: beside BATCH, ending in .html)")
    add("--json", nargs="?", const="-", metavar="FILE", help="every number; without FILE, or -, to stdout alone")
    add("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")
    add("--micro-tokens", type=int, default=4096, metavar="N", help="tokens of a forward pass (default: 4096)")
    parser.set_defaults(run=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    from ..models.policy import Policy
    from ..replay import find, model_of, page, read, replay, table
    from ..training.setup import pick_device, pick_dtype

    if args.micro_tokens < 1:
        raise Mistake("--micro-tokens must be at least 1")
    with one_line("", ValueError):
        path = find(args.batch)
        recorded = read(path)
        output: Path = args.output or path.with_suffix(".html")
        for file in (output, None if args.json in (None, "-") else Path(args.json)):
            if file is not None:
                check_writable(file)
        name = args.model or model_of(recorded, path)
        device = pick_device(args.device)
        dtype = pick_dtype(str(recorded.about.get("dtype", "auto")), device)
    with one_line(f"cannot load the model {name}: "):
        policy = Policy.load(name, device=device, dtype=dtype)
    with one_line("", ValueError), _progress() as progress:
        done = replay(recorded, policy, args.methods, tokens=args.micro_tokens, path=str(path), progress=progress)
    done = replace(done, command=args.line, model=name)
    _write(done, args, output, page.html(done))
    if args.json != "-":
        table.show(done)
    return 0


def _write(done: Replayed, args: argparse.Namespace, output: Path, text: str) -> None:
    document = json.dumps(done.as_dict(), indent=1, ensure_ascii=False) + "\n"
    if args.json == "-":
        sys.stdout.write(document)
    files = {output: text} | ({} if args.json in (None, "-") else {Path(args.json): document})
    for path, content in files.items():
        with one_line(f"cannot write {path}: ", OSError):
            path.write_text(content, encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)


def _progress() -> Any:
    """A line on a terminal's stderr, gone when done; nothing elsewhere."""
    import contextlib

    from rich.console import Console

    @contextlib.contextmanager
    def shown() -> Any:
        with Console(stderr=True).status("") as status:
            yield status.update

    return shown()
