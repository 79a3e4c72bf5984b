"""The ``rpg`` command. A subcommand is a function that adds its parser and one that runs; heavy imports stay inside."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .bench.command import add_bench
from .export.command import add_export
from .report.command import add_report
from .tasks.command import add_tasks
from .train.command import add_eval, add_train, first_of_launch

if TYPE_CHECKING:
    from .advantages import Advantage
    from .algorithms import Algorithm
    from .audit import Subject
    from .audit.peers import Peer
    from .audit.summary import Report
    from .clipping import Clip

Commands = Any  # argparse's private _SubParsersAction
STRICT = 1e-6


class Mistake(Exception):
    """The user's; its text is one line for stderr."""


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
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for add in (add_train, add_eval, add_tasks, add_report, add_export, add_audit, add_algorithms, add_bench):
        add(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from . import __version__

        print(f"rpg {__version__}")
        parser.exit()


@contextlib.contextmanager
def one_line(prefix: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors of this kind into a Mistake of one line."""
    try:
        yield
    except kind as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise Mistake(f"{prefix}{text}") from error


# ---- rpg audit -------------------------------------------------------------------------------------------------------

AUDIT_HELP = """\
Compare the expected gradient of each LOSS with the exact gradient of its objective: every response of a
small policy is enumerated in float64, on-policy, off-policy with ref = old, and with three different policies."""

AUDIT_EXAMPLES = """\
examples:
  rpg audit                                  every preset
  rpg audit grpo grpo-corrected              two of them
  rpg audit my_loss.py:loss --strict         your own: fn(logp, old_logp, advantages, mask, ref_logp[, beta]) -> loss;
                                             one without a beta argument is audited at --beta, so give its own;
                                             its clip stays on: --drift 0.05 keeps ratios inside ±20 %
  rpg audit --peers --html audit.html        and the losses of TRL, Liger and verl, as one page"""


def add_audit(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit",
        help="every loss against the exact gradient",
        description=AUDIT_HELP,
        epilog=AUDIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("losses", nargs="*", metavar="LOSS", help="a preset, package.module:name or file.py:name; none: all presets")
    add("--divergence", choices=("none", "fkl", "rkl", "ufkl", "urkl"), help="the D that LOSS is meant to subtract")
    add("--objective", choices=("token", "sequence", "geometric"), help="the level that LOSS is meant to be exact at")
    add("--beta", type=_positive, default=0.1, metavar="B", help="strength of the KL term (default: 0.1)")
    add("--seeds", type=_count, default=10, metavar="N", help="random problems to take the median of (default: 10)")
    add("--drift", type=_positive, default=0.5, metavar="D", help="distance between the policies (default: 0.5)")
    add("--verbose", action="store_true", help="also variable lengths by scenario, variance, clip, and the settings")
    add("--strict", action="store_true", help=f"exit with 1 if any bias against its own objective exceeds {STRICT:g}")
    files = parser.add_argument_group("output, besides the table")
    add = files.add_argument
    add("--json", nargs="?", const="-", metavar="FILE", help="every number; without FILE, or -, to stdout alone")
    add("--html", type=Path, metavar="FILE", help="one self-contained page")
    add("--svg", type=Path, metavar="FILE", help="one picture")
    add("--markdown", type=Path, metavar="FILE", help="the whole table in Markdown")
    other = parser.add_argument_group("other libraries")
    add = other.add_argument
    add("--peers", action="store_true", help="also the losses of TRL, Liger and verl, as installed")
    add("--verl-python", metavar="PATH", help="with --peers: interpreter that has verl (default: $RPG_VERL_PYTHON)")
    parser.set_defaults(run=run_audit)


def run_audit(args: argparse.Namespace) -> int:
    _check_audit(args)
    import torch

    from . import audit
    from .audit import page, picture, table
    from .audit.summary import Report

    torch.set_num_threads(1)  # the tensors are tiny
    with contextlib.redirect_stdout(sys.stderr):  # whatever other people's modules print
        subjects, messages = _subjects(args)
        with _progress(len(subjects)) as progress:
            result = audit.run(subjects, args.seeds, args.beta, args.drift, messages, progress)
    report = Report.of(result, subjects, args.line)
    document = json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n"
    if args.json == "-":
        sys.stdout.write(document)
    else:
        table.show(report, verbose=args.verbose)
    made: dict[Path | None, Callable[[], str]] = {
        None if args.json in (None, "-") else Path(args.json): lambda: document,
        args.html: lambda: page.html(report),
        args.svg: lambda: picture.svg(report),
        args.markdown: lambda: table.markdown(report),
    }
    for path, make in made.items():
        if path is not None:
            with one_line(f"cannot write {path}: ", OSError):
                path.write_text(make(), encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)
    return _strict(report) if args.strict else 0


def _check_audit(args: argparse.Namespace) -> None:
    """What can be known to be wrong before any work is done."""
    from .algorithms import algorithms

    if args.json and (args.json in algorithms() or re.fullmatch(r"[\w./-]+:[A-Za-z_]\w*", args.json)):
        raise Mistake(f"--json took {args.json!r} for its file; write --json=- or put the losses first")
    if args.verl_python and not args.peers:
        raise Mistake("--verl-python goes with --peers")
    if not args.losses and (args.divergence or args.objective):
        raise Mistake("--divergence and --objective say what a LOSS is meant to ascend: name the LOSS")
    for path in (args.json, args.html, args.svg, args.markdown):
        if path is None or path == "-":
            continue
        path = Path(path)
        if path.is_dir():
            raise Mistake(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise Mistake(f"cannot write {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise Mistake(f"cannot write {path}: permission denied")


def _subjects(args: argparse.Namespace) -> tuple[list[Subject], list[str]]:
    from .algorithms import algorithms

    subjects = [_subject(name, args) for name in dict.fromkeys(args.losses or algorithms())]
    messages: list[str] = []
    if args.peers:
        from .audit.peers import peers

        rows, messages = peers(args.verl_python)
        subjects += [_of_peer(peer) for peer in rows]
    return subjects, messages


def _subject(name: str, args: argparse.Namespace) -> Subject:
    from . import __version__
    from .audit import Problem, resolve

    if ":" not in name:
        with one_line("", ValueError):
            return replace(resolve(name, args.divergence, args.objective), source=f"rpg {__version__}")
    with one_line(f"{name}: "):
        subject = replace(resolve(name, args.divergence, args.objective), source="user")
    b = Problem("three policies", variable=True, seed=0, drift=args.drift).batch
    with one_line(f"{name} failed on a batch: "):
        c_NT = subject.coefficients(b, args.beta)
        answer_NT = subject.coefficients(replace(b, advantages_N=2 * b.advantages_N), args.beta) - c_NT
    cut = float((answer_NT == 0)[b.mask_NT].float().mean())
    if subject.clipped is None and cut:
        hint = f"{cut:.0%} of its tokens do not answer to the reward (a clip?): --drift 0.05 keeps ratios inside ±20 %"
        print(f"rpg audit: {name}: {hint}", file=sys.stderr)
    return subject


def _of_peer(peer: Peer) -> Subject:
    from .audit import Subject

    return Subject(
        name=peer.name,
        source=peer.source,
        divergence=peer.divergence,
        objective=peer.objective,
        coefficients=peer.coefficients,
        clipped=peer.clipped,
        note=peer.note,
        dtype=peer.dtype,
    )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr, gone when done; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        seen = iter(range(1, total + 1))
        yield lambda name: status.update(f"{next(seen)}/{total}  {name}")


def _strict(report: Report) -> int:
    failed = [line.name for line in report.lines if not line.worst <= STRICT]
    if failed:
        print(f"rpg audit: biased by more than {STRICT:g}: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number; got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return value


# ---- rpg algorithms --------------------------------------------------------------------------------------------------


def add_algorithms(commands: Commands) -> None:
    parser = commands.add_parser(
        "algorithms",
        help="the presets: what each method is made of",
        description="The presets, each a choice of divergence, estimator, clip, level, advantage and reduction.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them: its formula, options and paper")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run_algorithms)


def run_algorithms(args: argparse.Namespace) -> int:
    from .algorithms import algorithm, algorithms

    with one_line("", ValueError):
        chosen = [algorithm(name) for name in ([args.name] if args.name else algorithms())]
    if args.json:
        found = [describe(a) for a in chosen]
        print(json.dumps(found[0] if args.name else found, indent=1, ensure_ascii=False))
    elif args.name:
        _show_algorithm(chosen[0])
    else:
        _show_algorithms(chosen)
    return 0


def describe(a: Algorithm) -> dict[str, Any]:
    """A preset as flat data."""
    loss = a.loss
    bounds = None
    if loss.clip is not None:
        bounds = [x if x < float("inf") else None for x in loss.clip.bounds()]
    return {
        "name": a.name,
        "divergence": loss.divergence,
        "beta": loss.beta,
        "estimator": loss.estimator,
        "clip": clip_text(loss.clip),
        "clip_bounds": bounds,
        "kl_in_clip": loss.kl_inside if loss.divergence != "none" else None,
        "level": loss.level,
        "advantage": advantage_text(a.advantage),
        "reduction": loss.reduction,
        "reference": a.reference,
        "formula": a.formula,
        "paper": a.paper,
        "options": _options(a),
    }


def _options(a: Algorithm) -> dict[str, Any]:
    """Everything that ``rpg.algorithm(name, option=…)`` can change, with its value."""
    of_loss = {f.name: getattr(a.loss, f.name) for f in fields(a.loss) if f.name not in ("clip", "mismatch")}
    if a.advantage.beta:  # its KL is in the reward, where the option goes too
        of_loss["beta"] = a.advantage.beta
    of_clip = {} if a.loss.clip is None else _clip_fields(a.loss.clip)
    around = ("reference", "dynamic_sampling", "overlong_penalty", "curvature_gate")
    advantage = {f.name: getattr(a.advantage, f.name) for f in fields(a.advantage)}
    return of_loss | of_clip | {"advantage": advantage} | {name: getattr(a, name) for name in around}


def _clip_fields(rule: Clip) -> dict[str, Any]:
    return {f.name: getattr(rule, f.name) for f in fields(rule)}  # type: ignore[arg-type]


def clip_text(rule: Clip | None) -> str:
    """RPGClip 0.8–1.28, c=10"""
    from .clipping import Adaptive

    if rule is None:
        return "none"
    if isinstance(rule, Adaptive):
        return f"Adaptive {rule.target_ess or rule.target_kl:g}"
    low, high = rule.bounds()
    bounds = {(0.0, float("inf")): "", (1.0, 1.0): " w = 1"}.get((low, high))
    if bounds is None:
        bounds = f" ≤ {high:.5g}" if low == 0 else f" {low:.5g}–{high:.5g}"
    rest = {k: v for k, v in _clip_fields(rule).items() if k not in ("low", "high") and v is not None}
    texts = [f", {k}={v:g}" if isinstance(v, float) else f", {k}={v}" for k, v in rest.items()]
    return f"{type(rule).__name__}{bounds}" + "".join(texts)


def advantage_text(advantage: Advantage) -> str:
    """reward-to-go, whiten, beta=0.01"""
    chosen = {f.name: getattr(advantage, f.name) for f in fields(advantage) if f.name != "kind"}
    return advantage.kind + "".join(f", {k}" if v is True else f", {k}={v:g}" for k, v in chosen.items() if v)


def _call(advantage: Advantage) -> str:
    """Advantage('reward-to-go', whiten=True, beta=0.01)"""
    chosen = [f"{f.name}={v!r}" for f in fields(advantage) if (v := getattr(advantage, f.name)) != f.default]
    return f"Advantage({', '.join(text.removeprefix('kind=') for text in chosen)})"


def _show_algorithms(chosen: list[Algorithm]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from .audit.table import printed

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("name\npaper", "KL, β\nreference", "estimator\nlevel", "clip\nKL in it", "advantage\nreduction"):
        table.add_column(title, min_width=23 if title.startswith("clip") else None)
    for a in chosen:
        d = describe(a)
        inside = {True: "KL inside", False: "KL outside", None: ""}[d["kl_in_clip"]]
        kl = "none" if d["divergence"] == "none" else f"{d['divergence']}, {d['beta']:g}"
        above = (d["name"], kl, d["estimator"], d["clip"], d["advantage"])
        below = (d["paper"], f"ref = {d['reference']}", d["level"], inside, d["reduction"])
        table.add_row(*(Text(top) + Text(f"\n{bottom}", style="dim") for top, bottom in zip(above, below, strict=True)))
    with printed() as to:
        to.print(table)


def _show_algorithm(a: Algorithm) -> None:
    from rich.text import Text

    from .audit.table import printed

    d = describe(a)
    width = max(map(len, d["options"]))
    with printed() as to:
        to.print(Text(f"{a.name}  ({a.paper})", style="bold"))
        to.print(f"{a.formula}\n")
        for key in ("divergence", "estimator", "clip", "level", "advantage", "reduction", "reference"):
            to.print(f"{key:<12} {d[key]}")
        to.print(Text(f'\nrpg.algorithm("{a.name}", option=…), where option is', style="bold"))
        for key, value in (d["options"] | {"clip": a.loss.clip, "advantage": _call(a.advantage)}).items():
            to.print(f"  {key:<{width}}  {value}")


if __name__ == "__main__":
    from rpg.cli import main  # run as a script this module has two names, and its Mistake would be two classes

    sys.exit(main())
