"""The live panel: progress, held-out accuracy, a grid of curves, as lines of text and style."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..console import clock, fixed, number, percent
from .rows import FAILURES, EvalMetrics, Example, Row, StepTimer, end_of, numbers_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Spans = list[tuple[str, str]]  # text and rich style


BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def sparkline(
    values: list[float], width: int, *, low: float | None = None, high: float | None = None, marks: str = BLOCKS
) -> str:
    """The whole history in at most ``width`` characters, means of equal parts; from low to high, or its own range."""
    n, width = len(values), max(0, width)
    if n > width:
        cuts = [i * n // width for i in range(width + 1)] if width else [0]
        bins = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(cuts)]
    else:
        bins = [[v] if math.isfinite(v) else [] for v in values]
    means = [sum(part) / len(part) if part else None for part in bins]
    heights = [m for m in means if m is not None]
    if not heights:
        return " " * len(means)
    bottom = min(heights) if low is None else low
    span = (max(heights) if high is None else high) - bottom
    top = len(marks) - 1

    def mark(m: float | None) -> str:
        if m is None:
            return " "
        place = (m - bottom) / span if span > 0 and math.isfinite(span) else 0.0
        return marks[min(top, max(0, round(place * top)))]

    return "".join(map(mark, means))


@dataclass(frozen=True)
class Cell:
    """A metric in the panel's grid: its name, its last value, its curve."""

    label: str
    name: str
    form: Callable[[float | None], str] = number
    low: float | None = None
    high: float | None = None


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
LOOK = 4.0  # seconds, at least, that a response can be read
RESPONSE = 3  # lines of it


class Panel:
    """The panel as lines of text and style; it never draws a line wider than the terminal."""

    def __init__(self, title: str, steps: int) -> None:
        self.stage = ""
        self.closed = False
        self.drawn: list[int] = []  # widths of the last frame's lines
        self._title = title
        self._timer = StepTimer(steps)
        self._curves: dict[str, list[float]] = {}
        self._evals: dict[str, tuple[EvalMetrics, EvalMetrics]] = {}  # first and last
        self._row: dict[str, float] = {}
        self._failures = dict.fromkeys(FAILURES, 0.0)
        self._example: tuple[Example, float] | None = None  # a response, and since when it is shown
        self._body: tuple[tuple[int, bool], list[Spans]] | None = None  # drawn again only when there is a new row

    def step(self, row: Row) -> None:
        row = numbers_of(row)
        self._timer.step(row)
        self.add(row)

    def add(self, row: Row) -> None:
        self._timer.done = int(row.get("step", self._timer.done))
        for cell in CELLS:
            if cell.name in row:
                self._curves.setdefault(cell.name, []).append(row[cell.name])
        for e in EvalMetrics.of(row):
            self._evals[e.task] = (self._evals.get(e.task, (e, e))[0], e)
            self._curves.setdefault(f"eval/{e.task}", []).append(e.mean)
        for name in FAILURES:
            self._failures[name] += row.get(name, 0.0)
        self._row.update({name: value for name, value in row.items() if name.startswith("time/")})
        self._body = None

    def response(self, example: Example) -> None:
        now = time.monotonic()
        if self._example is None or now - self._example[1] >= LOOK:
            self._example, self._body = (example, now), None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment
        from rich.style import Style

        width = options.max_width
        lines = self.lines(width, ascii_only=options.ascii_only)
        lines = _shorten(lines, console.height - 1)
        self.drawn = [sum(_cells(text) for text, _ in spans) for spans in lines]
        for i, spans in enumerate(lines):
            if i:
                yield Segment.line()
            yield from (Segment(text, Style.parse(style) if style else None) for text, style in spans)

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
        return [[(encodable(t, "ascii"), style) for t, style in line] for line in lines] if ascii_only else lines

    def _bar(self, width: int, ascii_only: bool) -> Spans:
        """━━━━━━━━╸─────────  42/60  1:12 elapsed, 0:31 left"""
        c = self._timer
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
        if failed := [f"{FAILURES[name]} {count:g}" for name, count in self._failures.items() if count]:
            yield [("   ".join(failed), "red")]
        if self._example is not None:
            yield from _response(self._example[0], width)

    def _held_out(self, task: str, first: EvalMetrics, last: EvalMetrics, width: int, marks: str) -> Spans:
        """held-out mean@8 0.312 → 0.874 [0.851, 0.894]  ▁▃▅▆▇█  pass@8 0.970  arithmetic"""
        arrow = "->" if marks == ASCII else "→"
        label, place = ("held-out", f"  {task}") if len(self._evals) == 1 else (task, "")
        line = _fit([(label, "dim")], LABEL - 1)
        line += [(f" {last.metric} ", "dim"), (f"{first.mean:.3f} {arrow} " if first is not last else "", "")]
        line += [(f"{last.mean:.3f}", "bold green"), (f" {last.interval}", "dim")]
        values = self._curves[f"eval/{task}"]
        rest = width - sum(_cells(text) for text, _ in line) - 2
        for end in (last.passed + place, last.passed, ""):
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
        each = self._timer.seconds_a_step()
        if each is None:
            return ""
        total = self._row.get("time/step", 0.0)
        seconds = {name: self._row.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "train")}
        shares = {name: 100 * part / total for name, part in seconds.items()} if total > 0 else {}
        shown = [f", {name} {share:.0f} %" for name, share in shares.items() if share >= 0.5]
        return f"{number(each)} s/step{''.join(shown)}"


def _response(example: Example, width: int) -> Iterable[Spans]:
    """The prompt's end and its reward on one line, the response on a few: wide characters may cost some of its end."""
    room = max(8, width - LABEL)
    prompt = end_of(example.prompt, max(8, room - len(example.reward) - 2))
    head: Spans = [(f"{'prompt':<{LABEL}}", "dim"), (prompt, "")]
    gap = width - sum(_cells(text) for text, _ in head) - len(example.reward)
    yield [*head, (" " * max(2, gap), ""), (example.reward, "bold")]
    text = end_of(example.response, RESPONSE * room)
    for at in range(0, max(1, len(text)), room):
        yield [(f"{'' if at else 'response':<{LABEL}}", "dim"), (text[at : at + room], "")]


def encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


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
