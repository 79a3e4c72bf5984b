"""What users read: mistakes in one line, printing, numbers as text, HTML elements. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100


class Mistake(Exception):
    """The user's; its text is one line for stderr."""


@contextmanager
def one_line(prefix: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors of this kind into a Mistake of one line."""
    try:
        yield
    except kind as error:
        raise Mistake(f"{prefix}{flat_text(error)}") from error


def describe(error: BaseException) -> str:
    """KeyError: 'x', on one line of bounded length, whatever the exception's own __str__ does."""
    try:
        text = " ".join(str(error)[:1000].split())
    except Exception:
        text = "(no message: its __str__ raised)"
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def flat_text(error: BaseException) -> str:
    """All of an error's text on one line; where it has none, its kind."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for errors that go on for pages; where it has none, its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def printable(text: str) -> str:
    """Somebody else's text on one line of ours: what would move the cursor, turn the direction of writing or cannot be
    encoded is shown as an escape, \\x1b. Backslashes stay as they are, as LaTeX is full of them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


# Control characters (C0, DEL, C1), marks and overrides of direction, Unicode's line breaks, half surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """What was probably meant, among these names: the same letters in another order, else spelled nearly so; in
    capitals or not."""
    by_lower = {known.lower(): known for known in reversed(tuple(names))}
    same_letters = [known for known in by_lower if sorted(known) == sorted(name.lower())]
    near = same_letters or difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return by_lower[near[0]] if near else None


def choose(what: str, name: str, names: Iterable[str], other_names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The message for a name that is not among these, with the nearest that is. ``other_names``: what others call
    them, separated by spaces."""
    names = sorted(names)
    called = (ours for ours, others in other_names.items() if ours in names and name.lower() in others.split())
    near = next(called, None) or nearest(name, names)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(names)}"


def one_of(what: str, name: str, names: Iterable[str]) -> None:
    names = tuple(names)
    if name not in names:
        raise ValueError(choose(what, str(name), names))


def install(requirement: str) -> str:
    """The command that installs this from where the user is: into the Python that runs, rpg-rl from where it came."""
    python = Path(sys.executable)
    pip = shutil.which("pip")
    if pip and Path(pip).parent == python.parent:
        command = "pip install"
    elif find_spec("pip") is None and shutil.which("uv"):
        command = f"uv pip install --python {shlex.quote(_from_here(python))}"
    else:
        command = f"{shlex.quote(_from_here(python))} -m pip install"
    name, bracket, extras = requirement.partition("[")
    if name != "rpg-rl":
        return f"{command} {shlex.quote(requirement)}"
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"{command} -e {shlex.quote(_from_here(clone) + bracket + extras)}"
    return f"{command} {shlex.quote(_came_from(requirement))}"


TRAIN = (  # what the extra [train] brings, by the names of its imports
    *("transformers", "safetensors", "tokenizers", "huggingface_hub", "math_verify", "latex2sympy2_extended"),
    *("sympy", "datasets", "pyarrow", "yaml", "tensorboard"),
)


def more_than_core() -> str | None:
    """Why this needs more than `pip install rpg-rl` has brought; None, if it is there."""
    if all(name in sys.modules or find_spec(name) for name in TRAIN):
        return None
    return f"needs more than the core: {install('rpg-rl[train]')}"


def namesake() -> str | None:
    """PyPI's rpg is somebody else's tool, with the same import name and command: what to do where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        theirs = version("rpg")
    except PackageNotFoundError:
        return None
    again = f"{install('rpg-rl')} --force-reinstall --no-deps"
    return f"another package, rpg {theirs}, has the same files and command: pip uninstall rpg, then {again}"


def _from_here(path: Path) -> str:
    """Relative to the working directory, where it is inside."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _came_from(requirement: str) -> str:
    """Of ours, as pip finds it again: a folder or an address that it was installed from, else its name."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("rpg-rl").read_text("direct_url.json") or "{}")
        url = str(origin["url"])
    except (PackageNotFoundError, OSError, ValueError, KeyError):
        return requirement
    system = origin.get("vcs_info", {}).get("vcs")
    return f"{requirement} @ {system}+{url}" if system else f"{requirement} @ {url}"


def own_command() -> str:
    """How ``rpg`` is called from where the user is: by its name, or by its path where that is not on PATH."""
    if shutil.which("rpg"):
        return "rpg"
    python = Path(sys.executable)
    script = python.with_name("rpg")
    return shlex.quote(_from_here(script)) if script.is_file() else f"{shlex.quote(_from_here(python))} -m rpg"


def brief(part: Any) -> str:
    """A dataclass by what differs from its defaults: PolicyLoss(divergence='none', beta=0.0)"""
    shown = (f for f in fields(part) if f.repr and (f.default is MISSING or getattr(part, f.name) != f.default))
    return f"{type(part).__name__}({', '.join(f'{f.name}={getattr(part, f.name)!r}' for f in shown)})"


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path.is_dir():
        raise Mistake(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise Mistake(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Mistake(f"cannot write {path}: permission denied")


def several() -> bool:
    """Whether torchrun has started this process and others. (Without an import of torch, which takes seconds.)"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def first_of_launch() -> bool:
    """Whether this process is the one that speaks to the user."""
    return not several() or os.environ.get("RANK") == "0"


def console() -> Console:
    """The terminal at its own width; a pipe at 100 columns, without colour."""
    from rich.console import Console

    terminal = Console(highlight=False, markup=False, emoji=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PIPE_WIDTH)


@contextmanager
def printed() -> Iterator[Console]:
    """A console whose output reaches stdout at the end, without the blanks that tables leave at the ends of lines."""
    to = console()
    with to.capture() as captured:
        yield to
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


# ---- output that nobody reads ----------------------------------------------------------------------------------------


def reaches(file: IO[str] | None, write: Callable[[], object]) -> bool:
    """Whether it could be written: not to a pipe whose reader is gone, a full disk or a terminal that hung up."""
    if getattr(file, "closed", False):
        return False
    try:
        write()
    except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
        return False
    return True


def complain(text: str) -> None:
    """A line on stderr, if that can still be written."""
    reaches(sys.stderr, lambda: print(text, file=sys.stderr, flush=True))


def discard(file: IO[str]) -> None:
    """From here on it leads nowhere: what is left in its buffer is no error when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def open_streams() -> None:
    """Streams that were closed (>&-) lead nowhere, and no file of ours takes their places."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


# ---- numbers as text -------------------------------------------------------------------------------------------------


def number(x: float | None) -> str:
    """At most 6 characters, 7 with a sign: 0.0031, 3.1e-5, 12.3, 5120, 48.2k; what is missing is -"""
    if x is None:
        return "-"
    if not math.isfinite(x):
        return str(x)
    size = abs(x)
    if size == 0 or 1e-3 <= size < 1:
        return f"{x:.4f}" if 0 < size < 0.1 else f"{x:.3f}"
    if size < 1e-3:
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 1e5:
        return f"{x:.2f}" if size < 10 else f"{x:.1f}" if size < 1000 else f"{x:.0f}"
    for unit, letter in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if size < 999.5 * unit:
            return f"{x / unit:.3g}{letter}"
    return f"{x:.0e}"


def fixed(places: int) -> Callable[[float | None], str]:
    """With this many decimals, where that tells something; else as ``number`` has it."""
    return lambda x: number(x) if x is None or not abs(x) < 1e4 else f"{x:.{places}f}"


def two_digits(x: float) -> str:
    """0.067, 6.7, 120"""
    if x == 0 or not math.isfinite(x):
        return f"{x:.0f}"
    return f"{x:.{max(0, 1 - math.floor(math.log10(abs(x))))}f}"


def amount(x: float | None) -> str:
    """Of things that are counted: 12, 1.23 k, 30.4 M, 4.02 B"""
    if x is None:
        return "–"
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(x) >= 0.9995 * size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def steps_text(count: int) -> str:
    """1 step, 12 steps"""
    return f"{count} step{'' if count == 1 else 's'}"


def percent(share: float | None) -> str:
    """12.3 %"""
    if share is None or not math.isfinite(share):
        return "–" if share is None else str(share)
    return f"{100 * share:.1f} %"


def percent_two_digits(share: float | None) -> str:
    """0.67 %, 6.7 %, 67 %; 0 % below 0.005 %"""
    if share is None or math.isnan(share):
        return "–" if share is None else "nan"
    return "0 %" if share < 5e-5 else f"{two_digits(100 * share)} %"


def gb(count: float) -> str:
    """Bytes in GB, without the unit: 0.03, 1,234.5"""
    return f"{count / 1e9:,.1f}" if count >= 1e8 else f"{count / 1e9:.2f}"


def clock(seconds: float) -> str:
    """While a run goes: 1:02, 1:02:03, 3d 4h"""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def duration(seconds: float | None) -> str:
    """Of what is over: 4.2 s, 1 min 1 s, 2 h 25 min"""
    if seconds is None:
        return "–"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if minutes:
        return f"{hours} h {m} min" if hours else f"{m} min {s} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{s} s"


def estimated_duration(seconds: float) -> str:
    """In one unit, as exact as an estimate is: 3.2 s, 14 min, 4.1 h, 12 days"""
    if seconds < 0.05:
        return "0 s" if seconds < 0.0005 else f"{1e3 * seconds:.0f} ms"
    units = ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"), (math.inf, 86400, "days"))
    size, name = next((size, name) for limit, size, name in units if seconds < limit)
    return f"{seconds / size:.{1 if seconds / size < 10 else 0}f} {name}"


# ---- HTML ------------------------------------------------------------------------------------------------------------


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element; attributes are escaped, what is inside is HTML already. ``class_`` is class, ``a_b`` is a-b."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def unbroken(text: str) -> str:
    """Escaped, with numbers that stay on one line."""
    return escape(text.replace(" %", "\u00a0%").replace("–", "\u2060–\u2060"))
