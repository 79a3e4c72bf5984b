"""Responses of earlier weights, in TRL and in verl: what a loss needs for them to have the right gradient."""

from __future__ import annotations

from ..loss.clip import Unweighted
from ..loss.policy_loss import PolicyLoss


def has_ratio(loss: PolicyLoss) -> bool:
    """Whether π/old is in its gradient; mirror descent (k2) needs none."""
    return not isinstance(loss.clip, Unweighted) or loss.divergence == "k2"
