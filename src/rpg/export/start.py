"""Where an exported run starts from: the recipe's model, or a checkpoint of a run of ``rpg train``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models import BUILTIN
from ..run import checkpoint
from ..run.config import Config
from ..training.summary import best_of


@dataclass(frozen=True)
class Start:
    model: str  # a hub id or an absolute path
    adapter: str | None = None  # folder of a LoRA adapter on top of it
    step: int = 0  # steps that are done
    problem: int = 0  # where the run was in an endless task
    where: str = ""  # the checkpoint, in words

    def steps_left(self, config: Config) -> int:
        left = config.steps - self.step
        if left < 1:
            raise ValueError(f"{self.where} has done its {config.steps} steps: give --steps, more than {self.step}")
        return left


def fresh(config: Config) -> Start:
    """The recipe's model."""
    name = config.model
    if name.endswith(".gguf"):
        raise ValueError(f"model {name}: other engines read no .gguf; export --from a checkpoint, a plain folder")
    if name == "builtin":
        return Start(str(BUILTIN))
    path = Path(name).expanduser()
    if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        return Start(name)
    return _with_adapter(path.absolute())


def from_run(run: Path, which: str) -> Start:
    """The newest checkpoint of a run, its best one, or the one of a step; or the folder of a checkpoint itself."""
    if run.parent.name == "checkpoints" and run.name.startswith("step-"):
        run, which = run.parent.parent, str(int(run.name.removeprefix("step-")))
    found = checkpoint.folders(run / "checkpoints")
    if not found:
        raise ValueError(f"--from {run}: there is no checkpoint in it")
    newest = checkpoint.load(run / "checkpoints", lambda text: print(f"rpg export: {text}", file=sys.stderr))
    if newest is None:
        raise ValueError(f"--from {run}: no checkpoint in it is whole")
    evals = [e for e in newest.state["evals"] if e["step"] in found]
    if which == "last" or (which == "best" and not evals):
        chosen = newest
    elif which == "best" or (which.isdigit() and int(which) in found):
        chosen = checkpoint.read(found[best_of(evals)["step"] if which == "best" else int(which)])
    else:
        known = ", ".join(map(str, sorted(found)))
        raise ValueError(f"--from {run}: there is no checkpoint {which!r}; there are best, last, {known}")
    start = _with_adapter(chosen.model_folder.absolute())
    said = f"{which} checkpoint of {run}, step {chosen.step}"
    return Start(start.model, start.adapter, chosen.step, chosen.state["cursor"]["problem"], said)


def _with_adapter(folder: Path) -> Start:
    settings = folder / "adapter_config.json"
    if not settings.is_file():
        return Start(str(folder))
    base = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return Start(str(BUILTIN) if base == "builtin" else base, str(folder))


def is_adapter(model: str) -> bool:
    """Whether the name is a folder of an adapter."""
    return (Path(model).expanduser() / "adapter_config.json").is_file()


def lora_of(folder: str) -> dict[str, Any]:
    """The settings of the LoRA adapter in a folder, as PEFT wrote them; what verl cannot have is refused."""
    found: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    kind = str(found.get("peft_type", "")).lower()
    if kind != "lora":
        raise ValueError(f"{folder} is a {kind} adapter, which has no counterpart in verl: only lora there")
    for name in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_dropout"):
        if found.get(name):
            raise ValueError(f"{folder}: its adapter has {name}={found[name]}, which has no counterpart in verl")
    return found


def check_reference(start: Start, config: Config, rule: str, engine: str) -> None:
    """A run that goes on needs its reference too; other engines take the model they are given for it."""
    if start.step == 0 or rule == "old" or (rule == "frozen" and start.adapter):
        return
    if rule == "every" and start.step % config.reference.every == 0:
        return  # renewed at the checkpoint: it is the checkpoint
    raise ValueError(
        f"reference.update={rule}: {engine} would take the checkpoint of step {start.step} for the reference, which it "
        "is not; give --reference.update old or every (anew from here), or export without --from"
    )


def tensor_parallel(config: Config) -> int:
    """GPUs of each vLLM."""
    given = config.rollout.vllm.get("tensor_parallel_size", 1)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"rollout.vllm.tensor_parallel_size must be a whole number, at least 1; got {given!r}")
    return given
