"""Triton kernels on a CPU: a check is a function of a module, run in a process in which Triton interprets."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def interpreted(module: str, seconds: float = 300) -> dict[str, str]:
    """Run every ``check_*`` function of ``kernels.<module>`` under the interpreter: name -> '' or what it raised."""
    pytest.importorskip("triton")
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    process.stdin.write(f"kernels.{module}\n")
    process.stdin.flush()
    printed = list(itertools.takewhile(lambda line: line != "done\n", process.stdout))
    timer.cancel()
    results = [line.rstrip("\n").split("\t", 2)[1:] for line in printed if line.startswith("check\t")]
    assert results, "".join(printed[-30:])
    return dict(results)


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Does the imports, which take seconds, and forks a child for every module. Ends when its input does."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)


def _run(name: str) -> None:
    import importlib
    import traceback

    module = importlib.import_module(name)
    for key in [key for key in vars(module) if key.startswith("check_")]:
        try:
            getattr(module, key)()
            text = ""
        except Exception:
            text = " | ".join(traceback.format_exc().splitlines()[-6:])
        print(f"check\t{key}\t{text}", flush=True)


if __name__ == "__main__":
    import triton  # noqa: F401

    import tiny  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(line.strip())
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)
