"""The one place where a reward function is called: ``Caller``, in a worker process or, if trusted, in this one."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..console import describe
from .importing import load_function
from .messages import Item, Kind, Outcome
from .signature import check_signature


def load_caller(function: Callable[..., Any] | str, catch: type[BaseException]) -> Caller:
    """Of a function or the name of one. What cannot be had, or cannot be called, is a ValueError of one line."""
    if isinstance(function, str):
        spec, function = function, load_function(function)
        check_signature(function, spec)
    else:
        check_signature(function)
    return Caller(function, catch)


class Caller:
    """One call, and what came of it. Errors outside ``catch`` pass: Ctrl-C, where this is the user's own process."""

    def __init__(self, function: Callable[..., Any], catch: type[BaseException]) -> None:
        self._function, self._catch, self._file = function, catch, _file(function)
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
        return kind, 0.0, describe(error) + _place(error, self._file)

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


def _file(function: Any) -> str:
    """Where the function is written."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else str(code.co_filename)


def _place(error: BaseException, file: str) -> str:
    """(reward.py:12), the last line of the function's own file on the way to the error; else the line that raised."""
    trace, place = error.__traceback__, ("", 0)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and (name == file or place[0] != file):
            place = name, trace.tb_lineno
        trace = trace.tb_next
    return f" ({os.path.basename(place[0])}:{place[1]})" if place[0] else ""
