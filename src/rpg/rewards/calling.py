"""The one place where a reward function is called: ``Caller``, in a worker process or, if trusted, in this one."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from ..console import describe
from .messages import Item, Kind, Outcome


class Caller:
    """One call, and what came of it. Errors outside ``catch`` pass: Ctrl-C, where this is the user's own process."""

    def __init__(self, function: Callable[..., Any], catch: type[BaseException]) -> None:
        self._function, self._catch = function, catch
        self._runner: Any = None
        call = getattr(type(function), "__call__", None)  # noqa: B004
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def __call__(self, item: Item) -> Outcome:
        try:
            result = self._function(*item)
            if hasattr(result, "__await__"):
                result = self._run(result)
            return self._judge(result)
        except self._catch as error:
            return self._failed(error)

    async def call_async(self, item: Item) -> Outcome:
        """The same, of an async function."""
        try:
            return self._judge(await self._function(*item))
        except self._catch as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> Outcome:
        kind = Kind.OUT_OF_MEMORY if isinstance(error, MemoryError) else Kind.RAISED
        return kind, 0.0, describe(error) + _place(error)

    def _judge(self, result: Any) -> Outcome:
        value = _number(result)
        if value is None or not math.isfinite(value):
            text = type(result).__name__ if value is None else str(value)
            return Kind.NOT_FINITE, 0.0, f"returned {text}, not a finite number"
        return Kind.OK, value, ""

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
