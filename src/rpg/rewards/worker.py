"""What a reward worker does: a fresh interpreter that calls reward functions and says what came of each call.

Plain functions are called one at a time, and the parent has the clock: it kills a worker whose call takes too long.
Async functions share the worker's event loop, many calls at a time; each has its deadline here. In memory that the
parent can read stands which call is running at the moment, so that a call which blocks the loop, or ends the process,
is known by number and costs no other.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any

from .importing import ImportFailed, describe, load_function, load_module

Item = tuple[str, str, str]  # response, answer, prompt
Outcome = tuple[int, float, str]  # one of the kinds below, the reward, a message
Message = tuple[int, int, Item]  # number of the call, of the function, what to call it with

# SPENT: out of memory, which the next call must not suffer from; BROKEN: a reward function cannot be had;
# LEAVING: calls that are over still hold threads, no more may come
OK, RAISED, NOT_FINITE, TIMED_OUT, SPENT, READY, BROKEN, DIED, LEAVING = range(9)
NOBODY = 2**32 - 1  # number in replies that are about no call
LENGTH = struct.Struct("<I")  # of the pickle that follows
REPLY = struct.Struct("<IBdH")  # number, kind, value, length of the message that follows
MESSAGE_BYTES = 2000
RUNNING = struct.Struct("<QI")  # steps begun, number of the call whose step it is
FLIGHT = 64  # calls of async functions in one worker at the same time

CALL: ContextVar[int] = ContextVar("CALL", default=NOBODY)
inside_worker = False


def late(timeout: float) -> str:
    return f"no answer after {timeout:g} s"


def work(requests: int, lifeline: int, shared: int, parent: int) -> None:
    """Answer calls until the other end is closed."""
    global inside_worker
    inside_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (requests, lifeline, shared):
        os.set_inheritable(fd, False)
    _die_with(lifeline, parent)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    inbox = Inbox(requests)
    try:
        pickled, files, memory_gb, timeout = inbox.next()
        try:
            functions = _Unpickler(pickled, files).load()
            callers = [Caller(load_function(f) if isinstance(f, str) else f, BaseException) for f in functions]
        except BaseException as error:
            text = str(error) if isinstance(error, ImportFailed) else f"cannot load the reward: {describe(error)}"
            return reply(requests, NOBODY, (BROKEN, 0.0, text))
        for module in {getattr(f, "__module__", "") for f in functions}:
            if module.startswith("rpg.") and hasattr(sys.modules[module], "preload"):
                sys.modules[module].preload()  # its imports take longer than most answers may
        _limit(memory_gb)
        flight = _Flight(inbox, callers, Running(shared), timeout)
        reply(requests, NOBODY, (READY, 0.0, "".join(str(int(caller.together)) for caller in callers)))
        while True:
            number, function, item = inbox.next()
            if callers[function].together:
                flight.run((number, function, item))
            else:
                reply(requests, number, outcome := callers[function](item))
                if outcome[0] == SPENT:
                    return None
    except (EOFError, OSError):  # the parent is gone, or has given up on this worker
        return None


class Inbox:
    """Messages as they come in."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.whole: deque[Any] = deque()
        self._data = bytearray()

    def next(self) -> Any:
        while not self.whole:
            self.read()
        return self.whole.popleft()

    def read(self) -> None:
        """What there is; waits if there is nothing."""
        data = os.read(self.fd, 2**16)
        if not data:
            raise EOFError
        self._data += data
        while len(self._data) >= LENGTH.size and len(self._data) >= (end := self._end()):
            self.whole.append(pickle.loads(self._data[LENGTH.size : end]))
            del self._data[:end]

    def _end(self) -> int:
        return LENGTH.size + int(LENGTH.unpack_from(self._data)[0])


class Running:
    """Shared by both processes: how many steps have begun here, and of which call the present one is."""

    def __init__(self, fd: int) -> None:
        self._memory, self._steps = mmap.mmap(fd, RUNNING.size), 0

    def begin(self, number: int) -> None:
        self._steps += 1
        RUNNING.pack_into(self._memory, 0, self._steps, number)

    def end(self) -> None:
        RUNNING.pack_into(self._memory, 0, self._steps, NOBODY)

    def read(self) -> tuple[int, int]:
        steps, number = RUNNING.unpack_from(self._memory)
        return steps, number

    def close(self) -> None:
        self._memory.close()


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


class Caller:
    """One call, and what came of it. Errors outside ``catch`` pass: Ctrl-C, where this is the user's own process."""

    def __init__(self, function: Callable[..., Any], catch: type[BaseException]) -> None:
        self._function, self._catch = function, catch
        self._runner: Any = None
        own_call = getattr(type(function), "__call__", None)  # noqa: B004
        self.together = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(own_call)

    def __call__(self, item: Item) -> Outcome:
        try:
            result = self._function(*item)
            if hasattr(result, "__await__"):
                result = self._run(result)
            return self._judge(result)
        except self._catch as error:
            return self._failed(error)

    async def later(self, item: Item) -> Outcome:
        """The same, of an async function."""
        try:
            return self._judge(await self._function(*item))
        except self._catch as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> Outcome:
        return SPENT if isinstance(error, MemoryError) else RAISED, 0.0, describe(error) + _place(error)

    def _judge(self, result: Any) -> Outcome:
        value = _number(result)
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


# ---- many calls at a time --------------------------------------------------------------------------------------------


class _Flight:
    """The event loop of async functions. It runs while there are calls, so that plain functions may use their own."""

    def __init__(self, inbox: Inbox, callers: list[Caller], running: Running, timeout: float) -> None:
        self._inbox, self._callers, self._running, self._timeout = inbox, callers, running, timeout
        self._calls: set[Any] = set()
        self._runner: Any = None
        self._threads: Any = None
        self._leaving = False

    def run(self, message: Message) -> None:
        """This call, and what comes in until all are answered."""
        import asyncio

        if self._runner is None:
            from .threads import Threads

            self._runner, self._threads = asyncio.Runner(), Threads(FLIGHT, self._timeout)
            loop = self._runner.get_loop()
            loop.set_default_executor(self._threads)  # asyncio's own has fewer threads than there are calls
            loop.set_task_factory(self._make_task)
        self._runner.run(self._fly(message))

    async def _fly(self, message: Message) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fd, self._read)
        try:
            self._start(message)
            self._start_all()
            while self._calls:
                await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._inbox.fd)

    def _read(self) -> None:
        try:
            self._inbox.read()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        self._start_all()

    def _start_all(self) -> None:
        while self._inbox.whole and self._callers[self._inbox.whole[0][1]].together:
            self._start(self._inbox.whole.popleft())

    def _start(self, message: Message) -> None:
        import asyncio

        task = asyncio.get_running_loop().create_task(self._answer(*message))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, function: int, item: Item) -> None:
        import asyncio

        context = copy_context()
        context.run(CALL.set, number)
        call = asyncio.get_running_loop().create_task(self._callers[function].later(item), context=context)
        await asyncio.wait({call}, timeout=self._timeout)
        if not call.done():
            call.cancel()  # whatever it makes of that, nobody waits for it
            self._leave_if(self._threads.held_by(number))
            reply(self._inbox.fd, number, (TIMED_OUT, 0.0, late(self._timeout)))
            return
        outcome = call.result()
        self._leave_if(self._threads.worn_out())
        reply(self._inbox.fd, number, outcome)
        if outcome[0] == SPENT:
            os._exit(0)

    def _leave_if(self, stuck: bool) -> None:
        """Before the reply, which would bring in the next call."""
        if stuck and not self._leaving:
            self._leaving = True
            reply(self._inbox.fd, NOBODY, (LEAVING, 0.0, ""))

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> Any:
        """A task that belongs to a call, itself or through the task that made it, notes its steps."""
        import asyncio

        number = (options.get("context") or copy_context()).get(CALL, NOBODY)
        if number != NOBODY:
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


# ---- one call --------------------------------------------------------------------------------------------------------


def reply(fd: int, number: int, outcome: Outcome) -> None:
    kind, value, message = outcome
    text = message.encode("utf-8", "replace")[:MESSAGE_BYTES]
    data = REPLY.pack(number, kind, value, len(text)) + text
    while data:
        data = data[os.write(fd, data) :]


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


# ---- the process -----------------------------------------------------------------------------------------------------


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
