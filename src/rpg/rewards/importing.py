"""A user's function by name, ``file.py:name`` or ``package.module:name``; one-line errors where it cannot be had."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ..console import describe, nearest

FILES: dict[str, str] = {}  # name in sys.modules -> file, of what load_file_module has loaded


class ImportFailed(ValueError):
    """Its text is one line for the user."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``spec`` names. The file's own folder, or the working directory, joins the import path."""
    where, name = split_spec(spec)
    try:
        module = load_module(where)
    except (Exception, SystemExit) as error:
        line = line_in(error, where)
        raise ImportFailed(f"cannot import {where}: {describe(error)}{f' (line {line})' if line else ''}") from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if hasattr(module, name):
        raise ImportFailed(f"{spec} is no function but {type(function).__name__}")
    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    near = nearest(name, names)
    raise ImportFailed(f"{where} has no function {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def split_spec(spec: str) -> tuple[str, str]:
    """(absolute path of the file, or module; name in it), without importing anything."""
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise ImportFailed(f"{spec!r} names no function; write file.py:name or package.module:name")
    if not where.endswith(".py"):
        return where, name
    path = Path(where).expanduser().absolute()
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.py")])
        raise ImportFailed(f"no such file: {where}" + (f"; did you mean {path.with_name(near)}?" if near else ""))
    return str(path), name


def load_module(where: str) -> ModuleType:
    """A module by absolute path or by dotted name. Raises whatever the import raises."""
    if os.path.isabs(where):
        return load_file_module(where)
    _importable(os.getcwd())
    return importlib.import_module(where)


def load_file_module(path: str) -> ModuleType:
    """Under a name of its own, the same in every process, so that a file called json.py replaces nothing."""
    name = f"{Path(path).stem.replace('.', '_')}_{zlib.crc32(path.encode('utf-8', 'surrogateescape')):08x}"
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    _importable(str(Path(path).parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    FILES[name] = path
    return module


def _importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)  # last: nothing in it hides a module of Python's


def line_in(error: BaseException, path: str) -> int | None:
    """The last line of that file which the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
