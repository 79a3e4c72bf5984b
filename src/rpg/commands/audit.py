"""``rpg audit``."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Mistake, check_writable, one_line

if TYPE_CHECKING:
    from ..audit import Subject
    from ..audit.summary import AuditReport

LOSS_HELP = "a preset, a pattern of them, package.module:name or file.py:name; none: all presets"
STRICT = 1e-6
STRICT_HELP = f"""\
exit with 1 if a bias against its own objective exceeds {STRICT:g}: in the six settings; in the box as shipped, there
also token by token against the loss without its clip; under top-p sampling; or if the clip of a loss of yours cuts on
the wrong side"""

AUDIT_HELP = """\
Compare the expected gradient of each LOSS with the exact gradient of its objective: every response of a
small policy is enumerated in float64, on-policy, off-policy with ref = old, and with three different policies. Then
as shipped, clip on, where no clip acts ("in the box"), and where the sampler draws from the top-p of its policy.
What is wrong is said in words where the gradient gives it away: "padding counts", "old and ref are swapped", …"""

AUDIT_EXAMPLES = """\
examples:
  rpg audit                                  every preset
  rpg audit grpo grpo-corrected              two of them
  rpg audit 'rpg-*' --strict                 those that match; exit code 1 if one is off
  rpg audit my_loss.py:loss --strict         your own: fn(logp, old_logp, advantages, mask, ref_logp[, beta]) -> loss;
                                             one without a beta argument is audited at --beta, so give its own;
                                             its clip stays on: --drift 0.05 keeps ratios inside ±20 %
  rpg audit --peers --html audit.html        and the losses of TRL, Liger and verl, as one page"""


def add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="every loss against the exact gradient",
        description=AUDIT_HELP,
        epilog=AUDIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("losses", nargs="*", metavar="LOSS", help=LOSS_HELP)
    add("--divergence", choices=("none", "fkl", "rkl", "ufkl", "urkl"), help="the D that LOSS is meant to subtract")
    add("--objective", choices=("token", "sequence", "geometric"), help="the level that LOSS is meant to be exact at")
    add("--beta", type=_positive, default=0.1, metavar="B", help="strength of the KL term (default: 0.1)")
    add("--seeds", type=_count, default=10, metavar="N", help="random problems to take the median of (default: 10)")
    add("--drift", type=_positive, default=0.5, metavar="D", help="distance between the policies (default: 0.5)")
    add("--verbose", action="store_true", help="also every setting, variance, clip, truncated sampling, and the notes")
    add("--strict", action="store_true", help=STRICT_HELP)
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

    from .. import audit
    from ..audit import page, picture, table
    from ..audit.subjects import LossFailed
    from ..audit.summary import AuditReport

    torch.set_num_threads(1)  # the tensors are tiny
    with contextlib.redirect_stdout(sys.stderr):  # whatever other people's modules print
        subjects, messages = _subjects(args)
        with _progress(len(subjects)) as progress, one_line("", LossFailed):
            result = audit.run(subjects, args.seeds, args.beta, args.drift, messages, progress)
    report = AuditReport.of(result, subjects, args.line)
    document = json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n"
    if args.json == "-":
        sys.stdout.write(document)
    else:
        table.show(report, verbose=args.verbose)
    files: dict[Path | None, Callable[[], str]] = {
        None if args.json in (None, "-") else Path(args.json): lambda: document,
        args.html: lambda: page.html(report),
        args.svg: lambda: picture.svg(report),
        args.markdown: lambda: table.markdown(report),
    }
    for path, make in files.items():
        if path is not None:
            with one_line(f"cannot write {path}: ", OSError):
                path.write_text(make(), encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)
    return _strict(report) if args.strict else 0


def _check_audit(args: argparse.Namespace) -> None:
    """What can be known to be wrong before any work is done."""
    from ..loss.methods import algorithms

    if args.json and (args.json in algorithms() or re.fullmatch(r"[\w./-]+:[A-Za-z_]\w*", args.json)):
        raise Mistake(f"--json took {args.json!r} for its file; write --json=- or put the losses first")
    if args.verl_python and not args.peers:
        raise Mistake("--verl-python goes with --peers")
    if not args.losses and (args.divergence or args.objective):
        raise Mistake("--divergence and --objective say what a LOSS is meant to ascend: name the LOSS")
    for path in (args.json, args.html, args.svg, args.markdown):
        if path is not None and path != "-":
            check_writable(Path(path))


def _subjects(args: argparse.Namespace) -> tuple[list[Subject], list[str]]:
    from ..loss.methods import algorithms

    subjects = [_subject(name, args) for name in dict.fromkeys(_expanded(args.losses) or algorithms())]
    messages: list[str] = []
    if args.peers:
        from ..audit.peers import peers

        theirs, messages = peers(args.verl_python)
        subjects += theirs
    return subjects, messages


def _expanded(losses: list[str]) -> list[str]:
    """Patterns such as rpg-* as the presets that match them; what matches none is left for the error message."""
    from ..loss.methods import algorithms

    named = ([name] if ":" in name else fnmatch.filter(algorithms(), name) or [name] for name in losses)
    return [name for names in named for name in names]


def _subject(name: str, args: argparse.Namespace) -> Subject:
    from .. import __version__
    from ..audit import EnumeratedProblem, resolve
    from ..audit.problem import SMALL_DRIFT
    from ..audit.subjects import share_without_reward

    if ":" not in name:
        with one_line("", ValueError):
            return replace(resolve(name, args.divergence, args.objective), source=f"rpg {__version__}")
    with one_line(f"{name}: "):
        subject = replace(resolve(name, args.divergence, args.objective), source="user")
    batch = EnumeratedProblem("three policies", variable=True, seed=0, drift=args.drift).batch
    with one_line(""):
        cut = share_without_reward(subject, batch, args.beta)
    if subject.clipped is None and cut:
        hint = "--drift 0.05 keeps" if args.drift > SMALL_DRIFT else f"yet --drift {args.drift:g} keeps"
        text = f"{cut:.0%} of its tokens do not answer to the reward (a clip?): {hint} ratios inside ±20 %"
        print(f"rpg audit: {name}: {text}", file=sys.stderr)
    return subject


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr, gone when done; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        seen = iter(range(1, total + 1))
        yield lambda name: status.update(f"{next(seen)}/{total}  {name}")


def _strict(report: AuditReport) -> int:
    """The last lines: a line for each loss that failed, with the settings and columns it failed in."""
    failed = [f"  {line.name}: {'; '.join(line.off)}" for line in report.lines if line.failed]
    if failed:
        sys.stdout.flush()
        print("\n".join([f"rpg audit: off by more than {STRICT:g}:", *failed]), file=sys.stderr)
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
