"""rpg's rewards inside another trainer: written down as text when a recipe is exported, made again on its workers."""

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
from ..tasks import Scorer
from ..tasks.reward import well_formed
from ..tasks.sources.gym import GymReward
from ..tasks.sources.mixture import RewardByPart
from ..tasks.task import TaggedAnswer

GATHER = 0.005  # seconds in which calls that come at about the same time are taken together
UNIT = 1e-9  # rewards closer than this are equal to ``rpg train`` too

# ---- functions as text -----------------------------------------------------------------------------------------------


def described(function: Any) -> Any:
    """A reward function as what ``made`` takes: its name, or a list of names where the parts of a mixture differ."""
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


def made(text: Any, here: Path) -> Any:
    """The function again; files that were copied lie in ``here``."""
    if isinstance(text, list):
        return RewardByPart([made(one, here) for one in text])
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
        part, own = tag
        return json.dumps({"part": part, "tag": tag_text(own)})
    text = json.dumps({"entry": tag}, default=str)
    if json.loads(text)["entry"] != tag:
        raise ValueError("the answers of this task carry what JSON cannot hold: it cannot be exported")
    return text


def with_tag(answer: str, text: str) -> str:
    if not text:
        return answer
    found = json.loads(text)
    return TaggedAnswer(answer, (found["part"], with_tag(answer, found["tag"])) if "part" in found else found["entry"])


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
                parts = [Part(p.name, made(p.function, self.here), p.weight, p.trusted) for p in self.parts]
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
        found: Future[dict[str, float]] = Future()
        self._waiting.put(((response, with_tag(answer, extra["tag"]), extra["problem"]), found))
        return found.result()

    def _serve(self, scorer: Scorer) -> None:
        while True:
            calls = [self._waiting.get()]
            time.sleep(GATHER)
            while not self._waiting.empty():
                calls.append(self._waiting.get())
            try:
                found = scorer.score([item for item, _ in calls])
            except Exception as error:  # each caller has to know
                for _, call in calls:
                    call.set_exception(error)
                continue
            for i, (_, call) in enumerate(calls):
                score = found.values[i]
                own = {f"part/{name}": values[i] for name, values in found.parts.items()}
                call.set_result(
                    {"score": score, "acc": float(found.solved[i]), "signal": float(round(score / UNIT)), **own}
                )
