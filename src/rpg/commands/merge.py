"""``rpg merge``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import merge
from ..console import Mistake, amount, duration, number, printed
from ..trust import HELP as TRUST

if TYPE_CHECKING:
    from ..models.merge import Merged

EXAMPLES = """\
examples:
  rpg merge runs/seed-0 runs/seed-1 -o merged              spherical interpolation, layer by layer
  rpg merge runs/seed-* -o next --towards 0.3              the start of WARP's next round: rpg train --model next
  rpg merge runs/seed-0 -o half --towards 0.5              half of the way back to the model that the run began from
  rpg merge ./a ./b org/c -o all --init org/base --method linear --weights 2,1,1"""


def add_merge(commands: Any) -> None:
    parser = commands.add_parser(
        "merge",
        help="several runs as one model (WARP), or one run moved towards its beginning",
        description="Join what several runs have learnt, the differences of their weights from the model that they "
        "began from, and write a model folder: a whole model, "
        "also of adapters. Prints the norms of these differences and the cosines between them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder, a model folder, or a hub id")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the model folder to write")
    add("--init", metavar="MODEL", help="the model that they began from (default: what the runs' settings say)")
    add("--method", default="slerp", metavar="slerp|linear", help="on the sphere or on a line (default: slerp)")
    add(
        "--towards",
        type=float,
        default=1.0,
        metavar="ETA",
        help="how far to go from the initial model towards the merged one: 0 none, 1 all of the way (default: 1; WARP "
        "begins its next round at 0.3)",
    )
    add("--weights", type=_weights, metavar="W,W,…", help="a number for each run (default: all the same)")
    add("--per", default="layer", metavar="layer|tensor|model", help="what has an angle of its own (default: layer)")
    add("--checkpoint", default="last", metavar="last|best|N", help="which of each run's (default: last)")
    add("--trust", action="store_true", help=TRUST)
    parser.set_defaults(run=run_merge)


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, as in 2,1,1; got {text}") from error


def run_merge(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from ..run.checkpoint import CheckpointError

    options = {
        name: getattr(args, name) for name in ("init", "method", "towards", "weights", "per", "checkpoint", "trust")
    }
    try:
        with Console(stderr=True, markup=False).status("") as status:
            merged = merge(args.runs, args.output, note=lambda text: status.update(Text(text)), **options)
    except (ValueError, OSError, CheckpointError) as error:
        raise Mistake(" ".join(str(error).split())) from error
    _show(merged, args)
    return 0


def _show(merged: Merged, args: argparse.Namespace) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    several = len(args.runs) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("", "weight", "‖δ‖", "‖δ‖/‖init‖", *(f"cos {i + 1}" for i in range(len(args.runs)) if several)):
        table.add_column(title, justify="left" if not title else "right")
    weights = args.weights or [1.0] * len(args.runs)
    for i, (run, norm) in enumerate(zip(args.runs, merged.norms, strict=True)):
        cosines = [f"{value:.3f}" for value in merged.cosines[i]] if several else []
        share = f"{weights[i] / sum(weights):.3g}"
        table.add_row(str(i + 1), run, share, number(norm), f"{norm / merged.initial:.2%}", *cosines)
    length = args.towards * merged.norm
    table.add_row(
        "", "merged", "", number(length), f"{length / merged.initial:.2%}", *[""] * (several * len(args.runs))
    )
    method = f"{args.method} per {args.per} ({merged.layers})" if several else "one run"
    far = f", {args.towards:g} of the way from the initial model" if args.towards != 1 else ""
    with printed() as to:
        to.print(table)
        to.print(f"{method}{far}; {amount(merged.parameters)} weights, {merged.dtype}; {duration(merged.seconds)}")
        name = shlex.quote(str(args.output))
        to.print(f"wrote {args.output}: rpg eval {name}, rpg train --model {name}")
