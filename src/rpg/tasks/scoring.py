"""Rewards from functions that nobody has checked: in processes of their own, with a deadline and a memory limit.

A worker is a fresh interpreter, started by name rather than through ``multiprocessing``, which would import the user's
main script, and with it torch, into each one. It leads a process group of its own: a Ctrl-C at the terminal does not
reach it, and it is killed together with whatever the reward function started.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .importing import FILES, ImportFailed, describe, load_function, load_module, split_spec
from .task import Reward

Item = tuple[str, str, str]  # response, answer, prompt
Outcome = tuple[int, float, str]  # one of the kinds below, the reward, a message

# SPENT: out of memory, which the next item must not suffer from; BROKEN: the reward function cannot be had
OK, RAISED, NOT_FINITE, TIMED_OUT, SPENT, READY, BROKEN, DIED = range(8)
FAILURES = {RAISED: "raised", SPENT: "raised", DIED: "raised", TIMED_OUT: "timed_out", NOT_FINITE: "not_finite"}
MESSAGES = 5
START = 120.0  # seconds for a worker to import the reward function
STILLBORN = 3  # workers in a row that die before they are ready, after which it is no accident
REPLY = struct.Struct("<Bd")
REPLY_BYTES = 2048
PROGRAM = (
    "import sys; (*fds, parent), sys.path = map(int, sys.argv[1:4]), sys.argv[4:];"
    "from rpg.tasks.scoring import work; work(*fds, parent)"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

inside_worker = False


class RewardError(ValueError, RuntimeError):
    """The reward function cannot be had at all; its text is one line."""


@dataclass(frozen=True)
class Scores:
    values: list[float]
    failures: dict[str, int]  # raised, timed_out, not_finite
    messages: list[str]  # the first few kinds of failure, one line each


class Scorer:
    """Calls a reward function; no call can crash, block or outlive this process. A failed one gives ``on_error``.

    ``reward`` is a function or its name, ``file.py:name`` or ``package.module:name``; sync or async. A trusted one is
    called right here. Others run in ``workers`` processes, started at the first use: a call that takes longer than
    ``timeout`` seconds, or more than ``memory_gb`` on top of what the imports took, costs its own item and nothing
    else. What they print goes nowhere.
    """

    def __init__(
        self,
        reward: Reward | Callable[[str, str, str], Any] | str,
        *,
        trusted: bool = False,
        workers: int = 2,
        timeout: float = 5.0,
        on_error: float = 0.0,
        memory_gb: float = 4.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        for name, value in (("timeout", timeout), ("memory_gb", memory_gb)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive; got {value}")
        if not math.isfinite(on_error):
            raise ValueError(f"on_error must be finite; got {on_error}")
        self.timeout, self.on_error = timeout, on_error
        self._caller = None
        self._count = workers
        if trusted:
            self._caller = _Caller(load_function(reward) if isinstance(reward, str) else reward, Exception)
        else:
            self._setup = _pack(reward, memory_gb)
        self._workers: list[_Worker] = []
        self._stillborn = 0
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._workers, self._selector, os.getpid())

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._finalizer()
        if self._caller is not None:
            self._caller.close()

    def start(self) -> None:
        """Start the workers and wait for the first: a reward function that cannot be imported is a ValueError here."""
        if self._caller is None:
            with self._lock:
                self._fill()
                while all(worker.starting for worker in self._workers):
                    self._step({})

    def score(self, items: Sequence[Item]) -> Scores:
        """One reward for each (response, answer, prompt), in order."""
        if self._caller is not None:
            return self._count_up([self._caller(item) for item in items])
        with self._lock:
            outcomes = self._distribute(items)
        return self._count_up([outcomes[i] for i in range(len(items))])

    def _count_up(self, outcomes: list[Outcome]) -> Scores:
        failures = dict.fromkeys(FAILURES.values(), 0)
        for kind, _, _ in outcomes:
            if kind != OK:
                failures[FAILURES[kind]] += 1
        messages = dict.fromkeys(message for kind, _, message in outcomes if kind != OK)
        return Scores(
            values=[value if kind == OK else self.on_error for kind, value, _ in outcomes],
            failures=failures,
            messages=list(messages)[:MESSAGES],
        )

    # ---- the pool

    def _distribute(self, items: Sequence[Item]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        todo = deque(range(len(items)))
        try:
            while len(outcomes) < len(items):
                self._fill()
                for worker in self._workers:
                    if worker.idle and todo and worker.send(todo[0], items[todo[0]], self.timeout):
                        todo.popleft()
                self._step(outcomes)
        finally:  # interrupted: what is still at work would answer to the wrong items
            for worker in [w for w in self._workers if w.item is not None]:
                self._drop(worker)
        return outcomes

    def _fill(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("this Scorer is closed")
        if inside_worker:
            raise RuntimeError("a script that scores must do so under `if __name__ == '__main__':`")
        while len(self._workers) < self._count:
            worker = _Worker(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _drop(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end()

    def _step(self, outcomes: dict[int, Outcome]) -> None:
        """Wait for answers, deaths or the next deadline; write down what became of the items."""
        wait = min(worker.deadline for worker in self._workers) - time.monotonic()
        for key, _ in self._selector.select(None if wait == math.inf else max(wait, 0)):
            self._answered(key.data, key.data.receive(), outcomes)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            late = f"no answer after {self.timeout:g} s"
            self._answered(worker, (DIED, 0.0, late) if worker.starting else (TIMED_OUT, 0.0, late), outcomes)
        self._fill()

    def _answered(self, worker: _Worker, reply: Outcome, outcomes: dict[int, Outcome]) -> None:
        kind, value, message = reply
        item, starting = worker.item, worker.starting
        worker.item, worker.deadline = None, math.inf
        if kind in (DIED, TIMED_OUT, SPENT, BROKEN):
            cause = self._drop(worker)
            if kind == BROKEN:
                raise RewardError(message)
            if kind == DIED:
                message = f"worker died: {cause}"
            if starting:
                self._stillborn += 1
                if self._stillborn >= STILLBORN:
                    raise RewardError(f"{STILLBORN} reward workers in a row died before they were ready: {cause}")
        elif kind == READY:
            worker.starting, self._stillborn = False, 0
        if item is not None:
            outcomes[item] = (kind, value, message)


class _Worker:
    """This side's end of a worker process."""

    def __init__(self, setup: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()  # its end tells them that this process is gone
        fds = (theirs.fileno(), watched)
        try:
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
        self.socket.settimeout(START)
        self.starting = True
        self.item: int | None = None
        self.deadline = time.monotonic() + START
        self._write(setup)

    @property
    def idle(self) -> bool:
        return self.item is None and not self.starting

    def send(self, index: int, item: Item, timeout: float) -> bool:
        """False: it has died in the meantime, which ``receive`` will say."""
        if not self._write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL)):
            return False
        self.item, self.deadline = index, time.monotonic() + timeout
        return True

    def _write(self, data: bytes) -> bool:
        try:
            self.socket.sendall(data)
        except OSError:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> Outcome:
        try:
            data = self.socket.recv(REPLY_BYTES)
        except OSError:
            data = b""
        if len(data) < REPLY.size:
            return DIED, 0.0, ""
        kind, value = REPLY.unpack_from(data)
        return kind, value, data[REPLY.size :].decode("utf-8", "replace")

    def end(self) -> str:
        """Kill it and all that it started; say how it had ended if it had."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        os.close(self._lifeline)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _end(workers: list[_Worker], selector: selectors.BaseSelector, owner: int) -> None:
    if os.getpid() == owner:  # not a fork, whose copy this is
        selector.close()
        while workers:
            workers.pop().end()


def _pack(reward: Any, memory_gb: float) -> bytes:
    """All that a worker needs to know."""
    files = dict(FILES)
    if isinstance(reward, str):
        where, name = split_spec(reward)
        pickled = pickle.dumps(f"{where}:{name}")
    else:
        name = getattr(reward, "__qualname__", type(reward).__name__)
        if not callable(reward):
            raise ValueError(f"reward must be a function or the name of one; got {name}")
        way_out = "define it at the top level of a file, or give its name, file.py:name"
        try:
            pickled = pickle.dumps(reward)
        except Exception as error:
            text = f"reward {name!r} cannot be sent to another process; {way_out} ({describe(error)})"
            raise ValueError(text) from error
        if b"__main__" in pickled:
            main = sys.modules["__main__"]
            source = main.__spec__.name if main.__spec__ else getattr(main, "__file__", None)
            if source is None:
                raise ValueError(f"reward {name!r} is defined in an interactive session; {way_out}")
            files["__main__"] = source if main.__spec__ else os.path.abspath(source)
    return pickle.dumps((pickled, files, memory_gb))


# ---- in the worker ---------------------------------------------------------------------------------------------------


def work(requests: int, lifeline: int, parent: int) -> None:
    """Answer items until the other end is closed."""
    global inside_worker
    inside_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (requests, lifeline):
        os.set_inheritable(fd, False)
    _die_with(lifeline, parent)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    reader = open(requests, "rb")  # noqa: SIM115
    try:
        pickled, files, memory_gb = pickle.load(reader)
        try:
            reward = _Unpickler(pickled, files).load()
            caller = _Caller(load_function(reward) if isinstance(reward, str) else reward, BaseException)
        except BaseException as error:
            text = str(error) if isinstance(error, ImportFailed) else f"cannot load the reward: {describe(error)}"
            return _reply(requests, (BROKEN, 0.0, text))
        _limit(memory_gb)
        _reply(requests, (READY, 0.0, ""))
        while True:
            _reply(requests, caller(pickle.load(reader)))
    except (EOFError, OSError):  # the parent is gone, or has given up on this worker
        return None


class _Unpickler(pickle.Unpickler):
    """Finds what was defined in a main script, or in a file that was loaded by its path."""

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        if module not in self._files:
            return super().find_class(module, name)
        found: Any = load_module(self._files[module])
        for part in name.split("."):
            found = getattr(found, part)
        return found


class _Caller:
    """One call, and what came of it. Errors outside ``catch`` pass: Ctrl-C, where this is the user's own process."""

    def __init__(self, function: Callable[..., Any], catch: type[BaseException]) -> None:
        self._function, self._catch = function, catch
        self._runner: Any = None

    def __call__(self, item: Item) -> Outcome:
        try:
            result = self._function(*item)
            if hasattr(result, "__await__"):
                result = self._run(result)
            value = _number(result)
        except self._catch as error:
            return SPENT if isinstance(error, MemoryError) else RAISED, 0.0, describe(error) + _place(error)
        if value is None or not math.isfinite(value):
            text = type(result).__name__ if value is None else str(value)
            return NOT_FINITE, 0.0, f"returned {text}, not a finite number"
        return OK, value, ""

    def _run(self, awaitable: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await awaitable

        if self._runner is None:  # one loop for all calls: a session opened in the first serves the others
            self._runner = asyncio.Runner()
        return self._runner.run(wait())

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def _number(result: Any) -> float | None:
    if isinstance(result, str | bytes | bytearray | complex):
        return None
    try:
        return float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def _place(error: BaseException) -> str:
    """(reward.py:12), the line that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename == __file__:
        return ""
    return f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"


def _reply(fd: int, outcome: Outcome) -> None:
    kind, value, message = outcome
    data = REPLY.pack(kind, value) + message.encode("utf-8", "replace")
    os.write(fd, data[:REPLY_BYTES])


def _die_with(lifeline: int, parent: int) -> None:
    """Kill this process group as soon as the parent is gone, however it went."""

    def watch() -> None:
        import select

        while os.getppid() == parent and not select.select([lifeline], [], [], 1.0)[0]:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(ImportError, AttributeError):  # Linux: even while a call in C holds the interpreter
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit(memory_gb: float) -> None:
    """Of address space, beyond what is in use; and no core dumps."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:  # elsewhere what is in use counts too
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + int(memory_gb * 2**30)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
