"""What a reward worker does: a fresh interpreter that calls reward functions and says what came of each call.

Plain functions are called one at a time, and the parent has the clock: it kills a worker whose call takes too long.
Async functions share the worker's event loop, many calls at a time (async_calls.py); each has its deadline here. Which
call is running at the moment stands in memory that the parent can read: so a call that blocks the loop, or ends the
process, is known by number and costs no other.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..console import describe
from .calling import load_caller
from .guard import fork_guarded
from .importing import ImportFailed, load_module
from .messages import NO_CALL, Channel, Kind, Running
from .signature import WrongSignature

inside_worker = False
preloads: list[Callable[[], None]] = []  # slow imports of our own rewards: made before the first answer is timed


def work(requests: int, lifeline: int, shared: int, trainer: int) -> None:
    """Answer calls until the other end is closed."""
    global inside_worker
    inside_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (requests, lifeline, shared):
        os.set_inheritable(fd, False)
    guarded = fork_guarded(lifeline, trainer, (requests, shared))
    running, channel = Running(shared), Channel(requests)
    if guarded:
        running.begin(NO_CALL)
    else:
        _die_with(lifeline, trainer)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        pickled, files, memory_gb, timeout = channel.next()
        try:
            functions = _Unpickler(pickled, files).load()
            callers = [load_caller(f, BaseException) for f in functions]
        except BaseException as error:
            said = isinstance(error, ImportFailed | WrongSignature)
            text = str(error) if said else f"cannot load the reward: {describe(error)}"
            return channel.answer(NO_CALL, (Kind.CANNOT_LOAD, 0.0, text))
        if any(getattr(f, "__module__", "").startswith("rpg.") for f in functions):
            for preload in preloads:
                preload()
        _limit(memory_gb)
        async_calls = None
        channel.answer(NO_CALL, (Kind.READY, 0.0, "".join(str(int(caller.is_async)) for caller in callers)))
        while True:
            number, function, item = channel.next()
            if callers[function].is_async:
                if async_calls is None:
                    from .async_calls import AsyncCalls

                    async_calls = AsyncCalls(channel, callers, running, timeout)
                async_calls.run((number, function, item))
            else:
                channel.answer(number, outcome := callers[function](item))
                if outcome[0] == Kind.OUT_OF_MEMORY:
                    return None
    except (EOFError, OSError):  # the trainer is gone, or has given up on this worker
        return None


class _Unpickler(pickle.Unpickler):
    """Finds what was defined in a main script, or in a file that was loaded by its path."""

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        if module not in self._files:
            return super().find_class(module, name)
        value: Any = load_module(self._files[module])
        for attribute in name.split("."):
            value = getattr(value, attribute)
        return value


def _die_with(lifeline: int, trainer: int) -> None:
    """Without a guard: kill this process group when the trainer is gone, however it went."""

    def watch() -> None:
        import select

        while os.getppid() == trainer and not select.select([lifeline], [], [], 1.0)[0]:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


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
