"""Groups that serve again: trained on in later steps too, with the weights that make that right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...run.config import OffPolicyConfig
from .collect import Experience, Group


class Replay:
    """Each group serves up to ``reuse`` times, in steps at most ``max_age`` after it was sampled."""

    def __init__(self, settings: OffPolicyConfig, prompts: int):
        self.settings, self.prompts = settings, prompts
        self.groups: list[Group] = []  # in the order in which they were sampled

    def fresh(self, step: int) -> int:
        """How many groups a step needs that have not served yet."""
        self._forget(step)
        return max(math.ceil(self.prompts / self.settings.reuse), self.prompts - len(self.groups))

    def join(self, experience: Experience, step: int) -> Experience:
        """With groups that serve again, as many as the step still needs: those that served least, of these the oldest,
        while they are worth something."""
        self._forget(step)
        wanted = max(0, self.prompts - len(experience.groups))
        chosen = sorted(self.groups, key=lambda group: (group.uses, group.step, group.number))[:wanted]
        return replace(experience, groups=[*experience.groups, *chosen]) if chosen else experience

    def served(self, groups: Sequence[Group], dropped: Sequence[Group]) -> None:
        """What was trained on stays for another time, if it may serve again; what was dropped is gone."""
        if self.settings.reuse == 1:
            return
        gone = {group.number for group in (*groups, *dropped)}
        again = [replace(group, uses=group.uses + 1) for group in groups]
        again = [group for group in again if group.uses < self.settings.reuse]
        self.groups = sorted(
            [*(group for group in self.groups if group.number not in gone), *again],
            key=lambda group: (group.step, group.number),
        )

    def _forget(self, step: int) -> None:
        self.groups = [group for group in self.groups if step - group.step <= self.settings.max_age]
