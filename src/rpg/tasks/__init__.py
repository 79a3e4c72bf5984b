"""Prompts and verifiers: tasks by name, from a file or the hub, or of your own."""

from __future__ import annotations

from .builtin import BUILTIN
from .loading import load_task, load_tests, verify_reward
from .mixture import finite
from .scoring import RewardError, Scorer, Scores
from .task import ENDLESS, Problem, Reward, Task
from .verify import verify

__all__ = [
    "BUILTIN",
    "ENDLESS",
    "Problem",
    "Reward",
    "RewardError",
    "Scorer",
    "Scores",
    "Task",
    "finite",
    "load_task",
    "load_tests",
    "verify",
    "verify_reward",
]
