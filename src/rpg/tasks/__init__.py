"""Prompts and verifiers: tasks by name, from a file or the hub, or of your own."""

from __future__ import annotations

from ..rewards.scoring import Reward, RewardError, Scorer, Scores
from ..verify import verify, verify_reward
from .aside import set_aside
from .loading import fingerprint, load_task, load_tests
from .sources.builtin import BUILTIN
from .sources.mixture import finite
from .task import ENDLESS, Problem, Task

__all__ = [
    "BUILTIN",
    "ENDLESS",
    "Problem",
    "Reward",
    "RewardError",
    "Scorer",
    "Scores",
    "Task",
    "fingerprint",
    "finite",
    "load_task",
    "load_tests",
    "set_aside",
    "verify",
    "verify_reward",
]
