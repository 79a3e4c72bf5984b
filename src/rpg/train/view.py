"""What people see while a run trains: a live panel on a terminal, plain lines elsewhere. Never why a run stops."""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal, Self

from ..names import one_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.segment import Segment

Row = Mapping[str, float]
Style = Literal["info", "warning", "error"]
Spans = list[tuple[str, str]]  # text and rich style
KINDS = ("auto", "live", "plain", "none")
FRAME = 0.4  # seconds between two frames
EVAL = re.compile(r"eval/(.+)/mean@(\d+)")


def make_view(kind: str, *, title: str, steps: int, console: Console | None = None) -> View:
    """auto: live on a terminal, else plain; live without a terminal is plain too. To stdout, or to ``console``."""
    one_of("log.view", kind, KINDS)
    if kind == "none":
        return View()
    from rich.console import Console

    # FORCE_COLOR makes rich take a pipe for a terminal
    terminal = sys.stdout.isatty() if console is None else console.is_terminal
    console = console or Console(highlight=False)
    moves = terminal and console.is_interactive and not console.is_dumb_terminal and not console.is_jupyter
    if moves and (kind == "live" or not os.environ.get("CI")):
        return LiveView(title, steps, console)
    return PlainView(title, steps, console)


class View:
    """Shows nothing but warnings and errors, on stderr. A context manager, like the views below."""

    def stage(self, name: str) -> None:
        """What the run is doing: "rollout 212/256". Costs nothing, call it as often as you like."""

    def step(self, row: Row) -> None:
        """A row of metrics.jsonl. Names may be missing."""

    def history(self, rows: Iterable[Row]) -> None:
        """Rows from before a resume: curves and first values start with them, clocks do not."""

    def message(self, text: str, style: Style = "info") -> None:
        """A line that stays."""
        if style != "info":
            _tell(sys.stderr, lambda: print(f"{style}: {text}", file=sys.stderr, flush=True))

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _tell(file: IO[str], write: Callable[[], None]) -> bool:
    """False once nobody reads any more (a closed pipe, a terminal that hung up): the run goes on without."""
    if getattr(file, "closed", False):
        return False
    try:
        write()
    except OSError:
        return False
    return True


def _printable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """A row as it was written: null is what was not finite, and a list names those."""
    found = {name: math.nan if value is None else value for name, value in row.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """1:02, 1:02:03, 3d 4h"""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


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


def percent(x: float | None) -> str:
    return number(x) if x is None or not math.isfinite(x) else f"{100 * x:.1f} %"


BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def sparkline(
    values: list[float], width: int, *, low: float | None = None, high: float | None = None, marks: str = BLOCKS
) -> str:
    """The whole history in at most ``width`` characters, means of equal parts; from low to high, or its own range."""
    n, width = len(values), max(0, width)
    if n > width:
        cuts = [i * n // width for i in range(width + 1)] if width else [0]
        parts = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(cuts)]
    else:
        parts = [[v] if math.isfinite(v) else [] for v in values]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [m for m in means if m is not None]
    if not known:
        return " " * len(means)
    bottom = min(known) if low is None else low
    span = (max(known) if high is None else high) - bottom
    top = len(marks) - 1

    def mark(m: float | None) -> str:
        if m is None:
            return " "
        place = (m - bottom) / span if span > 0 and math.isfinite(span) else 0.0
        return marks[min(top, max(0, round(place * top)))]

    return "".join(map(mark, means))


class Evaluation:
    """One task's numbers in a row."""

    def __init__(self, task: str, k: str, row: Row) -> None:
        name = f"eval/{task}/mean@{k}"
        self.task, self.metric, self.mean = task, f"mean@{k}", row[name]
        self.low, self.high = row.get(f"{name}_low"), row.get(f"{name}_high")
        passed = re.compile(rf"eval/{re.escape(task)}/pass@(\d+)")
        found = {int(match[1]): key for key in row if (match := passed.fullmatch(key))}
        self.passed = (f"pass@{max(found)}", row[found[max(found)]]) if found else None

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"

    @staticmethod
    def of(row: Row) -> list[Evaluation]:
        return [Evaluation(match[1], match[2], row) for name in row if (match := EVAL.fullmatch(name))]


class Clock:
    """Time left: a median of recent steps, so that one slow step changes little, and the evaluations still to come."""

    RECENT = 15

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.started = self.last = time.monotonic()
        self._steps: list[float] = []
        self._evals: list[float] = []
        self._evaluated: list[int] = []

    def step(self, row: Row, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        took, self.last = now - self.last, now
        self.done = int(row.get("step", self.done + 1))
        spent = row.get("time/eval", 0.0)
        if self.done and took > 0:
            self._steps = [*self._steps, max(0.0, took - spent)][-self.RECENT :]
        if any(EVAL.fullmatch(name) for name in row):
            self._evaluated = [*self._evaluated, self.done][-2:]
            self._evals = [*self._evals, spent][-5:]

    def seconds_a_step(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def left(self, now: float | None = None) -> float | None:
        each = self.seconds_a_step()
        if each is None:
            return None
        todo = max(0, self.steps - self.done)
        seconds = todo * each
        if todo and len(self._evaluated) == 2:
            every = max(1, self._evaluated[1] - self._evaluated[0])
            seconds += math.ceil(todo / every) * statistics.median(self._evals)
        now = time.monotonic() if now is None else now
        return max(0.0, seconds - (now - self.last)) if todo else 0.0


# ---- plain -----------------------------------------------------------------------------------------------------------

COLUMNS: tuple[tuple[str, str, int, Callable[[float | None], str]], ...] = (
    ("solved", "reward/solved", 5, fixed(3)),
    ("reward", "reward/mean", 6, fixed(3)),
    ("kl", "kl/old", 6, number),
    ("entropy", "entropy", 5, fixed(3)),
    ("len", "length/mean", 5, fixed(1)),
    ("tok/s", "speed/tokens_per_s", 5, number),
)


class PlainView(View):
    """A line a step, each flushed; of long runs some 60 lines, and one a minute."""

    LINES, SECONDS = 60, 60.0

    def __init__(self, title: str, steps: int, console: Console) -> None:
        self._title, self._console = title, console
        self._clock = Clock(steps)
        self._every = max(1, math.ceil(steps / self.LINES))
        self._shown = self._start = 0
        self._at = time.monotonic()
        self._open = True

    def __enter__(self) -> Self:
        self._print(self._title, "bold")
        return self

    def history(self, rows: Iterable[Row]) -> None:
        self._start = max((int(row.get("step", 0)) for row in rows), default=0)
        self._shown = self._clock.done = self._start

    def step(self, row: Row) -> None:
        row, now, timer = _numbers(row), time.monotonic(), self._clock
        timer.step(row, now)
        trained = any(name in row for _, name, *_ in COLUMNS)
        due = timer.done - self._shown >= self._every or now - self._at >= self.SECONDS
        first_or_last = timer.done in (self._start + 1, timer.steps)
        found = Evaluation.of(row)
        trouble = [f"{text} {row[name]:g}" for name, text in TROUBLE.items() if row.get(name)]
        if trained and (due or first_or_last or found or trouble):
            self._shown, self._at = timer.done, now
            self._print(self._place("step") + "".join(self._cells(row, trouble)))
        for e in found:
            passed = f"  {e.passed[0]} {e.passed[1]:.3f}" if e.passed else ""
            self._print(
                f"{self._place('eval')}  {e.task} {e.metric} {e.mean:.3f} {e.interval}".rstrip() + passed, "bold"
            )

    def _place(self, word: str) -> str:
        steps = str(self._clock.steps)
        return f"{word} {self._clock.done:>{len(steps)}}/{steps}"

    def _cells(self, row: Row, trouble: list[str]) -> Iterable[str]:
        for label, name, width, form in COLUMNS:
            yield f"  {label} {form(row.get(name)):>{width}}"
        left = self._clock.left()
        yield f"  left {'-' if left is None else clock(left)}"
        for text in trouble:
            yield f"  {text}"

    def message(self, text: str, style: Style = "info") -> None:
        self._print(_labelled(text, style), COLOURS[style])

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        def write() -> None:
            self._console.print(Text(_printable(text, self._console.encoding), style=style), soft_wrap=True)
            self._console.file.flush()

        self._open = self._open and _tell(self._console.file, write)


TROUBLE = {"reward/failed": "failed rewards", "skipped": "skipped steps"}
COLOURS: dict[Style, str] = {"info": "", "warning": "yellow", "error": "bold red"}


def _labelled(text: str, style: Style) -> str:
    return text if style == "info" else f"{style}: {text}"


# ---- live ------------------------------------------------------------------------------------------------------------


class Cell:
    """A metric in the panel's grid: its name, its last value, its curve."""

    def __init__(
        self,
        label: str,
        name: str,
        form: Callable[[float | None], str] = number,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        self.label, self.name, self.form, self.low, self.high = label, name, form, low, high


# pairs at 80 columns, triples at 120: both read well row by row
CELLS = (
    Cell("solved", "reward/solved", fixed(3), 0.0, 1.0),
    Cell("reward", "reward/mean", fixed(3)),
    Cell("KL", "kl/old"),
    Cell("entropy", "entropy", fixed(3), low=0.0),
    Cell("clip low", "clip/low", percent, low=0.0),
    Cell("clip high", "clip/high", percent, low=0.0),
    Cell("ESS", "ess", fixed(3), 0.0, 1.0),
    Cell("grad", "grad_norm", low=0.0),
    Cell("length", "length/mean", fixed(1), low=0.0),
    Cell("tokens/s", "speed/tokens_per_s", low=0.0),
    Cell("cut off", "length/truncated", percent, low=0.0),
    Cell("KL ref", "kl/ref"),
)
LABEL, VALUE, GAP = 9, 7, 3
EVALS = 4  # tasks shown


class LiveView(View):
    """A panel at the bottom of a terminal, redrawn every 0.4 seconds by a thread of its own."""

    def __init__(self, title: str, steps: int, console: Console) -> None:
        self._console = console
        self._panel = Panel(title, steps)
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._open = True
        self._width = console.width

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._frame)
        start = self._live.start
        self._open = _tell(self._console.file, lambda: start(refresh=True))
        self._thread = threading.Thread(target=self._draw, name="rpg-view", daemon=True)
        self._thread.start()
        return self

    def stage(self, name: str) -> None:
        self._panel.stage = name

    def step(self, row: Row) -> None:
        self._panel.step(row)

    def history(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._panel.add(_numbers(row))

    def message(self, text: str, style: Style = "info") -> None:
        from rich.text import Text

        line = Text(_printable(_labelled(text, style), self._console.encoding), COLOURS[style])
        self._open = self._open and _tell(self._console.file, lambda: self._console.print(line))

    def close(self) -> None:
        try:
            self._closing.set()
            if self._thread is not None:
                self._thread.join()
        finally:  # a second Ctrl-C must not leave the cursor hidden
            self._panel.closed = True
            if self._live is not None:
                _tell(self._console.file, self._live.stop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._panel.stage = "" if kind is None else "stopped"
        self.close()

    def _draw(self) -> None:
        while self._open and self._live is not None and not self._closing.wait(FRAME):
            self._open = _tell(self._console.file, self._live.refresh)

    def _frame(self) -> Panel:
        """The panel. Narrowed, a terminal has wrapped the last frame's lines, and more rows must be erased."""
        width = self._console.width
        if self._live is not None and width < self._width and (shape := self._live._live_render._shape):
            rows = sum(max(1, math.ceil(used / width)) for used in self._panel.drawn)
            self._live._live_render._shape = (shape[0], rows)
        self._width = width
        return self._panel


class Panel:
    """The panel as lines of text and style; it never draws a line wider than the terminal."""

    def __init__(self, title: str, steps: int) -> None:
        self.stage = ""
        self.closed = False
        self.drawn: list[int] = []  # widths of the last frame's lines
        self._title = title
        self._clock = Clock(steps)
        self._curves: dict[str, list[float]] = {}
        self._evals: dict[str, tuple[Evaluation, Evaluation]] = {}  # first and last
        self._row: dict[str, float] = {}
        self._trouble = dict.fromkeys(TROUBLE, 0.0)
        self._body: tuple[tuple[int, bool], list[Spans]] | None = None  # drawn again only when there is a new row

    def step(self, row: Row) -> None:
        row = _numbers(row)
        self._clock.step(row)
        self.add(row)

    def add(self, row: Row) -> None:
        self._clock.done = int(row.get("step", self._clock.done))
        for cell in CELLS:
            if cell.name in row:
                self._curves.setdefault(cell.name, []).append(row[cell.name])
        for e in Evaluation.of(row):
            self._evals[e.task] = (self._evals.get(e.task, (e, e))[0], e)
            self._curves.setdefault(f"eval/{e.task}", []).append(e.mean)
        for name in TROUBLE:
            self._trouble[name] += row.get(name, 0.0)
        self._row.update({name: value for name, value in row.items() if name.startswith("time/")})
        self._body = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        width = options.max_width
        lines = self.lines(width, ascii_only=options.ascii_only)
        lines = _shorten(lines, console.height - 1)
        self.drawn = [sum(_cells(text) for text, _ in spans) for spans in lines]
        for number, spans in enumerate(lines):
            if number:
                yield Segment.line()
            yield from (_segment(text, style) for text, style in spans)

    def lines(self, width: int, *, ascii_only: bool = False) -> list[Spans]:
        key = (width, ascii_only)
        if self._body is None or self._body[0] != key:
            self._body = (key, list(self._metrics(width - 4, ascii_only)))
        box = "++++-|" if ascii_only else "╭╮╰╯─│"
        inside = [self._bar(width - 4, ascii_only), *self._body[1]]
        framed = [[(f"{box[5]} ", "dim"), *_fit(spans, width - 4), (f" {box[5]}", "dim")] for spans in inside]
        top = _border(box[0], box[4], box[1], width, (self._title, "bold"), ("", ""))
        bottom = _border(box[2], box[4], box[3], width, (self.stage, "cyan"), (self._shares(), "dim"))
        lines = [top, *framed, bottom]
        return [[(_printable(t, "ascii"), style) for t, style in line] for line in lines] if ascii_only else lines

    def _bar(self, width: int, ascii_only: bool) -> Spans:
        """━━━━━━━━╸─────────  42/60  1:12 elapsed, 0:31 left"""
        c = self._clock
        now = time.monotonic()
        left = c.left(now)
        times = f"{clock((c.last if self.closed else now) - c.started)} elapsed"
        if not self.closed and left is not None:
            times += f", {clock(left)} left" if c.done < c.steps else ""
        text = f"  {c.done}/{c.steps}  {times}"
        room = max(4, width - _cells(text))
        full, rest = ("=", "-") if ascii_only else ("━", "─")
        ticks = round(room * min(1.0, c.done / max(1, c.steps)))
        return [
            (full * ticks, "green"),
            (rest * (room - ticks), "dim"),
            (f"  {c.done}/{c.steps}", "bold"),
            (f"  {times}", ""),
        ]

    def _metrics(self, width: int, ascii_only: bool) -> Iterable[Spans]:
        marks = ASCII if ascii_only else BLOCKS
        for task, (first, last) in list(self._evals.items())[:EVALS]:
            yield self._held_out(task, first, last, width, marks)
        columns = 3 if width >= 106 else 2 if width >= 52 else 1
        room = (width - GAP * (columns - 1)) // columns
        shown = [cell for cell in CELLS if cell.name in self._curves]
        if len(shown) > 2 and len(shown) % columns == 1:
            shown = shown[: len(shown) // columns * columns]  # no row with a lonely cell
        for i in range(0, len(shown), columns):
            line: Spans = []
            for cell in shown[i : i + columns]:
                line += [(" " * GAP, "")] if line else []
                line += _fit(self._cell(cell, room, marks), room)
            yield line
        if trouble := [f"{TROUBLE[name]} {count:g}" for name, count in self._trouble.items() if count]:
            yield [("   ".join(trouble), "red")]

    def _held_out(self, task: str, first: Evaluation, last: Evaluation, width: int, marks: str) -> Spans:
        """held-out mean@8 0.312 → 0.874 [0.851, 0.894]  ▁▃▅▆▇█  pass@8 0.970  arithmetic"""
        arrow = "->" if marks == ASCII else "→"
        label, place = ("held-out", f"  {task}") if len(self._evals) == 1 else (task, "")
        line = _fit([(label, "dim")], LABEL - 1)
        line += [(f" {last.metric} ", "dim"), (f"{first.mean:.3f} {arrow} " if first is not last else "", "")]
        line += [(f"{last.mean:.3f}", "bold green"), (f" {last.interval}", "dim")]
        passed = f"  {last.passed[0]} {last.passed[1]:.3f}" if last.passed else ""
        values = self._curves[f"eval/{task}"]
        rest = width - sum(_cells(text) for text, _ in line) - 2
        for end in (passed + place, passed, ""):
            room = rest - _cells(end)
            if room >= min(12, len(values)) or not end:
                curve = sparkline(values, room, low=0.0, high=1.0, marks=marks)
                return [*line, ("  ", ""), (f"{curve:<{max(0, room)}}", "green"), (end, "dim")]
        return line

    def _cell(self, cell: Cell, width: int, marks: str) -> Spans:
        values = self._curves[cell.name]
        curve = sparkline(values, width - LABEL - VALUE - 2, low=cell.low, high=cell.high, marks=marks)
        return [
            (f"{cell.label:<{LABEL}}", "dim"),
            (f"{cell.form(values[-1]):>{VALUE}}", "bold"),
            ("  ", ""),
            (curve, "cyan"),
        ]

    def _shares(self) -> str:
        """Where the last step's time went: 1.20 s/step, rollout 62 %, train 35 %"""
        each = self._clock.seconds_a_step()
        if each is None:
            return ""
        total = self._row.get("time/step", 0.0)
        parts = {name: self._row.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "train")}
        shares = {name: 100 * part / total for name, part in parts.items()} if total > 0 else {}
        shown = [f", {name} {share:.0f} %" for name, share in shares.items() if share >= 0.5]
        return f"{number(each)} s/step{''.join(shown)}"


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _fit(spans: Spans, width: int) -> Spans:
    """Exactly this wide: cut, or filled with spaces."""
    from rich.cells import set_cell_size

    fitted: Spans = []
    for text, style in spans:
        size = min(_cells(text), width)
        fitted.append((set_cell_size(text, size), style))
        width -= size
    return [*fitted, (" " * width, "")]


def _border(left: str, line: str, right: str, width: int, start: tuple[str, str], end: tuple[str, str]) -> Spans:
    """╭─ title ───────── more ─╮; ``end`` is left away where both do not fit."""
    room = width - 4
    first, last = " ".join(start[0].split()), end[0]
    if _cells(first) > room - 2:
        first = _fit([(first, "")], max(0, room - 3))[0][0].rstrip() + ("…" if line == "─" else "~")
    if _cells(first) + _cells(last) + 6 > room:
        last = ""
    first, last = f" {first} " if first else "", f" {last} " if last else ""
    fill = line * (room - _cells(first) - _cells(last))
    return [(left + line, "dim"), (first, start[1]), (fill, "dim"), (last, end[1]), (line + right, "dim")]


def _shorten(lines: list[Spans], height: int) -> list[Spans]:
    """A terminal of few rows: the frame, the bar and as many metrics as fit."""
    return lines if len(lines) <= height else [*lines[: max(1, height - 1)], lines[-1]][: max(1, height)]


def _segment(text: str, style: str) -> Segment:
    from rich.segment import Segment
    from rich.style import Style

    return Segment(text, Style.parse(style) if style else None)
