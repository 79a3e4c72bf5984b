"""This side of a worker process: starting it, sending calls, receiving outcomes, its deadline and its end.

A worker (worker.py) is a fresh interpreter, started by name rather than through ``multiprocessing``, which would import
the user's main script, and with it torch, into each one. It leads a process group of its own, which a Ctrl-C at the
terminal does not reach, and is killed together with whatever the reward function started: by its guard (guard.py),
where there is one.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..console import describe
from .guard import KILL_SECONDS
from .importing import FILES, split_spec
from .messages import LENGTH, MOST_ASYNC, NO_CALL, REPLY, RUNNING, Kind, Message, Outcome, Running

START_SECONDS = 120.0  # for a worker to import the reward function
GRACE = 1.0  # seconds for a worker to say itself that an async function has passed its deadline
PROGRAM = (
    "import sys; (*fds, trainer), sys.path = map(int, sys.argv[1:5]), sys.argv[5:];"
    "from rpg.rewards.worker import work; work(*fds, trainer)"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    def __init__(self, setup: bytes) -> None:
        if os.name == "nt":
            raise ValueError("a reward function of your own runs in processes that Windows does not have: take WSL")
        self.socket, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()  # its end tells them that this process is gone
        try:
            with tempfile.TemporaryFile() as shared:
                shared.truncate(RUNNING.size)
                self._running = Running(shared.fileno())
                fds = (theirs.fileno(), watched, shared.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *map(str, fds), str(os.getpid()), *map(str, sys.path)],
                    pass_fds=fds,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**dict.fromkeys(ONE_THREAD, "1"), **os.environ},
                )
        except BaseException:
            self.socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(watched)
        self.socket.setblocking(False)
        self.starting = True
        self.leaving = False  # takes no more calls
        self.is_async = False  # its calls are of async functions: many at a time
        self.pending: dict[int, None] = {}  # calls it has not answered
        self.deadline = time.monotonic() + START_SECONDS
        self._steps = 0  # as last seen
        self._out, self._in = bytearray(), bytearray()
        self._write(setup)

    @property
    def sending(self) -> bool:
        return bool(self._out)

    @property
    def has_room(self) -> bool:
        most = 0 if self.starting or self.leaving or self._out else MOST_ASYNC if self.is_async else 1
        return len(self.pending) < most

    def send(self, message: Message, timeout: float) -> bool:
        """False: it has died in the meantime, which ``receive`` will say."""
        if not self._write(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)):
            return False
        if not self.pending:
            self._watch(timeout)
        self.pending[message[0]] = None
        return True

    def answered(self, call: int) -> None:
        del self.pending[call]
        if not self.pending:
            self.deadline = math.inf

    def still_moving(self, timeout: float) -> bool:
        """Whether a worker past its deadline goes on nevertheless: with many calls, each of which it times itself."""
        if not self.is_async or self.starting or self._running.read()[0] == self._steps:
            return False
        self._watch(timeout)
        return True

    def _watch(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout + (GRACE if self.is_async else 0.0)
        self._steps = self._running.read()[0]

    def blamed(self) -> Iterable[int]:
        """The call that is running, or nobody if it was one that is over (its clean-up); of many, if none of them is
        running, any may have done it."""
        call = self._running.read()[1] if self.is_async else NO_CALL
        return tuple(self.pending) if call == NO_CALL else (call,) if call in self.pending else ()

    def _write(self, data: bytes) -> bool:
        self._out += LENGTH.pack(len(data)) + data
        return self.flush()

    def flush(self) -> bool:
        """Send what there is room for."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> Iterable[tuple[int, Outcome]]:
        """(number of the call, what came of it), as far as they have arrived; last of all, that it has died."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.socket.recv(2**16)
        self._in += data
        while len(self._in) >= REPLY.size:
            number, kind, value, length = REPLY.unpack_from(self._in)
            if len(self._in) < REPLY.size + length:
                break
            message = self._in[REPLY.size : REPLY.size + length].decode("utf-8", "replace")
            del self._in[: REPLY.size + length]
            yield number, (kind, value, message)
        if not data:
            yield NO_CALL, (Kind.DIED, 0.0, "")

    def end(self) -> str:
        """Kill it and all that it started; say how it had ended if it had."""
        code = self._guards_word() if self._running.read()[0] else None
        if code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        self.socket.close()
        self._running.close()
        os.close(self._lifeline)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _guards_word(self) -> int | None:
        """Its guard kills what this process could not find. There is one since the first step was counted."""
        with contextlib.suppress(OSError):  # it is about to end by itself
            os.write(self._lifeline, b"!")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(2 * KILL_SECONDS)
        return None


def pack_setup(functions: Sequence[Any], memory_gb: float, timeout: float) -> bytes:
    """All that a worker needs to know."""
    files, sent = dict(FILES), []
    for function in functions:
        if isinstance(function, str):
            sent.append(":".join(split_spec(function)))
            continue
        name = getattr(function, "__qualname__", type(function).__name__)
        if not callable(function):
            raise ValueError(f"reward must be a function or the name of one; got {name}")
        way_out = "define it at the top level of a file, or give its name, file.py:name"
        try:
            pickled = pickle.dumps(function)
        except Exception as error:
            text = f"reward {name!r} cannot be sent to another process; {way_out} ({describe(error)})"
            raise ValueError(text) from error
        if b"__main__" in pickled:
            main = sys.modules["__main__"]
            source = main.__spec__.name if main.__spec__ else getattr(main, "__file__", None)
            if source is None:
                raise ValueError(f"reward {name!r} is defined in an interactive session; {way_out}")
            files["__main__"] = source if main.__spec__ else os.path.abspath(source)
        sent.append(function)
    return pickle.dumps((pickle.dumps(sent), files, memory_gb, timeout))
