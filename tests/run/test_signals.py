"""Signals: the run saves and stops, whatever has become of its terminal; echoes of a signal are no second one."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import pytest

from rpg.run import signals
from running import TINY, Server, checkpoints, lines, summary


@pytest.mark.parametrize(
    ("first", "again", "seconds", "at_once"),
    [
        (signal.SIGTERM, signal.SIGTERM, 9.0, False),
        (signal.SIGTERM, signal.SIGTERM, 11.0, True),
        (signal.SIGTERM, signal.SIGHUP, 3.0, False),
        (signal.SIGTERM, signal.SIGINT, 0.5, False),
        (signal.SIGINT, signal.SIGINT, 0.5, False),
        (signal.SIGINT, signal.SIGINT, 1.5, True),
    ],
)
def test_when_a_second_signal_counts(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals, again: signal.Signals, seconds: float, at_once: bool
) -> None:
    now, stop, before = [100.0], signals.Stop(), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stopped = False
    try:
        with stop.listening(lambda text: None):
            signal.raise_signal(first)
            now[0] += seconds
            signal.raise_signal(again)
    except KeyboardInterrupt:
        stopped = True
    assert (stopped, stop.by) == (at_once, first.name)
    assert signal.getsignal(signal.SIGHUP) == before


def test_under_torchrun_an_interrupt_is_passed_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    now, stop = [100.0], signals.Stop()
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with stop.listening(lambda text: None):
        signal.raise_signal(signal.SIGINT)
        now[0] += 3.0
        signal.raise_signal(signal.SIGINT)
    other = signals.Stop()
    other.note("SIGTERM")  # another process got it first
    with other.listening(lambda text: None):
        signal.raise_signal(signal.SIGTERM)
    assert (stop.by, other.by) == ("SIGINT", "SIGTERM")


def test_nohup_stays_what_it_is() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = signals.Stop()
        with stop.listening(lambda text: None):
            signal.raise_signal(signal.SIGHUP)
        assert stop.by is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_stops_a_run_that_can_be_resumed(server: Server, tmp_path: Path) -> None:
    """Its signal comes when nothing can be shown any more."""
    terminal, other = pty.openpty()
    os.set_blocking(terminal, False)
    name, folder, shown = os.ttyname(other), tmp_path / "run", []

    def reached(rows: int) -> bool:
        try:
            shown.append(os.read(terminal, 65536))
        except BlockingIOError:
            time.sleep(0.01)
        return lines(folder) >= rows

    live = [*TINY, "--log.view", "live", "--steps", 500]
    job = server.start("train", "--output", folder, *live, stdout=name, stderr=name, TERM="xterm-256color", CI="")
    job.until(lambda: reached(3))
    os.close(other)
    os.close(terminal)
    job.kill(signal.SIGHUP)
    assert job.wait().code == 129
    about = summary(folder)
    assert (about["status"], about["stopped_by"]) == ("stopped", "SIGHUP")
    assert checkpoints(folder)[-1] == f"step-{about['step']:06d}"
    assert (folder / "report.html").exists()
    assert "╭".encode() in b"".join(shown)
