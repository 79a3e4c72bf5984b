"""The threads of async reward functions (asyncio.to_thread): whose they are, and which of them are stuck."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .worker import CALL


class Threads(ThreadPoolExecutor):
    """A thread cannot be stopped: one whose call is over, and which goes on, is lost to all later calls."""

    def __init__(self, most: int, timeout: float) -> None:
        super().__init__(most)
        self._most, self._timeout = most, timeout
        self._jobs: dict[Future[Any], tuple[int, float]] = {}  # number of the call, when it was given

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job = super().submit(fn, *args, **kwargs)
        self._jobs[job] = CALL.get(), time.monotonic()
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return job

    def held_by(self, number: int) -> bool:
        """Whether a thread is at work for this call."""
        return any(call == number and job.running() for job, (call, _) in list(self._jobs.items()))

    def worn_out(self) -> bool:
        """Half of them are at work for longer than a call may take: for calls that did not wait for them."""
        long_ago = time.monotonic() - self._timeout
        return sum(given < long_ago and job.running() for job, (_, given) in list(self._jobs.items())) >= self._most / 2
