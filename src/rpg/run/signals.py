"""SIGINT and SIGTERM: finish what is under way, then stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Stop:
    """``by`` names the signal that asked the run to end, once one has."""

    def __init__(self) -> None:
        self.by: str | None = None

    @contextlib.contextmanager
    def listening(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Within, the first signal is noted and told; a second one ends the run at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.by is not None:
                raise KeyboardInterrupt
            self.by = signal.Signals(number).name
            text = f"{self.by}: finishing the present step, then saving (again: stop at once)"
            # from a thread: the main one may be in the middle of a print, which would lose this one
            threading.Thread(target=tell, args=(text,), daemon=True).start()

        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, stop)
        except ValueError:  # not the main thread: the caller's signals stay as they are
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
