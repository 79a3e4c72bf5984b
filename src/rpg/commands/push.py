"""``rpg push``."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import checkpoint_folder
from ..console import Mistake, amount, flat_text, printed
from ..run.folder import settings_of

if TYPE_CHECKING:
    from ..publish.push import Shipment

EXAMPLES = """\
examples:
  rpg push runs/latest you/qwen-gsm8k                      the best checkpoint, into a private repository
  rpg push runs/grpo-1 you/qwen-gsm8k --checkpoint 40 --public
  rpg push merged you/qwen-warp --yes                      what rpg merge wrote, without a question
  rpg push runs/latest you/qwen-gsm8k --update --revision step-80

The token is that of `hf auth login`, or HF_TOKEN."""


def add_push(commands: Any) -> None:
    parser = commands.add_parser(
        "push",
        help="a run's model to the Hugging Face hub, with its card",
        description="Push the model of a run's checkpoint, or one that rpg merge wrote, to the Hugging Face hub: "
        "weights (of an adapter those alone), tokenizer and model card. Says what goes where, and asks once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="a run's folder, or one that rpg merge wrote")
    add("repository", metavar="org/name", help="where to, on the hub; it is made if it is not there")
    add("--checkpoint", default="best", metavar="best|last|N", help="which of the run's (default: best)")
    add("--public", action="store_true", help="everybody may see it (default: private)")
    add("--update", action="store_true", help="a commit over what the repository has already")
    add("--revision", metavar="BRANCH", help="a branch, made if it is not there (default: main)")
    add("--base", metavar="org/name", help="of an adapter: the model it is for, where that was a folder here")
    add("--yes", action="store_true", help="ask nothing, for scripts")
    parser.set_defaults(run=run_push)


def run_push(args: argparse.Namespace) -> int:
    from ..run.checkpoint import CheckpointError

    try:
        folder, what = _source(Path(args.source), args.checkpoint)
        from ..publish.push import prepare, push

        options = {name: getattr(args, name) for name in ("public", "revision", "update", "base")}
        shipment = prepare(folder, args.repository, **options)
        print(_told(shipment, what), file=sys.stderr)
        if not args.yes and not _agreed():
            print("nothing was pushed", file=sys.stderr)
            return 1
        url = push(shipment, f"{what}, pushed by rpg")
    except (ValueError, OSError, CheckpointError) as error:
        raise Mistake(flat_text(error)) from error
    with printed() as to:
        to.print(url)
    return 0


def _source(path: Path, which: str) -> tuple[Path, str]:
    """The model's folder, and what it is."""
    from ..publish.card import is_ours

    if settings_of(path) is not None:
        checkpoint = checkpoint_folder(path, which, warnings.warn)
        return checkpoint / "model", f"{path.resolve().name}, step {int(checkpoint.name.removeprefix('step-'))}"
    if is_ours(path):
        return path, path.resolve().name
    missing = "is no run, and no model that rpg wrote" if path.exists() else "does not exist"
    raise ValueError(f"{path} {missing}: give a run's folder, or one that rpg merge wrote")


def _told(shipment: Shipment, what: str) -> str:
    """4 files, 3.8 MB, of grpo-1, step 40 → https://huggingface.co/you/name, private, new, as you"""
    from huggingface_hub.constants import ENDPOINT

    seen = "private" if shipment.private else "PUBLIC"
    there = "a commit over what is there" if shipment.exists else "new"
    branch = "" if shipment.revision == "main" else f", branch {shipment.revision}"
    size = f"{len(shipment.files)} files, {amount(shipment.bytes)}B"
    return f"{size}, of {what} → {ENDPOINT}/{shipment.repository}{branch}: {seen}, {there}, as {shipment.user}"


def _agreed() -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError("there is no terminal to ask at: give --yes")
    try:
        return input("push? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
