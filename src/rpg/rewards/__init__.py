"""How a response is scored: parts and weights, functions of the user, their processes and limits."""

from __future__ import annotations

from .scoring import Part, Reward, RewardError, Scorer, Scores

__all__ = ["Part", "Reward", "RewardError", "Scorer", "Scores"]
