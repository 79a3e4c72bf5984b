"""Triton kernels on a CPU: a check is a function of a module, run in a process in which Triton interprets."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

TESTS = Path(__file__).resolve().parents[1]


def interpreted(module: str, check: str, seconds: float = 300) -> str:
    """Run a ``check_*`` function of ``kernels.<module>`` under the interpreter: '' or what it raised."""
    pytest.importorskip("triton")
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    process.stdin.write(f"kernels.{module} {check}\n")
    process.stdin.flush()
    printed = list(itertools.takewhile(lambda line: line != "done\n", process.stdout))
    timer.cancel()
    results = [line.rstrip("\n").split("\t", 1)[1] for line in printed if line.startswith("check\t")]
    assert len(results) == 1, "".join(printed[-30:])
    return results[0]


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Does the imports, which take seconds, and forks a child for every check. Ends when its input does."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)


def _run(check: Callable[[], object]) -> None:
    try:
        check()
        text = ""
    except Exception:
        text = " | ".join(traceback.format_exc().splitlines()[-6:])
    print(f"check\t{text}", flush=True)


def _serve(module: str) -> TextIO:
    """A child that has imported a module, which may change the interpreter, and forks for every check that it reads."""
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return os.fdopen(write, "w")
    os.close(write)
    imported = importlib.import_module(module)
    for check in os.fdopen(read):
        child = os.fork()
        if child == 0:
            _run(getattr(imported, check.strip()))
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    import sympy  # noqa: F401  what checks use, so that it is imported once
    import torch._dynamo  # noqa: F401
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton.experimental.gluon  # noqa: F401

    import tiny  # noqa: F401

    modules: dict[str, TextIO] = {}
    for line in sys.stdin:
        module, check = line.split()
        if module not in modules:
            modules[module] = _serve(module)
        print(check, file=modules[module], flush=True)
