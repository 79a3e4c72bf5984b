"""reward.py: a recipe's reward as a file that verl's workers load."""

from __future__ import annotations

from pathlib import Path

from ..run.config import Config
from ..tasks import Task
from ..tasks.reward import make_reward
from ..tasks.templates import template_text
from .reward import Written, described, made

HEAD = '''\
"""The reward of {title}: rpg's own, as rpg train scores. rpg must be installed on every node."""

from pathlib import Path

from rpg.export.reward import Rewards, Written

REWARDS = Rewards(
    parts=[
{parts}
    ],
    here=Path(__file__).parent,
    workers={workers},
    timeout={timeout},
    on_error={on_error},
    memory_gb={memory_gb},
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """verl's: score, the reward without a penalty on length; acc, whether it is solved; signal, for group filtering."""
    return REWARDS(solution_str, ground_truth, extra_info)
'''


def reward_file(config: Config, task: Task, title: str) -> tuple[str, list[Path]]:
    """(reward.py, the user's own files that have to lie beside it). What cannot be imported is a ValueError here."""
    own = config.task
    if own.template is not None:
        template_text(own.template)
    copies: list[Path] = []
    parts = []
    for part in make_reward(own.reward, own.rewards, task, own.template):
        parts.append(Written(part.name, _beside(described(part.function), copies), part.weight, part.trusted))
    limits = {"workers": own.workers, "timeout": own.timeout, "on_error": own.on_error, "memory_gb": own.memory_gb}
    for one in parts:
        _try(one, copies)
    lines = "\n".join(f"        {one!r}," for one in parts)
    return HEAD.format(title=title, parts=lines, **limits), copies


def _beside(function: object, copies: list[Path]) -> object:
    """The description with files by their names alone: they are copied."""
    if isinstance(function, list):
        return [_beside(one, copies) for one in function]
    where, _, name = function.rpartition(":") if isinstance(function, str) else ("", "", "")
    if not where.endswith(".py"):
        return function
    path = Path(where).expanduser().absolute()
    if path not in copies:
        if any(path.name == other.name for other in copies) or path.name == "reward.py":
            raise ValueError(f"{path}: the files of rewards need different names, and none may be called reward.py")
        copies.append(path)
    return f"{path.name}:{name}"


def _try(part: Written, copies: list[Path]) -> None:
    """Import it, from where it lies now."""
    places = {path.name: path.parent for path in copies}
    text = part.function
    where = text.rpartition(":")[0] if isinstance(text, str) else ""
    made(text, places.get(where, Path()))
