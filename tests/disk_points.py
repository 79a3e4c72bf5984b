"""Every point at which a process touches the disk below a folder, and what is to happen at one of them.

Run in a process of its own before the command (``Server.start(before=…)``): it counts calls of the system's functions,
writes a line for each into a file, and at the call that is asked for kills the process or lets the call fail. What is
being written at that moment is half there.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTIONS = ("mkdir", "unlink", "rmdir", "rename", "replace", "link", "symlink", "fsync", "ftruncate")
real_open, real_write, lock = os.open, os.write, threading.RLock()
count = 0


def install(root: str, log: str, at: int = 0, fault: str = "") -> None:
    """``at``: the number of the call, from 1; ``fault``: the name of its error, or "" for SIGKILL."""
    import safetensors.torch

    out = real_open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def place(where: Any, dir_fd: int | None = None) -> str:
        if isinstance(where, int):
            return os.readlink(f"/proc/self/fd/{where}")
        above = "" if dir_fd is None else place(dir_fd)
        head, tail = os.path.split(os.path.join(above, os.fspath(where)))
        return os.path.join(os.path.realpath(head), tail)

    def touch(kind: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        global count
        if not path.startswith(root + os.sep):
            return
        with lock:
            count += 1
            real_write(out, f"{kind} {os.path.relpath(path, root)}\n".encode())
            if count != at:
                return
            half()
            if not fault:
                os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), path)

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *args: Any, **kwargs: Any) -> Any:
            new = args[0] if kind in ("rename", "replace", "symlink") else where
            touch(kind, place(new, kwargs.get("dir_fd")))
            return function(where, *args, **kwargs)

        return call

    for kind in FUNCTIONS:
        function = getattr(os, kind)
        patched = counted(kind, function)
        setattr(os, kind, patched)
        for known in (os.supports_dir_fd, os.supports_follow_symlinks):  # shutil asks whether they can
            if function in known:
                known.add(patched)

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            touch("open", place(path, kwargs.get("dir_fd")))
        return real_open(path, flags, *args, **kwargs)

    def write(file: int, data: bytes) -> int:
        touch("write", place(file), lambda: real_write(file, data[: len(data) // 2]))
        return real_write(file, data)

    open_file = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int):
            touch("open", place(file))
        return open_file(file, mode, *args, **kwargs)

    serialize_file = safetensors.torch.serialize_file

    def save(tensors: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        def half() -> None:
            serialize_file(tensors, file, *args, **kwargs)
            os.truncate(file, Path(file).stat().st_size // 2)

        touch("save", place(file), half)
        serialize_file(tensors, file, *args, **kwargs)

    os.open, os.write = open_, write
    io.open = builtins.open = opened
    safetensors.torch.serialize_file = save
