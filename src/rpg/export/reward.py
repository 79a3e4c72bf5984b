"""rpg's rewards inside verl: written into a file, reward.py, at the export; made again on verl's workers."""

from __future__ import annotations

import importlib
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from ..rewards.importing import FILES, load_function
from ..rewards.scoring import Part
from ..rewards.signature import check_signature
from ..run.config import Config
from ..tasks import Scorer, Task
from ..tasks.reward import make_reward, well_formed
from ..tasks.sources.gym import GymReward
from ..tasks.sources.mixture import RewardByPart
from ..tasks.task import TaggedAnswer
from ..tasks.templates import template_text

GATHER = 0.005  # seconds in which calls that come at about the same time are taken together
UNIT = 1e-9  # rewards closer than this are equal to ``rpg train`` too

# ---- the file --------------------------------------------------------------------------------------------------------

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
    asked = config.task
    if asked.template is not None:
        template_text(asked.template)
    copies: list[Path] = []
    lines = []
    for part in make_reward(asked.reward, asked.rewards, task, asked.template, asked.verifier):
        function = described(part.function)
        check_signature(loaded(function, Path()), function if isinstance(function, str) else "")
        lines.append(f"        {Written(part.name, _beside(function, copies), part.weight, part.trusted)!r},")
    limits = {name: getattr(asked, name) for name in ("workers", "timeout", "on_error", "memory_gb")}
    return HEAD.format(title=title, parts="\n".join(lines), **limits), copies


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


# ---- functions as text -----------------------------------------------------------------------------------------------


def described(function: Any) -> Any:
    """A reward function as what ``loaded`` takes: its name, or a list of names where the parts of a mixture differ."""
    if isinstance(function, str):
        return function
    if isinstance(function, RewardByPart):
        return [described(reward) for reward in function.rewards]
    if isinstance(function, partial) and function.func is well_formed:
        return {"format": list(function.keywords["asked"])}
    if isinstance(function, GymReward):
        return {"gym": [function.generator, json.loads(json.dumps(function.options))]}
    if isinstance(function, FunctionType) and "." not in function.__qualname__:
        return f"{FILES.get(function.__module__, function.__module__)}:{function.__qualname__}"
    name = getattr(function, "__qualname__", type(function).__name__)
    raise ValueError(f"the task's reward {name} cannot be exported: define it as a function at the top level of a file")


def loaded(text: Any, here: Path) -> Any:
    """The function again; files that were copied lie in ``here``."""
    if isinstance(text, list):
        return RewardByPart([loaded(one, here) for one in text])
    if isinstance(text, Mapping):
        if "format" in text:
            return partial(well_formed, asked=tuple(text["format"]))
        generator, options = text["gym"]
        return GymReward(generator, _tuples(options))
    where, _, name = text.rpartition(":")
    if where.endswith(".py"):
        return load_function(f"{here / where}:{name}")
    return getattr(importlib.import_module(where), name)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---- answers as text -------------------------------------------------------------------------------------------------


def tag_text(answer: str) -> str:
    """What an answer carries besides its text, as JSON; '' for nothing."""
    if not isinstance(answer, TaggedAnswer):
        return ""
    tag = answer.tag
    if isinstance(tag, tuple):  # (part of a mixture, the part's own answer)
        part, inner = tag
        return json.dumps({"part": part, "tag": tag_text(inner)})
    text = json.dumps({"entry": tag}, default=str)
    if json.loads(text)["entry"] != tag:
        raise ValueError("the answers of this task carry what JSON cannot hold: it cannot be exported")
    return text


def with_tag(answer: str, text: str) -> str:
    if not text:
        return answer
    tag = json.loads(text)
    return TaggedAnswer(answer, (tag["part"], with_tag(answer, tag["tag"])) if "part" in tag else tag["entry"])


# ---- on the workers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """One Part of a reward, as text."""

    name: str
    function: Any
    weight: float = 1.0
    trusted: bool = False


Call = tuple[tuple[str, str, str], "Future[dict[str, float]]"]


@dataclass
class Rewards:
    """What ``rpg train`` gives for a response: the weighted sum of the parts, each call in a process of its own, with a
    deadline. The processes are started at the first call, in whichever worker it is made.

    A Scorer takes one batch at a time, and engines ask for one response at a time, from many threads: a thread here
    scores all that wait together, so that the processes, and the calls of an async function, run side by side.
    """

    parts: Sequence[Written]
    here: Path
    workers: int = 2
    timeout: float = 5.0
    on_error: float = 0.0
    memory_gb: float = 4.0
    _scorer: Scorer | None = field(default=None, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _waiting: queue.SimpleQueue[Call] = field(default_factory=queue.SimpleQueue, repr=False)

    def scorer(self) -> Scorer:
        with self._lock:
            if self._scorer is None:
                parts = [Part(p.name, loaded(p.function, self.here), p.weight, p.trusted) for p in self.parts]
                self._scorer = Scorer(
                    parts,
                    workers=self.workers,
                    timeout=self.timeout,
                    on_error=self.on_error,
                    memory_gb=self.memory_gb,
                )
                threading.Thread(target=self._serve, args=(self._scorer,), daemon=True).start()
            return self._scorer

    def __call__(self, response: str, answer: str, extra: Mapping[str, Any]) -> dict[str, float]:
        """score: the reward, before an overlong penalty; acc: solved; signal: the score in whole units of 1e-9, so that
        equal rewards compare as equal; the parts of a sum, without their weights."""
        self.scorer()
        future: Future[dict[str, float]] = Future()
        self._waiting.put(((response, with_tag(answer, extra["tag"]), extra["problem"]), future))
        return future.result()

    def _serve(self, scorer: Scorer) -> None:
        while True:
            calls = [self._waiting.get()]
            time.sleep(GATHER)
            while not self._waiting.empty():
                calls.append(self._waiting.get())
            try:
                scores = scorer.score([item for item, _ in calls])
            except Exception as error:  # each caller has to know
                for _, future in calls:
                    future.set_exception(error)
                continue
            for i, (_, future) in enumerate(calls):
                score = scores.values[i]
                whole = {"score": score, "acc": float(scores.solved[i]), "signal": float(round(score / UNIT))}
                future.set_result(whole | {f"part/{name}": values[i] for name, values in scores.parts.items()})
