"""Settings of tiny runs, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forked import ENV, Job, Server  # noqa: F401

TINY = [
    *("--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_new_tokens", "24"),
    *("--eval.problems", "8", "--eval.k", "2", "--log.view", "plain", "--log.tensorboard", "false"),
]
CHANGING = ("time/", "speed/", "memory/")


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


def bits(folder: Path, card: bool = True) -> dict[str, Any]:
    """All of a run that must not depend on whether it was killed on the way. ``card``: with its command line."""
    rows = [{k: v for k, v in row.items() if not k.startswith(CHANGING)} for row in metrics(folder)]
    found: dict[str, Any] = {"metrics": [json.dumps(row) for row in rows]}
    found["samples"] = (folder / "samples.jsonl").read_bytes()
    about = summary(folder)
    found["summary"] = {k: about[k] for k in ("step", "status", "tokens_total", "reward_failures", "lights", "eval")}
    found["checkpoints"] = checkpoints(folder)
    newest = folder / "checkpoints" / found["checkpoints"][-1]
    for path in sorted(newest.rglob("*.safetensors")):
        found[path.relative_to(newest).as_posix()] = path.read_bytes()
    if card:
        found["card"] = (newest / "model" / "README.md").read_text(encoding="utf-8")
    state = json.loads((newest / "trainer" / "state.json").read_text())
    found["state"] = {k: v for k, v in state.items() if k not in ("seconds", "spent", "started", "config")}
    return found


def without_lights(err: str) -> str:
    """Stderr without warning lights, which may well light in runs as small as those of tests."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("warning: step "))


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
