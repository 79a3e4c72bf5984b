"""What people see while a run trains: a live panel on a terminal, plain lines elsewhere. Never why a run stops."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..console import clock, complain, fixed, number, one_of, reaches
from .panel import Panel, encodable
from .rows import FAILURES, EvalMetrics, Example, Row, StepTimer, numbers_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from .config import Config

Style = Literal["info", "warning", "error"]
KINDS = ("auto", "live", "plain", "none")
FRAME = 0.4  # seconds between two frames


def opening(config: Config, first: bool, before: str = "") -> View:
    """The view of a run, which says at once what is being loaded: ``before``, and the task. The model follows when the
    settings are known to be right."""
    if not first:
        return Mute()
    view = make_view(config.log.view, title=title_of(config), steps=config.steps)
    view.loading = f"loading {before}the task {config.task.name} …"
    return view


def title_of(config: Config) -> str:
    return f"{config.algorithm} · {config.model} · {config.task.name} · seed {config.seed}"


def make_view(kind: str, *, title: str, steps: int, console: Console | None = None) -> View:
    """auto: live on a terminal, else plain; live without a terminal is plain too. To stdout, or to ``console``."""
    one_of("log.view", kind, KINDS)
    if kind == "none":
        return View()
    from rich.console import Console

    # FORCE_COLOR makes rich take a pipe for a terminal
    terminal = console.is_terminal if console is not None else sys.stdout is not None and sys.stdout.isatty()
    console = console or Console(highlight=False)
    moves = terminal and console.is_interactive and not console.is_dumb_terminal and not console.is_jupyter
    if moves and (kind == "live" or (kind == "auto" and not os.environ.get("CI"))):
        return LiveView(title, steps, console)
    return PlainView(title, steps, console)


class View:
    """Shows nothing but warnings and errors, on stderr. A context manager, like the views below; one that is open may
    be entered again."""

    loading = ""  # what happens from the moment that it opens until the first row

    def stage(self, name: str) -> None:
        """What the run is doing: "rollout 212/256". Costs nothing, call it as often as you like."""

    def loads(self, what: str) -> None:
        """What is loaded from here on, which may take its time."""

    def step(self, row: Row) -> None:
        """A row of metrics.jsonl. Names may be missing."""

    def response(self, row: Mapping[str, Any]) -> None:
        """A row of samples.jsonl, to look at. Call it as often as you like: not all are shown."""

    def history(self, rows: Iterable[Row]) -> None:
        """Rows from before a resume: curves and first values start with them, clocks do not."""

    def message(self, text: str, style: Style = "info") -> None:
        """A line that stays."""
        if style != "info":
            complain(f"{style}: {text}")

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Mute(View):
    """Of a rank that is not the first."""

    def message(self, text: str, style: Style = "info") -> None: ...


class Shown(View):
    """On a console, for as long as somebody reads it: a closed pipe or a terminal that hung up ends no run."""

    _one_line = True  # however long

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = True

    def _show(self, write: Callable[[], object]) -> None:
        if self._open and not reaches(self._console.file, write):
            self._open = False
            self._lost()

    def _lost(self) -> None:
        complain("nobody reads this run's output any more: it goes on without")

    def message(self, text: str, style: Style = "info") -> None:
        """Once nobody reads, warnings and errors go to stderr."""
        self._show(lambda: self._line(_labelled(text, style), COLOURS[style]))
        if not self._open:
            super().message(text, style)

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(encodable(text, self._console.encoding), style), soft_wrap=self._one_line)
        self._console.file.flush()


# ---- plain -----------------------------------------------------------------------------------------------------------

COLUMNS: tuple[tuple[str, str, int, Callable[[float | None], str]], ...] = (
    ("solved", "reward/solved", 5, fixed(3)),
    ("reward", "reward/mean", 6, fixed(3)),
    ("kl", "kl/old", 6, number),
    ("entropy", "entropy", 5, fixed(3)),
    ("len", "length/mean", 5, fixed(1)),
    ("tok/s", "speed/tokens_per_s", 5, number),
)


class PlainView(Shown):
    """A line a step, each flushed; of long runs some 60 lines, and one a minute."""

    LINES, SECONDS, WIDTH = 60, 60.0, 118

    def __init__(self, title: str, steps: int, console: Console) -> None:
        super().__init__(console)
        self._title = title
        self._timer = StepTimer(steps)
        self._every = max(1, math.ceil(steps / self.LINES))
        self._shown = self._start = 0
        self._at = time.monotonic()
        self._entered = False
        self._held_out: Example | None = None  # a response of the evaluation that is told next

    def __enter__(self) -> Self:
        if not self._entered:
            self._entered = True
            self._print(self._title, "bold")
            if self.loading:
                self._print(self.loading)
        return self

    def loads(self, what: str) -> None:
        self._print(f"loading {what} …")

    def response(self, row: Mapping[str, Any]) -> None:
        if row["split"] == "eval":
            self._held_out = Example.of(row)

    def history(self, rows: Iterable[Row]) -> None:
        self._start = max((int(row.get("step", 0)) for row in rows), default=0)
        self._shown = self._timer.done = self._start

    def step(self, row: Row) -> None:
        row, now, timer = numbers_of(row), time.monotonic(), self._timer
        timer.step(row, now)
        trained = any(name in row for _, name, *_ in COLUMNS)
        due = timer.done - self._shown >= self._every or now - self._at >= self.SECONDS
        first_or_last = timer.done in (self._start + 1, timer.steps)
        evaluations = EvalMetrics.of(row)
        failures = [f"{text} {row[name]:g}" for name, text in FAILURES.items() if row.get(name)]
        if trained and (due or first_or_last or evaluations or failures):
            self._shown, self._at = timer.done, now
            self._print(self._place("step") + "".join(self._cells(row, failures)))
        for e in evaluations:
            scores = f"{self._place('eval')}  {e.task} {e.metric} {e.mean:.3f} {e.interval}".rstrip()
            self._print(scores + e.passed, "bold")
        if evaluations and self._held_out is not None:
            self._print(f"  {self._held_out.line(self.WIDTH)}")
            self._held_out = None

    def _place(self, word: str) -> str:
        steps = str(self._timer.steps)
        return f"{word} {self._timer.done:>{len(steps)}}/{steps}"

    def _cells(self, row: Row, failures: list[str]) -> Iterable[str]:
        for label, name, width, form in COLUMNS:
            yield f"  {label} {form(row.get(name)):>{width}}"
        left = self._timer.left()
        yield f"  left {'-' if left is None else clock(left)}"
        for text in failures:
            yield f"  {text}"

    def _print(self, text: str, style: str = "") -> None:
        self._show(lambda: self._line(text, style))


COLOURS: dict[Style, str] = {"info": "", "warning": "yellow", "error": "bold red"}


def _labelled(text: str, style: Style) -> str:
    return text if style == "info" else f"{style}: {text}"


# ---- live ------------------------------------------------------------------------------------------------------------


class LiveView(Shown):
    """A panel at the bottom of a terminal, redrawn every 0.4 seconds by a thread of its own."""

    _one_line = False

    def __init__(self, title: str, steps: int, console: Console) -> None:
        super().__init__(console)
        self._panel = Panel(title, steps)
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._width = console.width

    def __enter__(self) -> Self:
        from rich.live import Live

        if self._live is not None:
            return self
        self._panel.stage = self.loading
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._frame)
        start = self._live.start
        self._show(lambda: start(refresh=True))
        self._thread = threading.Thread(target=self._draw, name="rpg-view", daemon=True)
        self._thread.start()
        return self

    def stage(self, name: str) -> None:
        self._panel.stage = name

    def loads(self, what: str) -> None:
        self._panel.stage = f"loading {what} …"

    def step(self, row: Row) -> None:
        self._panel.step(row)

    def response(self, row: Mapping[str, Any]) -> None:
        self._panel.response(Example.of(row))

    def history(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._panel.add(numbers_of(row))

    def close(self) -> None:
        try:
            self._closing.set()
            if self._thread is not None:
                self._thread.join()
        finally:  # a second Ctrl-C must not leave the cursor hidden
            self._panel.closed = True
            if self._live is not None:
                reaches(self._console.file, self._live.stop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._panel.stage = "" if kind is None else "stopped"
        self.close()

    def _lost(self) -> None:
        if self._live is not None:  # which has taken stderr too
            reaches(self._console.file, self._live.stop)
        super()._lost()

    def _draw(self) -> None:
        while self._open and self._live is not None and not self._closing.wait(FRAME):
            self._show(self._live.refresh)

    def _frame(self) -> Panel:
        """The panel. Narrowed, a terminal has wrapped the last frame's lines, and more rows must be erased."""
        width = self._console.width
        if self._live is not None and width < self._width and (shape := self._live._live_render._shape):
            rows = sum(max(1, math.ceil(used / width)) for used in self._panel.drawn)
            self._live._live_render._shape = (shape[0], rows)
        self._width = width
        return self._panel
