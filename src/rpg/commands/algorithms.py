"""``rpg algorithms``."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Mistake, check_writable, one_line, printed

if TYPE_CHECKING:
    from ..loss.advantages import Advantage
    from ..loss.methods import Algorithm


def add_algorithms(commands: Any) -> None:
    parser = commands.add_parser(
        "algorithms",
        help="the presets: what each method is made of",
        description="The presets, each a choice of divergence, estimator, clip, level, advantage and reduction.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them: formula, row, plain torch, options")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="the explorer: one page on which every choice moves its curves (two minutes)",
    )
    parser.set_defaults(run=run_algorithms)


def run_algorithms(args: argparse.Namespace) -> int:
    from ..loss.describe import describe
    from ..loss.methods import algorithm, algorithms

    if args.html:
        if args.name:
            raise Mistake(f"--html writes a page of every method: leave {args.name}")
        return _write_explorer(args.html)
    with one_line("", ValueError):
        chosen = [algorithm(name) for name in ([args.name] if args.name else algorithms())]
    if args.json:
        presets = [describe(a) for a in chosen]
        print(json.dumps(presets[0] if args.name else presets, indent=1, ensure_ascii=False))
    elif args.name:
        _show_algorithm(chosen[0])
    else:
        _show_algorithms(chosen)
    return 0


def _write_explorer(path: Path) -> int:
    """Its numbers are audits, so it takes a while: a line on a terminal's stderr says how far it is."""
    import torch
    from rich.console import Console

    from ..explorer import numbers, page

    check_writable(path)
    torch.set_num_threads(1)  # the tensors are tiny
    with Console(stderr=True).status("") as status:
        text = page.html(numbers.table(lambda done: status.update(f"audits: {done}")))
    with one_line(f"cannot write {path}: ", OSError):
        path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


def _call(advantage: Advantage) -> str:
    """Advantage('reward-to-go', whiten=True, beta=0.01)"""
    chosen = [f"{f.name}={v!r}" for f in fields(advantage) if (v := getattr(advantage, f.name)) != f.default]
    return f"Advantage({', '.join(text.removeprefix('kind=') for text in chosen)})"


def _show_algorithms(chosen: list[Algorithm]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from ..loss.describe import beside_clip, describe

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("name\npaper", "KL, β\nreference", "estimator\nlevel", "clip\nKL, gate", "advantage\nreduction"):
        table.add_column(title, min_width=23 if title.startswith("clip") else None)
    for a in chosen:
        d = describe(a)
        inside = {True: ["KL inside"], False: ["KL outside"], None: []}[d["kl_in_clip"]]
        beside = "\n".join([*inside, *beside_clip(a)])
        kl = "none" if d["divergence"] == "none" else f"{d['divergence']}, {d['beta']:g}"
        above = (d["name"], kl, d["estimator"], d["clip"], d["advantage"])
        below = (d["paper"], f"ref = {d['reference']}", d["level"], beside, d["reduction"])
        table.add_row(*(Text(top) + Text(f"\n{bottom}", style="dim") for top, bottom in zip(above, below, strict=True)))
    with printed() as to:
        to.print(table)


def _show_algorithm(a: Algorithm) -> None:
    from rich.text import Text

    from ..loss.describe import describe
    from ..loss.registry import sources

    d = describe(a)
    row, plain = sources(a.name)
    width = max(map(len, d["options"]))
    with printed() as to:
        to.print(Text(f"{a.name}  ({a.paper})", style="bold"))
        to.print(f"{a.formula}\n")
        to.print(Text("its row: what runs", style="bold"))
        to.print(Text(f"{row}\n"), soft_wrap=True)
        to.print(Text("the same in plain torch: its gradient is the row's, and a test says so", style="bold"))
        to.print(Text(f"{plain}\n"), soft_wrap=True)
        rules = [key for key in ("token_clip", "gate") if d[key] != "none"]
        for key in ("divergence", "estimator", "clip", *rules, "level", "advantage", "reduction", "reference"):
            note = "  (a response has one loss)" if key == "reduction" and d["level"] != "token" else ""
            to.print(f"{key:<12} {d[key]}{note}")
        switches = {
            "dynamic sampling": a.dynamic_sampling,
            f"min_signal {a.min_signal:g}": a.min_signal > 0,
            "overlong penalty": a.overlong_penalty,
            "curvature gate": a.curvature_gate,
        }
        to.print(f"{'around it':<12} {', '.join(name for name, on in switches.items() if on) or 'nothing'}")
        to.print(Text(f'\nrpg.algorithm("{a.name}", option=…), where option is', style="bold"))
        for key, value in (d["options"] | {"clip": a.loss.clip, "advantage": _call(a.advantage)}).items():
            to.print(f"  {key:<{width}}  {value}")
