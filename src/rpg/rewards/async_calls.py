"""Calls of async reward functions, many at a time, in a worker's event loop.

A worker imports this at its first such call: asyncio takes longer than the rest of a worker's start.
"""

from __future__ import annotations

import asyncio
import os
import time
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

from .calling import Caller
from .messages import MOST_ASYNC, NO_CALL, Channel, Item, Kind, Message, Running, late, only_in

CALL: ContextVar[int] = ContextVar("CALL", default=NO_CALL)  # number of the call that a task or a thread belongs to


class AsyncCalls:
    """The event loop of async functions. It runs while there are calls, so that plain functions may use their own."""

    def __init__(self, channel: Channel, callers: list[Caller], running: Running, timeout: float) -> None:
        self._channel, self._callers, self._running, self._timeout = channel, callers, running, timeout
        self._calls: set[Any] = set()
        self._leaving = False
        self._runner, self._threads = asyncio.Runner(), Threads(MOST_ASYNC, timeout)
        loop = self._runner.get_loop()
        loop.set_default_executor(self._threads)  # asyncio's own has fewer threads than there are calls
        loop.set_task_factory(self._make_task)

    def run(self, message: Message) -> None:
        """This call, and what comes in until all are answered."""
        self._runner.run(self._until_answered(message))

    async def _until_answered(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fd, self._read)
        try:
            self._start(message)
            self._start_all()
            while self._calls:
                await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._channel.fd)

    def _read(self) -> None:
        try:
            self._channel.read()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        self._start_all()

    def _start_all(self) -> None:
        while self._channel.whole and self._callers[self._channel.whole[0][1]].is_async:
            self._start(self._channel.whole.popleft())

    def _start(self, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(*message))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, function: int, item: Item) -> None:
        context = copy_context()
        context.run(CALL.set, number)
        call = asyncio.get_running_loop().create_task(self._callers[function].call_async(item), context=context)
        await asyncio.wait({call}, timeout=self._timeout)
        if not call.done():
            call.cancel()  # whatever it makes of that, nobody waits for it
            self._leave_if(self._threads.held_by(number))
            self._channel.answer(number, (Kind.TIMED_OUT, 0.0, late(self._timeout)))
            return
        outcome = call.result()
        self._leave_if(self._threads.half_stuck())
        self._channel.answer(number, outcome)
        if outcome[0] == Kind.OUT_OF_MEMORY:
            os._exit(0)

    def _leave_if(self, stuck: bool) -> None:
        """Before the reply, which would bring in the next call."""
        if stuck and not self._leaving:
            self._leaving = True
            self._channel.answer(NO_CALL, (Kind.LEAVING, 0.0, ""))

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> Any:
        """A task that belongs to a call, itself or through the task that made it, notes its steps."""
        number = (options.get("context") or copy_context()).get(CALL, NO_CALL)
        if number != NO_CALL:
            coroutine = _noted(coroutine, number, self._running)
        return asyncio.Task(coroutine, loop=loop, **options)


async def _noted(inner: Coroutine[Any, Any, Any], number: int, running: Running) -> Any:
    return await _steps(inner, number, running)


@types.coroutine
def _steps(inner: Coroutine[Any, Any, Any], number: int, running: Running) -> Generator[Any, Any, Any]:
    go: Callable[[Any], Any] = inner.send
    value: Any = None
    while True:
        running.begin(number)
        try:
            awaited = go(value)
        except StopIteration as end:
            return end.value
        finally:
            running.end()
        try:
            value = yield awaited
            go = inner.send
        except BaseException as error:
            go, value = inner.throw, error


class Threads(ThreadPoolExecutor):
    """A thread cannot be stopped: one whose call is over, and which goes on, is lost to all later calls."""

    def __init__(self, most: int, timeout: float) -> None:
        super().__init__(most)
        self._most, self._timeout = most, timeout
        self._jobs: dict[Future[Any], tuple[int, float]] = {}  # number of the call, when it began

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job = super().submit(_call, os.getpid(), fn, *args, **kwargs)
        self._jobs[job] = CALL.get(), time.monotonic()
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return job

    def held_by(self, number: int) -> bool:
        """Whether a thread is at work for this call."""
        return any(call == number and job.running() for job, (call, _) in list(self._jobs.items()))

    def half_stuck(self) -> bool:
        """Half of them are at work for longer than a call may take: for calls that did not wait for them."""
        long_ago = time.monotonic() - self._timeout
        return sum(begun < long_ago and job.running() for job, (_, begun) in list(self._jobs.items())) >= self._most / 2


def _call(owner: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    finally:
        only_in(owner)
