"""Scorer: rewards for responses, from functions that nobody has checked.

Trusted functions are called right here; others in processes of their own, with a deadline and a memory limit.
"""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import worker as worker_module
from .calling import load_caller
from .messages import NO_CALL, Item, Kind, Outcome, late
from .signature import function_name
from .worker_process import WorkerProcess, pack_setup

RAISED, TIMED_OUT, NOT_FINITE = "raised", "timed_out", "not_finite"  # keys of Scores.failures
FAILURES: dict[int, str] = {Kind.TIMED_OUT: TIMED_OUT, Kind.NOT_FINITE: NOT_FINITE}  # other kinds: raised
MOST_MESSAGES = 5
SOLVED = 0.5  # a larger reward counts as solved
CORRECT = "correct"  # the part that decides alone whether a response is solved, where there is one
LARGEST = 3.4e38  # reward, either way: training is in float32
MOST_FAILED_STARTS = 3  # workers in a row that die before they are ready, after which it is no accident


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
class Calls:
    """Of one function: how many were made, how many failed, and why the first of these did."""

    function: str
    made: int
    failed: int
    cause: str

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.function, self.made + other.made, self.failed + other.failed, self.cause or other.cause)


@dataclass(frozen=True)
class Scores:
    values: list[float]  # sums of weight × part
    failures: dict[str, int]  # calls: raised, timed_out, not_finite
    messages: list[str]  # the first few kinds of failure, one line each
    solved: list[bool]
    parts: dict[str, list[float]] = field(default_factory=dict)  # by name, without their weights
    calls: dict[str, Calls] = field(default_factory=dict)  # by name; of a reward without parts the name is empty


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
        self._trusted = {p: load_caller(part.function, Exception) for p, part in enumerate(self.parts) if part.trusted}
        self._untrusted = [p for p in range(len(self.parts)) if p not in self._trusted]
        self._setup = pack_setup([self.parts[p].function for p in self._untrusted], memory_gb, timeout)
        self._count = workers
        self._workers: list[WorkerProcess] = []
        self._is_async: list[bool] = []  # of the functions in workers
        self._failed_starts = 0
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
        for caller in self._trusted.values():
            caller.close()

    def start(self) -> None:
        """Start the workers and wait for the first: a reward function that cannot be imported is a ValueError here."""
        if self._untrusted:
            with self._lock:
                self._await_first()

    def score(self, items: Sequence[Item]) -> Scores:
        """One reward for each (response, answer, prompt), in order."""
        outcomes = {p: [caller(item) for item in items] for p, caller in self._trusted.items()}
        if self._untrusted:
            with self._lock:
                answers = self._distribute([(f, item) for item in items for f in range(len(self._untrusted))])
            for f, p in enumerate(self._untrusted):
                outcomes[p] = answers[f :: len(self._untrusted)]
        return self._sum(outcomes, len(items))

    def _sum(self, outcomes: dict[int, list[Outcome]], count: int) -> Scores:
        failures, messages = dict.fromkeys((RAISED, TIMED_OUT, NOT_FINITE), 0), []
        values, parts, failed = [0.0] * count, {}, {}
        for p, part in enumerate(self.parts):
            parts[p] = [value if kind == Kind.OK else self.on_error for kind, value, _ in outcomes[p]]
            failed[p] = [kind != Kind.OK for kind, _, _ in outcomes[p]]
            values = [total + part.weight * value for total, value in zip(values, parts[p], strict=True)]
            for kind, _, message in outcomes[p]:
                if kind != Kind.OK:
                    failures[FAILURES.get(kind, RAISED)] += 1
                    messages.append(f"{part.name}: {message}" if part.name else message)
        decides = [p for p, part in enumerate(self.parts) if part.name == CORRECT]
        for i, value in enumerate(values):
            if not abs(value) <= LARGEST:  # nor is nan
                failures[NOT_FINITE] += 1
                messages.append(f"the sum of weight × part is beyond ±{LARGEST:g}")
                values[i] = self.on_error
                if not decides:
                    failed[0][i] = True
        deciding = parts[decides[0]] if decides else values
        return Scores(
            values=values,
            failures=failures,
            messages=list(dict.fromkeys(messages))[:MOST_MESSAGES],
            solved=[
                value > SOLVED and not any(failed[p][i] for p in decides or failed) for i, value in enumerate(deciding)
            ],
            parts={part.name: parts[p] for p, part in enumerate(self.parts) if part.name},
            calls={part.name: _count(part, outcomes[p]) for p, part in enumerate(self.parts)},
        )

    # ---- the pool

    def _await_first(self) -> None:
        self._fill()
        while all(worker.starting for worker in self._workers):
            self._step({}, deque())

    def _distribute(self, wanted: Sequence[tuple[int, Item]]) -> list[Outcome]:
        """Have the workers make these calls, (number of the function, item) each."""
        outcomes: dict[int, Outcome] = {}
        self._await_first()
        first = self._next if self._next + len(wanted) < NO_CALL else 0
        self._next = first + len(wanted)
        calls = dict(enumerate(wanted, first))
        plain = deque(i for i, (function, _) in calls.items() if not self._is_async[function])
        of_async = deque(i for i, (function, _) in calls.items() if self._is_async[function])
        try:
            while len(outcomes) < len(calls):
                for place, worker in enumerate(self._workers):
                    if not worker.pending:  # every other one begins with the other kind
                        worker.is_async = bool(of_async) and (place % 2 == 0 or not plain)
                    queue = of_async if worker.is_async else plain
                    while queue and worker.has_room and worker.send((queue[0], *calls[queue[0]]), self.timeout):
                        queue.popleft()
                    self._listen(worker)
                back: deque[int] = deque()
                self._step(outcomes, back)
                for i in back:
                    (of_async if self._is_async[calls[i][0]] else plain).appendleft(i)
        finally:  # interrupted: what is still at work would answer to the wrong calls
            for worker in [w for w in self._workers if w.pending]:
                self._drop(worker)
        return [outcomes[i] for i in calls]

    def _fill(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("this Scorer is closed")
        if worker_module.inside_worker:
            raise RuntimeError("a script that scores must do so under `if __name__ == '__main__':`")
        while len(self._workers) < self._count:
            worker = WorkerProcess(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._listen(worker)

    def _listen(self, worker: WorkerProcess) -> None:
        """Hear of it when it takes more, while there is more to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
        if events != self._selector.get_key(worker.socket).events:
            self._selector.modify(worker.socket, events, worker)

    def _drop(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end()

    def _step(self, outcomes: dict[int, Outcome], back: deque[int]) -> None:
        """Wait for answers, deaths or the next deadline; write down what became of the calls, or that they are back."""
        wait = min(worker.deadline for worker in self._workers) - time.monotonic()
        for key, events in self._selector.select(None if wait == math.inf else max(wait, 0)):
            worker: WorkerProcess = key.data
            if events & selectors.EVENT_WRITE:
                worker.flush()
                self._listen(worker)
            for number, outcome in worker.receive() if events & selectors.EVENT_READ else ():
                if not self._answered(worker, number, outcome, outcomes, back):
                    break
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now and not w.still_moving(self.timeout)]:
            kind = Kind.DIED if worker.starting else Kind.TIMED_OUT
            self._answered(worker, NO_CALL, (kind, 0.0, late(self.timeout)), outcomes, back)
        self._fill()

    def _answered(
        self, worker: WorkerProcess, number: int, outcome: Outcome, outcomes: dict[int, Outcome], back: deque[int]
    ) -> bool:
        """Whether the worker lives on. A call that has cost a worker its life is not tried again."""
        kind, _, message = outcome
        if kind == Kind.READY:
            worker.starting, worker.deadline, self._failed_starts = False, math.inf, 0
            self._is_async = [flag == "1" for flag in message]
            return True
        if kind == Kind.LEAVING:
            worker.leaving = True
            return True
        if number != NO_CALL:
            if number not in worker.pending:  # nobody asked
                return True
            outcomes[number] = outcome
            worker.answered(number)
        if kind == Kind.OUT_OF_MEMORY or number == NO_CALL:
            blamed = worker.blamed() if number == NO_CALL else ()
            cause = self._drop(worker)
            if kind == Kind.CANNOT_LOAD:
                raise RewardError(message)
            if kind == Kind.DIED:
                outcome = (Kind.DIED, 0.0, f"worker died: {cause}")
            if worker.starting:
                self._failed_starts += 1
                if self._failed_starts >= MOST_FAILED_STARTS:
                    raise RewardError(
                        f"{MOST_FAILED_STARTS} reward workers in a row died before they were ready: {cause}"
                    )
            outcomes.update((call, outcome) for call in blamed)
            back.extend(call for call in worker.pending if call not in outcomes)
            return False
        if worker.leaving and not worker.pending:
            self._drop(worker)
            return False
        return True


def _count(part: Part, outcomes: Sequence[Outcome]) -> Calls:
    causes = [message for kind, _, message in outcomes if kind != Kind.OK]
    return Calls(function_name(part.function), len(outcomes), len(causes), causes[0] if causes else "")


def _end(workers: list[WorkerProcess], selector: selectors.BaseSelector, owner: int) -> None:
    if os.getpid() == owner:  # not a fork, whose copy this is
        selector.close()
        while workers:
            workers.pop().end()
