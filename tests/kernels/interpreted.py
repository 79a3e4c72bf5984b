"""Triton kernels on a CPU: a check is a function of a module, run in a process in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def interpreted(module: str, seconds: float = 300) -> dict[str, str]:
    """Run every ``check_*`` function of ``kernels.<module>`` under the interpreter: name -> '' or what it raised."""
    pytest.importorskip("triton")
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, f"kernels.{module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [line.split("\t", 2)[1:] for line in done.stdout.splitlines() if line.startswith("check\t")]
    assert results, f"{module} has no check"
    return dict(results)


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
    _run(sys.argv[1])
