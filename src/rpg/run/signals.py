"""SIGINT, SIGTERM and SIGHUP: finish what is under way, then stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..console import several

HANGUP = getattr(signal, "SIGHUP", None)  # which Windows does not have
STOPPING = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)
ECHO = (
    10.0  # seconds: schedulers signal all processes of a job, and torchrun passes on what it gets: that is one signal
)
PRESSED = 1.0  # and a person who presses Ctrl-C again


class Stop:
    """``by`` names the signal that asked the run to end, once one has."""

    def __init__(self) -> None:
        self.by: str | None = None
        self._since = 0.0

    def note(self, by: str) -> None:
        """Whichever process of the run it came to; time counts from the first."""
        self._since = time.monotonic() if self.by is None else self._since
        self.by = by

    @contextlib.contextmanager
    def listening(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Within, the first signal is noted and told; one that comes a while later ends the run at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            wait = PRESSED if number == signal.SIGINT and not several() else ECHO
            if self.by is not None:
                if time.monotonic() - self._since >= wait:
                    raise KeyboardInterrupt
                return
            self.note(signal.Signals(number).name)
            text = f"{self.by}: finishing the present step, then saving (again, after {wait:g} s: at once)"
            # from a thread: the main one may be in the middle of a print, which would lose this one
            threading.Thread(target=tell, args=(text,), daemon=True).start()

        with _handled(stop):
            yield


def echoes_ignored() -> contextlib.AbstractContextManager[None]:
    """Within, signals do nothing: a run that was stopped by one may get it once more while it writes its report."""
    return _handled(signal.SIG_IGN)


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = {}
    try:
        for number in STOPPING:
            if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: it stays ignored
                before[number] = signal.signal(number, handler)
    except ValueError:  # not the main thread: the caller's signals stay as they are
        pass
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C is a KeyboardInterrupt, also where the library that it falls into makes another error of it."""
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    except Exception:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
