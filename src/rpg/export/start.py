"""Where an exported run starts from, the recipe's model or a checkpoint of ``rpg train``, and on how many GPUs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import steps_text
from ..models import BUILTIN
from ..models.four_bits import saved_bits
from ..run import checkpoint
from ..run.config import Config
from ..training.progress import best_of


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
            raise ValueError(
                f"{self.where} has done its {steps_text(config.steps)}: give --steps, more than {self.step}"
            )
        return left


@dataclass(frozen=True)
class Launch:
    """What the recipe does not say: from where, and on how many GPUs."""

    start: Start
    gpus: int = 1
    nodes: int = 1

    @property
    def processes(self) -> int:
        return self.gpus * self.nodes


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
    folders = checkpoint.folders(run / "checkpoints")
    if not folders:
        raise ValueError(f"--from {run}: there is no checkpoint in it")
    newest = checkpoint.load(run / "checkpoints", lambda text: print(f"rpg export: {text}", file=sys.stderr))
    if newest is None:
        raise ValueError(f"--from {run}: no checkpoint in it is whole")
    evals = [e for e in newest.state["evals"] if e["step"] in folders]
    if which == "last" or (which == "best" and not evals):
        chosen = newest
    elif which == "best" or (which.isdigit() and int(which) in folders):
        chosen = checkpoint.read(folders[best_of(evals)["step"] if which == "best" else int(which)])
    else:
        steps = ", ".join(map(str, sorted(folders)))
        raise ValueError(f"--from {run}: there is no checkpoint {which!r}; there are best, last, {steps}")
    start = _with_adapter(chosen.model_folder.absolute())
    where = f"{which} checkpoint of {run}, step {chosen.step}"
    return Start(start.model, start.adapter, chosen.step, chosen.state["cursor"]["problem"], where)


def _with_adapter(folder: Path) -> Start:
    settings = folder / "adapter_config.json"
    if not settings.is_file():
        return Start(str(folder))
    if saved_bits(folder):
        raise ValueError(f"{folder} was trained beside weights in 4 bits, which are here alone: rpg merge it first")
    base = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return Start(str(BUILTIN) if base == "builtin" else base, str(folder))


def is_adapter(model: str) -> bool:
    """Whether the name is a folder of an adapter."""
    return (Path(model).expanduser() / "adapter_config.json").is_file()


def lora_of(folder: str) -> dict[str, Any]:
    """The settings of the LoRA adapter in a folder, as PEFT wrote them; what verl cannot have is refused."""
    settings: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    kind = str(settings.get("peft_type", "")).lower()
    if kind != "lora":
        raise ValueError(f"{folder} is a {kind} adapter, which has no counterpart in verl: only lora there")
    for name in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_dropout"):
        if settings.get(name):
            raise ValueError(f"{folder}: its adapter has {name}={settings[name]}, which has no counterpart in verl")
    return settings
