"""Several processes as torchrun would start them, each forked from one that has done the imports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from forked import ENV, LONG

# Single-threaded until it forks: no tensor is made here.
SERVER = """
import faulthandler, gc, json, os, sys
import rpg.cli, rpg.report, rpg.training.loop, torch.distributed.fsdp, torch.distributed.tensor, torch._dynamo
import transformers.models.llama.modeling_llama, transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
gc.freeze()
argv = None
print("ready", flush=True)
for line in sys.stdin:
    job, pids = json.loads(line), []
    for rank, out in enumerate(job["out"]):
        pid = os.fork()
        if pid == 0:
            os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
            for fd, name in ((1, out), (2, job["err"][rank])):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            faulthandler.enable()  # a crash of the interpreter says where
            argv = job["argv"]
            break
        pids.append(pid)
    if argv is not None:
        break
    print(*pids, flush=True)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
if argv is not None and argv[0].endswith(".py"):
    import runpy
    runpy.run_path(argv[0], run_name="__main__")
elif argv is not None:
    sys.exit(rpg.cli.main(argv))
"""


class Launch:
    """Commands that run together."""

    def __init__(self, launcher: Launcher, pids: list[int], out: list[Path], err: list[Path], store: object):
        self.launcher, self.pids, self._out, self._err = launcher, pids, out, err
        self.store = store  # which ends with it
        self.codes: list[int] | None = None

    def kill(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, seconds: float = LONG) -> Launch:
        """Their exit codes."""
        if self.codes is None:
            self.codes = self.launcher.read_numbers(seconds)
        return self

    def until(self, condition: Callable[[], object], seconds: float = LONG) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, self.text
            time.sleep(0.005)

    @property
    def out(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self._out]

    @property
    def err(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self._err]

    @property
    def text(self) -> str:
        return "\n".join(self.out + self.err)


class Launcher:
    """Runs ``rpg …``, or a Python file. Stands in for torchrun: it holds the store, and sets what torchrun sets."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.last: Launch | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, bufsize=0
        )
        self._read(LONG)

    def _read(self, seconds: float) -> str:
        assert self.process.stdout is not None
        line, limit = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = limit - time.monotonic()
            ready = select.select([self.process.stdout], [], [], max(0, left))[0]
            assert ready, f"nothing in {seconds} s: {self.last.text if self.last else ''}"
            line += self.process.stdout.read(1)
        return line.decode()

    def read_numbers(self, seconds: float = LONG) -> list[int]:
        return [int(x) for x in self._read(seconds).split()]

    def start(self, *argv: object, ranks: int = 2, **env: str) -> Launch:
        self.stop()
        self.count += 1
        out = [self.folder / f"{self.count}-{rank}.out" for rank in range(ranks)]
        err = [path.with_suffix(".err") for path in out]
        for path in (*out, *err):
            path.touch()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        env.setdefault("LOCAL_WORLD_SIZE", str(ranks))
        job = {"argv": [str(a) for a in argv], "env": env, "out": [*map(str, out)], "err": [*map(str, err)]}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.last = Launch(self, self.read_numbers(), out, err, store)
        return self.last

    def stop(self) -> None:
        """What a failed test has left behind."""
        if self.last is not None and self.last.codes is None:
            for rank in range(len(self.last.pids)):
                with contextlib.suppress(ProcessLookupError):
                    self.last.kill(rank, signal.SIGKILL)
            self.last.wait()

    def close(self) -> None:
        self.stop()
        self.process.communicate(timeout=LONG)
