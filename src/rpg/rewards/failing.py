"""A reward function that always fails ends the run: there is nothing to learn from, whatever the model does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .scoring import Calls, RewardError

MAX_FAILING = 5  # steps in a row in which all calls fail of a function that has worked before


def added(batches: Iterable[Mapping[str, Calls]]) -> dict[str, Calls]:
    """The calls of several batches, by the function's name."""
    whole: dict[str, Calls] = {}
    for batch in batches:
        for name, calls in batch.items():
            whole[name] = whole[name] + calls if name in whole else calls
    return whole


class FailureWatch:
    """Told of each step's calls, it raises once it is hopeless: all of the first batch, or of many steps, failed."""

    def __init__(self) -> None:
        self._worked: set[str] = set()
        self._in_a_row: Counter[str] = Counter()
        self.half_failed = ""  # what to say where at least half of the last step's calls failed

    def note(self, batch: Mapping[str, Calls]) -> None:
        self.half_failed = ""
        for name, calls in batch.items():
            function = f"the reward function {calls.function}"
            failed = f"failed in {calls.failed:,} of {calls.made:,} calls: {calls.cause}"
            if 2 * calls.failed >= calls.made > 0:
                self.half_failed = f"In the last step {function} {failed}"
            if calls.failed < calls.made:
                self._worked.add(name)
                self._in_a_row[name] = 0
            elif calls.made:
                self._in_a_row[name] += 1
                if name not in self._worked:
                    raise RewardError(f"{function} {failed}")
                if self._in_a_row[name] >= MAX_FAILING:
                    raise RewardError(f"{function} failed in all calls of {MAX_FAILING} steps; lately it {failed}")
