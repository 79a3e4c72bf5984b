"""The process between the trainer and a worker, on Linux: when a worker ends, nothing that it started stays behind.

A worker can be killed at any time, so it cannot clean up itself. The fresh interpreter therefore forks before anything
of the user's is imported: the child becomes the worker, the parent stays and guards it. The kernel gives it the orphans
among the worker's descendants, whatever session they are in (it is their "subreaper"). At the worker's end, the
trainer's word or the trainer's end it kills its children until there are none, and then ends as the worker did.

What escapes: processes of another user (sudo), those that a service starts for the function (docker, systemd-run), and
all of them if the guard itself is killed. Other systems have no subreapers: there the worker's process group is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK = 1.0  # seconds between looks for orphans that have ended, and for a trainer that is gone while its forks live on
KILL_SECONDS = 5.0  # for all to be gone; those of another user, or stuck in the kernel, never are


def fork_guarded(lifeline: int, trainer: int, workers_own: Iterable[int]) -> bool:
    """Returns in the worker alone. False: there can be no guard here, and nothing was done.

    ``lifeline`` can be read, or ends, when the worker is to end. The guard closes its copies of ``workers_own``.
    """
    prctl = _prctl() if sys.platform == "linux" else None
    if prctl is None or prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        return False
    guard = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # whoever sends them does not mean it
    worker = os.fork()
    if worker:
        for fd in workers_own:
            os.close(fd)
        _guard(worker, lifeline, trainer)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(0)
    os.setsid()  # a function that kills its own process group leaves the guard alone
    os.close(lifeline)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def _prctl() -> Callable[[int, int], int] | None:
    try:
        import ctypes

        function = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return lambda option, value: int(function(option, value, 0, 0, 0))


def _guard(worker: int, lifeline: int, trainer: int) -> NoReturn:
    status: int = signal.SIGKILL  # as of a worker that was killed
    try:
        import select

        watched, pause = select.poll(), LOOK
        watched.register(lifeline, select.POLLIN)
        try:
            watched.register(os.pidfd_open(worker), select.POLLIN)
        except (OSError, AttributeError):  # an old kernel
            pause = 0.05
        ended: list[int] = []
        over = False
        while not ended and not over and os.getppid() == trainer:
            ready = [fd for fd, _ in watched.poll(1000 * pause)]
            over = lifeline in ready
            _reap(worker, ended)
        _kill_children(worker, ended)
        status = ended[0] if ended else status
    finally:
        _end_as(status)


def _reap(worker: int, ended: list[int]) -> bool:
    """Whether there are children left. The status of the worker is written down."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == worker:
            ended.append(status)


def _kill_children(worker: int, ended: list[int]) -> None:
    """The children of those who die become children of this process, and are next."""
    deadline = time.monotonic() + KILL_SECONDS
    while _reap(worker, ended) and time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _children() -> list[int]:
    me = os.getpid()
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    found = []
    for process in Path("/proc").glob("[0-9]*"):  # a kernel without such lists
        with contextlib.suppress(OSError):
            if int(Path(process, "stat").read_text().rpartition(") ")[2].split()[1]) == me:
                found.append(int(process.name))
    return found


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # of SIGKILL there is nothing to set
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
