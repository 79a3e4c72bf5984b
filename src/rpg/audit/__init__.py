"""Is this loss's gradient the one that was meant? ``rpg.audit.check(loss)``, or ``rpg audit`` on the command line.

Small autoregressive policies, all responses enumerated, float64: the expected gradient of a loss is compared with
autograd on the exact objective, on-policy, off-policy with ref = old, and with three different policies. Then as
shipped, clip on, where no clip acts; and where the sampler draws from the top-p of its policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..loss.methods import Algorithm
from ..loss.policy_loss import PolicyLoss
from .box import BoxRow
from .measure import Measurement, Subject, measure
from .problem import FEEDS, SCENARIOS, EnumeratedBatch, EnumeratedProblem
from .results import Audit, AuditRow, run
from .subjects import resolve
from .summary import AuditReport
from .truncated import TruncatedRow

__all__ = [
    "FEEDS",
    "SCENARIOS",
    "Audit",
    "AuditRow",
    "BoxRow",
    "Checked",
    "EnumeratedBatch",
    "EnumeratedProblem",
    "Measurement",
    "Subject",
    "TruncatedRow",
    "check",
    "measure",
    "resolve",
    "run",
]


Loss: TypeAlias = str | PolicyLoss | Algorithm | Callable[..., Any]


class Checked(AuditReport):
    """What ``check`` found. Printed, it is the table of ``rpg audit``; in a notebook, one in HTML."""

    @property
    def rows(self) -> list[AuditRow]:
        return self.audit.rows

    def select(self, **wanted: object) -> list[AuditRow]:
        return self.audit.select(**wanted)

    @property
    def biased(self) -> list[str]:
        """The checks of ``--strict`` that fail; empty for an exact loss."""
        return [check for line in self.lines for check in line.failed]

    @property
    def names(self) -> list[str]:
        """What is wrong, in words, where the gradient gives it away."""
        return [name for line in self.lines for name in line.names]

    def __str__(self) -> str:
        from .table import text

        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .table import html_table

        return html_table(self)


def check(
    loss: Loss | Sequence[Loss],
    divergence: str | None = None,
    objective: str | None = None,
    seeds: int = 10,
    beta: float = 0.1,
    drift: float = 0.5,
) -> Checked:
    """Audit a loss, or a list of them: a preset's name, an Algorithm, a PolicyLoss, a callable, or an import path.

    Print the result, or ask it: ``.biased``, ``.names``, ``.rows``, ``.select(scenario=…)``, ``.as_dict()``.
    A callable is run with whatever clip it has: ``drift=0.05`` keeps the ratios inside a clip of ±20 %.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds must be a whole number, at least 1; got {seeds!r}")
    for name, value in {"beta": beta, "drift": drift}.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number; got {value!r}")
    losses: Sequence[Loss] = loss if isinstance(loss, list | tuple) else [loss]  # type: ignore[list-item]
    subjects = [resolve(each, divergence, objective) for each in losses]
    names = [subject.name for subject in subjects]
    if not names:
        raise ValueError("an empty list: name a loss to audit")
    if len({*names}) < len(names):
        raise ValueError(f"losses in a list need names that differ; got {', '.join(names)}")
    found = run(subjects, seeds=seeds, beta=beta, drift=drift)
    return Checked.of(found, subjects, f"rpg.audit.check({', '.join(names)})")
