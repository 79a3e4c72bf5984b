"""What people see: widths, content, the terminal after an interrupt, and what it costs."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import pytest
from rich.cells import cell_len
from rich.console import Console

from rpg.console import clock, number
from rpg.run.panel import Panel, sparkline
from rpg.run.rows import Example
from rpg.run.view import LiveView, PlainView, make_view

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


def rows(n: int, every: int = 10) -> Iterator[dict[str, float]]:
    for s in range(n + 1):
        p = 1 / (1 + math.exp(-(s - n / 3) / (n / 8)))
        row: dict[str, float] = {"step": s}
        if s:
            row |= {
                "reward/solved": 0.9 * p,
                "reward/mean": p - 0.1,
                "kl/old": 0.0031,
                "kl/ref": 3e-5 * s,
                "entropy": 1.4 - p,
                "length/mean": 31.0,
                "length/truncated": 0.01,
                "clip/low": 0.012,
                "clip/high": 0.034,
                "ess": 0.93,
                "grad_norm": 0.4,
                "speed/tokens_per_s": 5120.0,
                "time/rollout": 0.7,
                "time/train": 0.3,
                "time/step": 1.0,
                "skipped": 0,
                "reward/failed": 0,
            }
        if s % every == 0:
            row |= {
                "eval/arithmetic/mean@8": 0.3 + 0.6 * p,
                "eval/arithmetic/mean@8_low": 0.25 + 0.6 * p,
                "eval/arithmetic/mean@8_high": 0.35 + 0.6 * p,
                "eval/arithmetic/pass@1": 0.3 + 0.6 * p,
                "eval/arithmetic/pass@8": 0.71,
                "time/eval": 0.5,
            }
        yield row


def terminal(width: int, **options: object) -> Console:
    settings = {"force_terminal": True, "legacy_windows": False, "_environ": {"TERM": "xterm-256color"}} | options
    return Console(file=io.StringIO(), width=width, height=30, **settings)  # type: ignore[arg-type]


def drawn(panel: Panel, width: int) -> list[str]:
    return ["".join(text for text, _ in line) for line in panel.lines(width)]


def full_panel(n: int = 42) -> Panel:
    panel = Panel("rpg-reinforce-urkl · arithmetic · builtin", 60)
    for row in rows(n):
        panel.step(row)
    panel.stage = "rollout 212/256"
    return panel


@pytest.mark.parametrize("width", [24, 40, 60, 80, 81, 100, 119, 120, 200])
def test_every_line_of_the_panel_is_as_wide_as_the_terminal(width: int) -> None:
    for panel in (full_panel(), Panel("a long title " * 30, 60), full_panel(1)):
        assert {cell_len(line) for line in drawn(panel, width)} == {width}


@pytest.mark.parametrize(("width", "height"), [(80, 10), (120, 8)])
def test_the_panel_says_what_matters(width: int, height: int) -> None:
    lines = drawn(full_panel(), width)
    text = "\n".join(lines)
    assert len(lines) <= height
    for part in (
        "rpg-reinforce-urkl · arithmetic", "42/60", "left", "held-out mean@8 0.339 → 0.896 [0.846, 0.946]",
        "pass@8 0.710", "solved", "reward", "KL        0.0031", "entropy", "length      31.0", "clip low   1.2 %",
        "clip high  3.4 %", "ESS        0.930", "tokens/s    5120", "rollout 212/256",
        "rollout 70 %, train 30 %", "▁", "█",
    ):  # fmt: skip
        assert part in text, part


def test_two_tasks_have_a_line_each_and_wide_characters_keep_the_frame() -> None:
    panel = Panel("算術の訓練" * 20, 60)
    panel.step({"step": 0, "eval/算術/mean@4": 0.1, "eval/countdown/mean@4": 0.2})
    panel.stage = "評価" * 60
    lines = drawn(panel, 80)
    assert {cell_len(line) for line in lines} == {80}
    assert sum("mean@4" in line for line in lines) == 2


def test_trouble_is_counted_in_sight() -> None:
    panel = full_panel()
    assert "failed" not in "\n".join(drawn(panel, 80))
    panel.step({"step": 43, "reward/failed": 2, "skipped": 1})
    panel.step({"step": 44, "reward/failed": 1})
    assert "failed rewards 3   skipped steps 1" in "\n".join(drawn(panel, 80))


def test_values_that_are_not_finite_or_not_numbers_are_shown_not_fatal() -> None:
    panel = full_panel()
    panel.step({"step": 43, "entropy": math.nan, "kl/old": None, "reward/mean": math.inf, "not_finite": ["kl/old"]})  # type: ignore[dict-item]
    text = "\n".join(drawn(panel, 80))
    assert re.search(r"entropy +nan", text)
    assert re.search(r"KL +nan", text)
    assert re.search(r"reward +inf", text)


def test_a_live_run_keeps_messages_and_shows_the_cursor_again() -> None:
    console = terminal(80)
    with make_view("live", title="run", steps=60, console=console) as view:
        assert isinstance(view, LiveView)
        view.history([{"step": 0, "eval/arithmetic/mean@8": 0.123}])
        for row in rows(20):
            view.stage("training")
            view.step(row)
            if row["step"] == 7:
                view.message("no [bold]API[/] key", "warning")
        time.sleep(0.6)  # a frame
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.count(HIDE) == written.count(SHOW) == 1
    assert written.rindex(SHOW) > written.rindex("╰")
    text = ANSI.sub("", written)
    assert text.count("warning: no [bold]API[/] key") == 1
    assert "0.123 →" in text
    assert "20/60" in text
    assert max(cell_len(line) for line in re.split(r"[\r\n]+", text)) <= 80


def test_narrowed_while_live_the_old_frame_is_erased() -> None:
    console = terminal(120)
    with LiveView("run", 60, console) as view:
        for row in rows(20):
            view.step(row)
        view._live.refresh()  # type: ignore[union-attr]
        height = len(view._panel.drawn)
        console.file.truncate(0)  # type: ignore[attr-defined]
        console.width = 80  # the terminal wraps each of the 120-column lines into two
        view._live.refresh()  # type: ignore[union-attr]
        frame = console.file.getvalue()  # type: ignore[attr-defined]
    up = frame[: frame.index("╭")].count("\x1b[1A")
    assert up == 2 * height - 1


def test_a_low_terminal_gets_fewer_rows() -> None:
    console = Console(file=io.StringIO(), width=80, height=6)
    console.print(full_panel())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 5
    assert "42/60" in lines[1]
    assert lines[-1].startswith("╰")


def test_an_ascii_terminal_gets_ascii() -> None:
    text = "\n".join("".join(t for t, _ in line) for line in full_panel().lines(80, ascii_only=True))
    assert text.isascii()
    assert "0.339 -> 0.896" in text


def test_an_exception_restores_the_terminal_and_streams() -> None:
    console = terminal(80)
    before = sys.stdout, sys.stderr
    with contextlib.suppress(RuntimeError), make_view("live", title="run", steps=3, console=console) as view:
        view.stage("training")
        raise RuntimeError
    assert (sys.stdout, sys.stderr) == before
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex(SHOW) > written.rindex(HIDE)
    assert "stopped" in written


def test_a_terminal_that_hangs_up_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    for kind in ("live", "plain"):
        file = Gone()
        with make_view(kind, title="run", steps=3, console=Console(file=file, force_terminal=True, width=80)) as view:
            file.gone = True
            view.message("hello", "error")
            view.step({"step": 1, "reward/mean": 1.0})
            time.sleep(0.5)  # a frame


def test_the_view_costs_less_than_a_hundredth_of_a_step() -> None:
    console = terminal(120)
    data = list(rows(400))
    with make_view("live", title="run", steps=400, console=console) as view:
        view.history(data[:-3])
        view._live.refresh()  # type: ignore[attr-defined]
        spent = time.process_time()
        for row in data[-2:]:  # two steps of one second
            for done in range(256):
                view.stage(f"rollout {done}/256")
            view.step(row)
            time.sleep(1.0)
        spent = time.process_time() - spent
    assert spent / 2 < 0.01, f"{spent / 2:.4f} s of CPU a second"


# ---- plain -----------------------------------------------------------------------------------------------------------


def plain(rows: Iterable[dict[str, float]], steps: int, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with make_view("plain", title="run", steps=steps, console=console) as view:
        for row in rows:
            view.step(row)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_plain_lines_are_aligned_and_complete() -> None:
    lines = plain(rows(60), 60)
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 60
    for word in ("solved", "reward", "kl", "entropy", "len", "tok/s", "left"):
        assert len({line.index(f" {word} ") for line in steps}) == 1, word
    assert max(map(len, lines)) <= 100
    assert lines[1] == "eval  0/60  arithmetic mean@8 0.339 [0.289, 0.389]  pass@8 0.710"
    want = r"solved 0.\d{3}  reward  0.\d{3}  kl 0.0031  entropy 1.\d{3}  len  31.0  tok/s  5120  left \d+:\d\d"
    assert re.fullmatch(f"step 12/60  {want}", steps[11])
    assert sum(line.startswith("eval") for line in lines) == 7


def test_a_long_log_stays_readable() -> None:
    lines = plain(rows(6000, every=1000), 6000)
    assert 60 <= len(lines) <= 90
    assert any(line.startswith("step    1/6000") for line in lines)
    assert any(line.startswith("step 6000/6000") for line in lines)


def test_slow_steps_of_a_long_run_are_told_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slowly() -> Iterator[dict[str, float]]:
        for step in range(1, 11):
            now[0] += 70.0
            yield {"step": step, "reward/mean": 1.0}

    lines = plain(slowly(), 60_000)
    assert len(lines) == 11
    assert lines[-1].endswith(f"left {clock(70.0 * (60_000 - 10))}")


def test_missing_values_keep_the_columns() -> None:
    lines = plain([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.5, "skipped": 2, "kl/old": 1.0}], 2)
    assert lines[1].index("kl") == lines[2].index("kl")
    assert "kl      -" in lines[1]
    assert lines[2].endswith("skipped steps 2")


SCRIPT = (
    "from __future__ import annotations\nimport math, sys, time\n"
    + inspect.getsource(rows)
    + """
from rpg.run.view import make_view
with make_view(sys.argv[1], title="rpg · run", steps=60) as view:
    for row in rows(12):
        view.stage("training")
        view.step(row)
        time.sleep(float(sys.argv[2]))
    view.message("a note")
    view.message("careful", "warning")
"""
)


def test_a_pipe_gets_plain_lines_whatever_the_environment_and_none_only_warnings() -> None:
    def start(kind: str, **environment: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | environment
        out = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", SCRIPT, kind, "0"], stdout=out, stderr=out, text=True, env=env)

    forced = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    started = start("auto"), start("auto", **forced), start("auto", PYTHONIOENCODING="ascii"), start("none")
    found = [(*process.communicate(timeout=60), process.returncode) for process in started]
    for out, error, code in found[:3]:
        assert (error, code) == ("", 0)
        assert HIDE not in out
        lines = ANSI.sub("", out).splitlines()
        assert lines[0] == ("rpg ? run" if out.isascii() else "rpg · run")
        assert [line.split()[0] for line in lines[1:4]] == ["eval", "step", "step"]
        assert lines[-2:] == ["a note", "warning: careful"]
    assert "\x1b" not in found[0][0]
    assert [out.isascii() for out, *_ in found[:3]] == [False, False, True]
    assert found[3] == ("", "warning: careful\n", 0)


def test_each_plain_line_is_flushed() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, "auto", "30"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = [process.stdout.readline().decode() for _ in range(2)]  # the process now sleeps
        process.kill()
    assert first[0].startswith("rpg")
    assert first[1].startswith("eval")


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown log.view 'lively'. Did you mean 'live'"):
        make_view("lively", title="", steps=1)


# ---- a real terminal -------------------------------------------------------------------------------------------------


def interrupted(seconds: str, kind: str = "auto") -> tuple[str, int]:
    main, other = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    env["TERM"] = "xterm-256color"
    command = [sys.executable, "-c", SCRIPT, kind, seconds]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env, start_new_session=True)
    os.close(other)
    out, sent, end = b"", False, time.monotonic() + 20
    while time.monotonic() < end:
        if select.select([main], [], [], 0.1)[0]:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            out += piece
            if not piece:
                break
        if not sent and b"2/60" in out:
            process.send_signal(signal.SIGINT)
            sent = True
    os.close(main)
    return out.decode(errors="replace"), process.wait(timeout=10)


def test_an_interrupted_live_view_gives_the_terminal_back() -> None:
    out, code = interrupted("0.3")
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in out
    assert out.count(HIDE) == 1
    assert (
        out.index(HIDE) < out.rindex("╰") < out.rindex(SHOW) < out.index("Traceback")
    )  # the panel stays, then the trace
    assert "stopped" in out


def test_plain_lines_on_a_terminal_where_they_are_asked_for() -> None:
    out, code = interrupted("0.3", "plain")
    assert code == -signal.SIGINT
    assert HIDE not in out
    assert "╭" not in out
    assert "step  1/60  solved" in ANSI.sub("", out)


def test_where_auto_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    def kind(console: Console) -> type:
        return type(make_view("auto", title="", steps=1, console=console))

    assert kind(terminal(80)) is LiveView
    assert kind(terminal(80, no_color=True)) is LiveView
    assert kind(terminal(80, _environ={"TERM": "dumb"})) is PlainView
    assert kind(Console(file=io.StringIO())) is PlainView
    monkeypatch.setenv("CI", "true")
    assert kind(terminal(80)) is PlainView
    assert type(make_view("live", title="", steps=1, console=terminal(80))) is LiveView


# ---- responses and what is loaded -----------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;title\x07 =52-9\n\r=43\n\u202eanswer 43"


def sample(split: str = "eval", prompt: str = "13*4-9\n", response: str = HOSTILE) -> dict[str, object]:
    return {"split": split, "prompt": prompt, "response": response, "reward": 1.0}


def test_a_plain_view_says_what_is_loaded_and_shows_one_response_an_evaluation() -> None:
    console = Console(file=io.StringIO(), width=100)
    view = PlainView("a run", 20, console)
    view.loading = "loading the task arithmetic …"
    with view, view:  # which is entered again
        view.loads("the model builtin")
        for row in rows(20):
            view.response(sample("train", response="of training"))
            if row["step"] % 10 == 0:
                view.response(sample())
            view.step(row)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[:3] == ["a run", "loading the task arithmetic …", "loading the model builtin …"]
    assert lines.count("a run") == 1
    shown = [i for i, line in enumerate(lines) if "→" in line]
    assert len(shown) == 3
    assert all(lines[i - 1].startswith("eval") for i in shown)
    assert lines[shown[0]].endswith("13*4-9 → \\x1b[2J\\x1b]0;title\\x07 =52-9 =43 \\u202eanswer 43  (reward 1.000)")
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", "\n".join(lines))


def test_the_panel_shows_a_response_long_enough_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    panel = full_panel()
    panel.response(Example.of(sample(prompt="word " * 99 + "?", response="long " * 500 + "\\boxed{7}")))
    for width in (44, 80, 120):
        lines = drawn(panel, width)
        assert {cell_len(line) for line in lines} == {width}
        assert any("word ?" in line and "reward 1.000" in line for line in lines)
        assert "\\boxed{7}" in lines[-2]
        assert sum("long" in line for line in lines) == 3
    panel.response(Example.of(sample(response="too soon")))
    assert not any("too soon" in line for line in drawn(panel, 80))
    now[0] += 5
    panel.response(Example.of(sample(prompt="日本" * 60, response="日本" * 60)))
    assert {cell_len(line) for line in drawn(panel, 80)} == {80}
    assert not any("long" in line for line in drawn(panel, 80))


def test_a_live_view_opens_with_what_is_loaded_and_may_be_entered_again() -> None:
    console = terminal(80)
    view = LiveView("a run", 20, console)
    view.loading = "loading torch and the task arithmetic …"
    with view:
        with view:
            view.response(sample())
        view.close()
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loading torch and the task arithmetic" in out
    assert (out.count(HIDE), out.count(SHOW)) == (1, 1)


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.0031, "0.0031"), (3.14e-5, "3.1e-5"), (0, "0.000"), (0.42, "0.420"), (-0.5, "-0.500"), (5120, "5120"),
     (31.04, "31.0"), (482_000, "482k"), (1.5e7, "15M"), (None, "-"), (math.nan, "nan"), (-math.inf, "-inf"),
     (1e30, "1e+30"), (1.0, "1.00")],
)  # fmt: skip
def test_numbers_are_short(x: float | None, text: str) -> None:
    assert number(x) == text


@pytest.mark.parametrize("size", [10.0**e * f for e in range(-12, 16) for f in (1.0, 4.99, 9.996)])
def test_no_number_breaks_its_column(size: float) -> None:
    assert len(number(size)) <= 7
    assert len(number(-size)) <= 8


def test_clocks() -> None:
    assert [clock(s) for s in (0, 59.6, 102, 3723, 200_000)] == ["0:00", "1:00", "1:42", "1:02:03", "2d 7h"]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float(i) for i in range(800)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, math.nan, 1.0], 8, low=0.0, high=1.0) in ("▄ █", "▅ █")
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([math.nan], 5) == " "


def test_live_without_a_terminal_is_plain() -> None:
    assert isinstance(make_view("live", title="", steps=1, console=Console(file=io.StringIO())), PlainView)
