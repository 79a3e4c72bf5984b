"""The real command in real processes, each forked from one that has done the imports: those cost seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Single-threaded until it forks: no tensor is made here. A child leaves the loop and goes on as `rpg ARGV …` would, or
# as `python -c CODE` would.
SERVER = """
import gc, json, os, signal, sys
import rpg.cli, rpg.report, rpg.training.loop, torch.utils.tensorboard
import transformers.models.llama.modeling_llama, transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
gc.freeze()  # so that a child need not look through all of this when it ends
argv = None
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        for name, fd in (("out", 1), ("err", 2)):
            file = os.open(job[name] or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, fd)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, fd in (("out", 1), ("err", 2)):
            if job[name] is None:  # as Python starts where it is closed
                os.close(fd)
                setattr(sys, "std" + name, None)
        if job["file_size"]:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
        argv, code = job["argv"], job["code"]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        exec(job["before"], {})
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
if argv is not None and code is None:
    sys.exit(rpg.cli.main(argv))
elif argv is not None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rpg"]:
        del sys.modules[name]  # an example has to import what it uses; torch and transformers stay
    del rpg
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
LONG = 300.0  # seconds after which whoever waits gives up: a busy machine needs a minute for what takes some seconds


class Job:
    """A running command."""

    def __init__(self, server: Server, argv: list[str], out: Path, err: Path):
        self.server, self.argv, self._out, self._err = server, argv, out, err
        self.code: int | None = None
        self.pid = int(server.read())

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Job:
        """Its exit code; minus the signal that killed it."""
        if self.code is None:
            self.code = int(self.server.read())
        return self

    @property
    def running(self) -> bool:
        return self.code is None and not self.server.can_read()

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8")

    @property
    def text(self) -> str:
        return f"{self.out}\n{self.err}"

    def until(self, condition: Callable[[], object], seconds: float = LONG, every: float = 0.001) -> bool:
        """False if the command ended first."""
        limit = time.monotonic() + seconds
        while not condition():
            if not self.running:
                return False
            assert time.monotonic() < limit, f"waited {seconds} s for {self.argv}: {self.text}"
            time.sleep(every)
        return True


class Server:
    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.last: Job | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, bufsize=0
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            byte = self.process.stdout.read(1)
            assert byte, "the process that forks has ended"
            line += byte
        return line.decode().strip()

    def can_read(self) -> bool:
        import select

        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def start(
        self,
        *argv: object,
        code: str | None = None,
        before: str = "",
        cwd: Path | None = None,
        file_size: int = 0,
        stdout: str | Path | None = "",
        stderr: str | Path | None = "",
        **env: str,
    ) -> Job:
        """``before`` is Python that runs in the process first. Its output goes to files that Job reads, unless others
        are given, or None: closed."""
        self.stop()
        self.count += 1
        out, err = self.folder / f"{self.count}.out", self.folder / f"{self.count}.err"
        out.touch()
        err.touch()
        arguments = [str(a) for a in argv]
        job = {"argv": arguments, "cwd": str(cwd or self.folder), "env": env, "file_size": file_size, "code": code}
        job["before"] = before
        for name, file, given in (("out", out, stdout), ("err", err, stderr)):
            job[name] = given if given is None else str(given or file)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.last = Job(self, arguments, out, err)
        return self.last

    def stop(self) -> None:
        """The command that a failed test has left behind."""
        if self.last is not None and self.last.code is None:
            if self.last.running:
                self.last.kill()
            self.last.wait()

    def close(self) -> None:
        self.stop()
        self.process.communicate(timeout=LONG)
