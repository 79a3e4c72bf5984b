"""Rewards from functions that nobody has checked: in processes of their own, with a deadline and a memory limit.

A worker (worker.py) is a fresh interpreter, started by name rather than through ``multiprocessing``, which would import
the user's main script, and with it torch, into each one. It leads a process group of its own: a Ctrl-C at the terminal
does not reach it, and it is killed together with whatever the reward function started.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import worker as inside
from .importing import FILES, describe, load_function, split_spec
from .worker import (
    BROKEN,
    DIED,
    FLIGHT,
    LEAVING,
    LENGTH,
    NOBODY,
    NOT_FINITE,
    OK,
    RAISED,
    READY,
    REPLY,
    RUNNING,
    SPENT,
    TIMED_OUT,
    Caller,
    Item,
    Message,
    Outcome,
    Running,
    late,
)

FAILURES = {RAISED: "raised", SPENT: "raised", DIED: "raised", TIMED_OUT: "timed_out", NOT_FINITE: "not_finite"}
MESSAGES = 5
SOLVED = 0.5  # a larger reward counts as solved
CORRECT = "correct"  # the part that decides alone whether a response is solved, where there is one
START = 120.0  # seconds for a worker to import the reward function
LARGEST = 3.4e38  # reward, either way: training is in float32
STILLBORN = 3  # workers in a row that die before they are ready, after which it is no accident
GRACE = 1.0  # seconds for a worker to say itself that an async function has passed its deadline
PROGRAM = (
    "import sys; (*fds, parent), sys.path = map(int, sys.argv[1:5]), sys.argv[5:];"
    "from rpg.rewards.worker import work; work(*fds, parent)"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Reward(Protocol):
    """What a response is worth. Responses with a reward above one half count as solved."""

    def __call__(self, response: str, answer: str, prompt: str) -> float: ...


class RewardError(ValueError, RuntimeError):
    """The reward function cannot be had at all; its text is one line."""


@dataclass(frozen=True)
class Part:
    """One term of a reward: ``function`` is called as f(response, answer, prompt), sync or async; or the name of it."""

    name: str
    function: Reward | Callable[[str, str, str], Any] | str
    weight: float = 1.0
    trusted: bool = False  # cannot hang or crash: called right here


@dataclass(frozen=True)
class Scores:
    values: list[float]  # sums of weight × part
    failures: dict[str, int]  # calls: raised, timed_out, not_finite
    messages: list[str]  # the first few kinds of failure, one line each
    solved: list[bool]
    parts: dict[str, list[float]] = field(default_factory=dict)  # by name, without their weights


class Scorer:
    """Calls reward functions; no call can crash, block or outlive this process. A failed one gives ``on_error``.

    ``reward`` is a function or its name, ``file.py:name`` or ``package.module:name``, sync or async; or several, as
    Parts whose weighted sum it is. Trusted ones are called right here. Others run in ``workers`` processes, started at
    the first use: a call that takes longer than ``timeout`` seconds, or more than ``memory_gb`` on top of what the
    imports took, costs its own value and nothing else. Of async functions a worker runs 64 calls at the same time.
    What they print goes nowhere.
    """

    def __init__(
        self,
        reward: Reward | Callable[[str, str, str], Any] | str | Sequence[Part],
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
        several = isinstance(reward, Sequence) and not isinstance(reward, str)
        self.parts: tuple[Part, ...] = tuple(reward) if several else (Part("", reward, trusted=trusted),)  # type: ignore
        self._here = {
            p: Caller(load_function(part.function) if isinstance(part.function, str) else part.function, Exception)
            for p, part in enumerate(self.parts)
            if part.trusted
        }
        self._away = [p for p in range(len(self.parts)) if p not in self._here]
        self._setup = _pack([self.parts[p].function for p in self._away], memory_gb, timeout)
        self._count = workers
        self._workers: list[_Worker] = []
        self._together: list[bool] = []  # of the functions in workers: whether one worker runs many calls at a time
        self._stillborn = 0
        self._next = 0  # number of the next call: what an earlier one left behind is not taken for a later one
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
        for caller in self._here.values():
            caller.close()

    def start(self) -> None:
        """Start the workers and wait for the first: a reward function that cannot be imported is a ValueError here."""
        if self._away:
            with self._lock:
                self._await_first()

    def score(self, items: Sequence[Item]) -> Scores:
        """One reward for each (response, answer, prompt), in order."""
        outcomes = {p: [caller(item) for item in items] for p, caller in self._here.items()}
        if self._away:
            calls = [(f, item) for item in items for f in range(len(self._away))]
            with self._lock:
                found = self._distribute(calls)
            for f, p in enumerate(self._away):
                outcomes[p] = found[f :: len(self._away)]
        return self._sum(outcomes, len(items))

    def _sum(self, outcomes: dict[int, list[Outcome]], count: int) -> Scores:
        failures, messages = dict.fromkeys(FAILURES.values(), 0), []
        values, parts, failed = [0.0] * count, {}, {}
        for p, part in enumerate(self.parts):
            parts[p] = [value if kind == OK else self.on_error for kind, value, _ in outcomes[p]]
            failed[p] = [kind != OK for kind, _, _ in outcomes[p]]
            values = [total + part.weight * value for total, value in zip(values, parts[p], strict=True)]
            for kind, _, message in outcomes[p]:
                if kind != OK:
                    failures[FAILURES[kind]] += 1
                    messages.append(f"{part.name}: {message}" if part.name else message)
        decides = [p for p, part in enumerate(self.parts) if part.name == CORRECT]
        for i, value in enumerate(values):
            if not abs(value) <= LARGEST:  # nor is nan
                failures[FAILURES[NOT_FINITE]] += 1
                messages.append(f"the sum of weight × part is beyond ±{LARGEST:g}")
                values[i] = self.on_error
                if not decides:
                    failed[0][i] = True
        given = parts[decides[0]] if decides else values
        return Scores(
            values=values,
            failures=failures,
            messages=list(dict.fromkeys(messages))[:MESSAGES],
            solved=[
                value > SOLVED and not any(failed[p][i] for p in decides or failed) for i, value in enumerate(given)
            ],
            parts={part.name: parts[p] for p, part in enumerate(self.parts) if part.name},
        )

    # ---- the pool

    def _await_first(self) -> None:
        self._fill()
        while all(worker.starting for worker in self._workers):
            self._step({}, deque())

    def _distribute(self, given: Sequence[tuple[int, Item]]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        self._await_first()
        first = self._next if self._next + len(given) < NOBODY else 0
        self._next = first + len(given)
        calls = dict(enumerate(given, first))
        alone = deque(i for i, (function, _) in calls.items() if not self._together[function])
        together = deque(i for i, (function, _) in calls.items() if self._together[function])
        try:
            while len(outcomes) < len(calls):
                for place, worker in enumerate(self._workers):
                    if not worker.pending:  # every other one begins with the other kind
                        worker.together = bool(together) and (place % 2 == 0 or not alone)
                    queue = together if worker.together else alone
                    while queue and worker.has_room and worker.send((queue[0], *calls[queue[0]]), self.timeout):
                        queue.popleft()
                    self._listen(worker)
                back: deque[int] = deque()
                self._step(outcomes, back)
                for i in back:
                    (together if self._together[calls[i][0]] else alone).appendleft(i)
        finally:  # interrupted: what is still at work would answer to the wrong calls
            for worker in [w for w in self._workers if w.pending]:
                self._drop(worker)
        return [outcomes[i] for i in calls]

    def _fill(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("this Scorer is closed")
        if inside.inside_worker:
            raise RuntimeError("a script that scores must do so under `if __name__ == '__main__':`")
        while len(self._workers) < self._count:
            worker = _Worker(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._listen(worker)

    def _listen(self, worker: _Worker) -> None:
        """Hear of it when it takes more, while there is more to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
        if events != self._selector.get_key(worker.socket).events:
            self._selector.modify(worker.socket, events, worker)

    def _drop(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end()

    def _step(self, outcomes: dict[int, Outcome], back: deque[int]) -> None:
        """Wait for answers, deaths or the next deadline; write down what became of the calls, or that they are back."""
        wait = min(worker.deadline for worker in self._workers) - time.monotonic()
        for key, events in self._selector.select(None if wait == math.inf else max(wait, 0)):
            worker: _Worker = key.data
            if events & selectors.EVENT_WRITE:
                worker.flush()
                self._listen(worker)
            for number, outcome in worker.receive() if events & selectors.EVENT_READ else ():
                if not self._answered(worker, number, outcome, outcomes, back):
                    break
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now and not w.moved(self.timeout)]:
            kind = DIED if worker.starting else TIMED_OUT
            self._answered(worker, NOBODY, (kind, 0.0, late(self.timeout)), outcomes, back)
        self._fill()

    def _answered(
        self, worker: _Worker, number: int, outcome: Outcome, outcomes: dict[int, Outcome], back: deque[int]
    ) -> bool:
        """Whether the worker lives on. A call that has cost a worker its life is not tried again."""
        kind, _, message = outcome
        if kind == READY:
            worker.starting, worker.deadline, self._stillborn = False, math.inf, 0
            self._together = [flag == "1" for flag in message]
            return True
        if kind == LEAVING:
            worker.leaving = True
            return True
        if number != NOBODY:
            outcomes[number] = outcome
            worker.answered(number)
        if kind == SPENT or number == NOBODY:
            blamed = worker.blamed() if number == NOBODY else ()
            cause = self._drop(worker)
            if kind == BROKEN:
                raise RewardError(message)
            if kind == DIED:
                outcome = (DIED, 0.0, f"worker died: {cause}")
            if worker.starting:
                self._stillborn += 1
                if self._stillborn >= STILLBORN:
                    raise RewardError(f"{STILLBORN} reward workers in a row died before they were ready: {cause}")
            outcomes.update((call, outcome) for call in blamed)
            back.extend(call for call in worker.pending if call not in outcomes)
            return False
        if worker.leaving and not worker.pending:
            self._drop(worker)
            return False
        return True


class _Worker:
    """This side's end of a worker process."""

    def __init__(self, setup: bytes) -> None:
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
        self.together = False  # many calls at a time
        self.pending: dict[int, None] = {}  # calls it has not answered
        self.deadline = time.monotonic() + START
        self._steps = 0  # as last seen
        self._out, self._in = bytearray(), bytearray()
        self._write(setup)

    @property
    def sending(self) -> bool:
        return bool(self._out)

    @property
    def has_room(self) -> bool:
        most = 0 if self.starting or self.leaving or self._out else FLIGHT if self.together else 1
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

    def moved(self, timeout: float) -> bool:
        """Whether a worker past its deadline goes on nevertheless: with many calls, each of which it times itself."""
        if not self.together or self.starting or self._running.read()[0] == self._steps:
            return False
        self._watch(timeout)
        return True

    def _watch(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout + (GRACE if self.together else 0.0)
        self._steps = self._running.read()[0]

    def blamed(self) -> Iterable[int]:
        """The call that is running, or nobody if it was one that is over (its clean-up); of many, if none of them is
        running, any may have done it."""
        call = self._running.read()[1] if self.together else NOBODY
        return tuple(self.pending) if call == NOBODY else (call,) if call in self.pending else ()

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
            yield NOBODY, (DIED, 0.0, "")

    def end(self) -> str:
        """Kill it and all that it started; say how it had ended if it had."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        self._running.close()
        os.close(self._lifeline)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _end(workers: list[_Worker], selector: selectors.BaseSelector, owner: int) -> None:
    if os.getpid() == owner:  # not a fork, whose copy this is
        selector.close()
        while workers:
            workers.pop().end()


def _pack(functions: Sequence[Any], memory_gb: float, timeout: float) -> bytes:
    """All that a worker needs to know."""
    files, named = dict(FILES), []
    for function in functions:
        if isinstance(function, str):
            named.append(":".join(split_spec(function)))
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
        named.append(function)
    return pickle.dumps((pickle.dumps(named), files, memory_gb, timeout))
