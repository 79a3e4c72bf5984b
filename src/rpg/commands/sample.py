"""``rpg sample`` and ``rpg chat``: what a model says."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from ..api import sampling_config
from ..console import Mistake, printable
from ..run.config import Config
from ..run.settings import add_flags, given
from ..trust import HELP as TRUST

if TYPE_CHECKING:
    from ..ask.question import Question
    from ..ask.responder import Responder, Sampled

FLAGS = ("task", "device", "dtype", "model_options", "rollout.end_tokens", "rollout.top_k", "rollout.min_p")
SHORT = ("task.name", "task.test")
OPTIONS = ("task", "temperature", "top_p", "max_new_tokens", "checkpoint", "trust")
SUMS = "builtin knows sums: 3 to 6 whole numbers from 1 to 20, with +, - and *, no brackets, nothing above 199"
SAMPLE_EXAMPLES = f"""\
{SUMS}

examples:
  rpg sample builtin "7+3*8-4"                              four responses, each with its log-probability and reward
  rpg sample runs/latest                                    to a held-out problem of the run's task (--seed 1: another)
  rpg sample Qwen/Qwen3-0.6B "Why is the sky blue?" --n 1 --temperature 0
  cat prompt.txt | rpg sample runs/latest - --json"""
CHAT_EXAMPLES = f"""\
/quit or Ctrl-D ends, /new forgets what was said, Ctrl-C stops a response. From a pipe each line is a turn, and is
shown before its answer.
{SUMS}

examples:
  rpg chat runs/latest
  rpg chat Qwen/Qwen3-0.6B --task.system "Answer in one sentence."
  echo "7+3*8-4" | rpg chat builtin"""


def add_sample(commands: Any) -> None:
    parser = _add(
        commands,
        "sample",
        help="responses of a model or a run to a prompt",
        usage="rpg sample MODEL_OR_RUN [PROMPT | -] [--n N] [--temperature T] [--checkpoint best|last|N] [--json] "
        "[--section.key VALUE …]",
        description="Responses to one prompt, put as the run's task puts its problems, with log-probabilities and, "
        "where the task knows the answer, rewards.",
        epilog=SAMPLE_EXAMPLES,
    )
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="-: read from stdin; default: a held-out problem of the task")
    add("--n", type=int, default=4, metavar="N", help="responses (default 4)")
    add("--answer", metavar="TEXT", help="what is right, where the task does not know it")
    add("--raw", action="store_true", help="the prompt as it is: no template, no chat template")
    add("--json", action="store_true", help="as JSON")
    add_flags(parser, Config, FLAGS, SHORT)
    parser.set_defaults(run=run_sample)


def add_chat(commands: Any) -> None:
    parser = _add(
        commands,
        "chat",
        help="talk to a model or a run",
        usage="rpg chat MODEL_OR_RUN [--temperature T] [--checkpoint best|last|N] [--section.key VALUE …]",
        description="A conversation in the model's chat template. A model that has none answers each line by itself, "
        "put as the run's task puts its problems.",
        epilog=CHAT_EXAMPLES,
    )
    add_flags(parser, Config, FLAGS, SHORT)
    parser.set_defaults(run=run_chat)


def _add(commands: Any, name: str, **texts: str) -> Any:
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    add = parser.add_argument
    add("model", metavar="MODEL_OR_RUN", help="builtin, a Hugging Face folder, a hub id, or a run's folder")
    add("--task", metavar="NAME_OR_FILE", help="put the prompt as this task does (default: the run's own)")
    add("--temperature", type=float, metavar="T", help="default: the run's, else 1; 0 is greedy")
    add("--top-p", type=float, metavar="P", help="default: the run's, else 1")
    add("--max-new-tokens", type=int, metavar="N", help="default: the run's, else what rpg train takes")
    add("--seed", type=int, default=0, metavar="N", help="decides every token (default 0)")
    add("--checkpoint", default="best", metavar="best|last|N", help="which of a run's (default best)")
    add("--trust", action="store_true", help=TRUST)
    return parser


def _loaded(args: argparse.Namespace) -> tuple[Responder, str | None]:
    """The model, and the task that prompts are put like."""
    for name, least in (("n", 1), ("seed", 0)):
        if (value := getattr(args, name, least)) < least:
            raise ValueError(f"--{name} must be at least {least}; got {value}")
    options = {name: getattr(args, name) for name in OPTIONS}
    config, temperature, task = sampling_config(args.model, flags=given(args, Config), warn=_say, **options)
    _say(f"loading {args.model}")
    from ..ask.responder import Responder  # imports torch, which takes seconds

    return Responder(config, temperature=temperature), task


def _say(text: str) -> None:
    """Beside what the model says."""
    print(f"rpg: {printable(text)}", file=sys.stderr, flush=True)


def on_terminal(text: str) -> str:
    """A model's text, which may hold anything, safe to print; its lines and tabs stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


# ---- rpg sample ------------------------------------------------------------------------------------------------------


def run_sample(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.prompt == "-" and not (prompt if args.raw else prompt.strip()):
        raise Mistake("-: stdin is empty, there is no prompt")
    if args.prompt == "-" and not args.raw:
        prompt = prompt.removesuffix("\n")
    if prompt is None and _waiting(sys.stdin):
        _say("stdin is not read: give - to read the prompt from stdin")
    try:
        responder, task = _loaded(args)
        from ..ask.question import question

        asked = question(responder.config, None if args.raw else task, prompt, args.answer, args.seed, _say)
        responses = responder.ask(asked, args.n, args.seed, raw=args.raw)
    except ValueError as error:
        raise Mistake(str(error)) from error
    if args.json:
        rows = [asdict(response) for response in responses]
        print(json.dumps({"model": args.model, "prompt": asked.problem.prompt, "responses": rows}, indent=1))
    else:
        _show(asked, responses, given_prompt=prompt is not None)
    return 0


def _waiting(file: IO[str]) -> bool:
    """Whether a pipe or a file has something to read. Nothing is taken from it, and nothing waited for."""
    left = bytearray(4)
    try:
        import fcntl
        import termios

        if not file.isatty():
            fcntl.ioctl(file.fileno(), termios.FIONREAD, left)
    except (ImportError, AttributeError, OSError, ValueError):  # Windows, closed, or nothing that has bytes
        return False
    return any(left)


def _show(asked: Question, responses: list[Sampled], given_prompt: bool) -> None:
    if not given_prompt:
        print(on_terminal(asked.problem.prompt.rstrip()), end="\n\n")
    alike: dict[tuple[object, ...], list[int]] = {}  # the places of equal responses
    for place, response in enumerate(responses):
        alike.setdefault((response.text, response.tokens, response.finished, response.reward), []).append(place)
    for first, *others in alike.values():
        response = responses[first]
        facts = [f"×{1 + len(others)}"] if others else []
        facts += [f"log-probability {response.logp:.2f}", f"{response.tokens} tokens"]
        facts += [] if response.finished else ["cut"]
        facts += [] if response.reward is None else [f"reward {response.reward:g}"]
        print(f"── {first + 1}/{len(responses)}  {'  '.join(facts)}\n{on_terminal(response.text)}\n")


# ---- rpg chat --------------------------------------------------------------------------------------------------------


def run_chat(args: argparse.Namespace) -> int:
    try:
        responder, task = _loaded(args)
        conversation = responder.config.task.chat is not False and responder.policy.chats
    except ValueError as error:
        raise Mistake(str(error)) from error
    if not conversation:
        _say("no chat template: each line is a prompt by itself")
    if sys.stdin.isatty():
        _say("/quit or Ctrl-D ends, /new forgets what was said, Ctrl-C stops a response")
    said: list[dict[str, str]] = []
    for turn, text in enumerate(_lines()):
        if text == "/new":
            said = []
            continue
        if not sys.stdin.isatty():
            print(f"> {on_terminal(text)}", flush=True)
        try:
            if conversation:
                said.append({"role": "user", "content": text})
                ids = responder.encode_chat(said)
            else:
                from ..ask.question import question

                ids = responder.encode(question(responder.config, task, text, None, 0, _say).problem)
            reply = _reply(responder.reply(ids, args.seed, turn))
        except ValueError as error:
            _say(f"{error}{' (/new forgets what was said)' if len(said) > 1 else ''}")
            said = said[:-1]
            continue
        said.append({"role": "assistant", "content": reply})
    return 0


def _lines() -> Iterator[str]:
    """What the user types, or a pipe gives, line by line until /quit."""
    with contextlib.suppress(EOFError):
        if terminal := sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  input() then has a history and moves within the line
        while (line := input("> " if terminal else "").strip()) not in ("/quit", "/exit"):
            if line:
                yield line
        return
    if sys.stdin.isatty():
        print()


def _reply(pieces: Iterator[str]) -> str:
    """Shown as it comes. Ctrl-C ends it, and what was said until then counts."""
    reply = ""
    try:
        for piece in pieces:
            reply += piece
            print(on_terminal(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    print(flush=True)
    return reply
