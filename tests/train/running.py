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
from typing import Any

# Single-threaded until it forks: no tensor is made here. A child leaves the loop and goes on as `rpg ARGV …` would.
SERVER = """
import gc, json, os, sys
import rpg.cli, rpg.report, rpg.train.loop, torch.utils.tensorboard
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
            file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, fd)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if job["file_size"]:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
        argv = job["argv"]
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
if argv is not None:
    sys.exit(rpg.cli.main(argv))
"""
TINY = [
    *("--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_new_tokens", "24"),
    *("--eval.problems", "8", "--eval.k", "2", "--log.view", "plain", "--log.tensorboard", "false"),
]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
CHANGING = ("time/", "speed/", "memory/")


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

    def until(self, condition: Callable[[], object], seconds: float = 60, every: float = 0.001) -> bool:
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

    def start(self, *argv: object, cwd: Path | None = None, file_size: int = 0, **env: str) -> Job:
        self.stop()
        self.count += 1
        out, err = self.folder / f"{self.count}.out", self.folder / f"{self.count}.err"
        out.touch()
        err.touch()
        arguments = [str(a) for a in argv]
        job = {"argv": arguments, "cwd": str(cwd or self.folder), "env": env, "file_size": file_size}
        job |= {"out": str(out), "err": str(err)}
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
        self.process.communicate(timeout=60)


# ---- what a run has left ---------------------------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def bits(folder: Path) -> dict[str, Any]:
    """All of a run that must not depend on whether it was killed on the way."""
    rows = [{k: v for k, v in row.items() if not k.startswith(CHANGING)} for row in metrics(folder)]
    found: dict[str, Any] = {"metrics": [json.dumps(row) for row in rows]}
    found["samples"] = (folder / "samples.jsonl").read_bytes()
    about = summary(folder)
    found["summary"] = {k: about[k] for k in ("step", "status", "tokens_total", "reward_failures", "eval")}
    found["checkpoints"] = checkpoints(folder)
    newest = folder / "checkpoints" / found["checkpoints"][-1]
    for path in sorted(newest.rglob("*.safetensors")):
        found[path.relative_to(newest).as_posix()] = path.read_bytes()
    state = json.loads((newest / "trainer" / "state.json").read_text())
    found["state"] = {k: v for k, v in state.items() if k not in ("seconds", "spent", "started", "config")}
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if one[name] != other[name]]
    for name in different:
        if not isinstance(one[name], bytes):
            assert one[name] == other[name], name
    assert not different


def assert_one_line(job: Job, code: int, *texts: str) -> None:
    """One line on stderr that says all of ``texts``, no traceback, this exit code."""
    assert job.code == code, job.text
    assert "Traceback" not in job.text
    errors = [line for line in job.err.splitlines() if line.strip()]
    assert len(errors) == 1, job.err
    assert errors[0].startswith("rpg "), errors[0]
    for text in texts:
        assert text in errors[0], f"{text!r} is not in {errors[0]!r}"
