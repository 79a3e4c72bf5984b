"""Is this loss's gradient the one that was meant? ``rpg.audit.check(loss)``, or ``rpg audit`` on the command line.

Small autoregressive policies, all responses enumerated, float64: the expected gradient of a loss is compared with
autograd on the exact objective, on-policy, off-policy with ref = old, and with three different policies. Then as
shipped, clip on, where no clip acts; and where the sampler draws from the top-p of its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from ..loss.methods import Algorithm
from ..loss.policy_loss import PolicyLoss
from .box import BoxProblems, BoxRow
from .measure import Measurement, Subject, measure, observe, worst
from .problem import FEEDS, SCENARIOS, EnumeratedBatch, EnumeratedProblem
from .subjects import resolve
from .truncated import DRIFT as LARGEST_TRUNCATED_DRIFT
from .truncated import TruncatedProblems, TruncatedRow

__all__ = [
    "FEEDS",
    "SCENARIOS",
    "Audit",
    "AuditRow",
    "BoxRow",
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

OBJECTIVES = ("token", "sequence")


@dataclass(frozen=True)
class AuditRow:
    """One subject in one setting: medians over all seeds (the tails are heavy), and the worst bias."""

    name: str
    source: str
    note: str
    divergence: str
    objective: str
    own: bool  # is this the objective its level is exact for?
    scenario: str
    lengths: str
    bias: float
    worst_bias: float
    cosine: float
    variance: float
    kl_bias: float | None
    kl_variance: float | None
    clipped_bias: float | None
    cut: float | None
    left: float | None


@dataclass(frozen=True)
class Audit:
    rows: list[AuditRow]
    seeds: int
    beta: float
    drift: float
    messages: list[str]
    box: list[BoxRow] = field(default_factory=list)  # as shipped, where no clip acts
    truncated: list[TruncatedRow] = field(default_factory=list)  # under top-p sampling

    @property
    def truncated_drift(self) -> float:
        return min(self.drift, LARGEST_TRUNCATED_DRIFT)

    def select(self, **wanted: object) -> list[AuditRow]:
        return [r for r in self.rows if all(getattr(r, k) == v for k, v in wanted.items())]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(
    loss: str | PolicyLoss | Algorithm | Callable[..., Any],
    divergence: str | None = None,
    objective: str | None = None,
    seeds: int = 10,
    beta: float = 0.1,
    drift: float = 0.5,
) -> Audit:
    """Audit one loss: a preset's name, an Algorithm, a PolicyLoss, a callable, or an import path to one.

    A callable is run with whatever clip it has: ``drift=0.05`` keeps the ratios inside a clip of ±20 %.
    """
    return run([resolve(loss, divergence, objective)], seeds=seeds, beta=beta, drift=drift)


def run(
    subjects: Iterable[Subject],
    seeds: int = 10,
    beta: float = 0.1,
    drift: float = 0.5,
    messages: Iterable[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Every subject in every scenario, at fixed and variable lengths, against its own and the other objective.

    Then as shipped where its clip does nothing (``Audit.box``), and under truncated sampling (``Audit.truncated``).
    """
    rows: list[AuditRow] = []
    in_box: list[BoxRow] = []
    under_top_p: list[TruncatedRow] = []
    box, top_p = BoxProblems(seeds, beta), TruncatedProblems(seeds, beta, drift)
    problems = {
        (scenario, variable): [
            EnumeratedProblem(scenario, variable, seed, beta=beta, drift=drift) for seed in range(seeds)
        ]
        for scenario in SCENARIOS
        for variable in (False, True)
    }
    for subject in subjects:
        progress(subject.name)
        in_box += box.rows(subject)
        under_top_p += top_p.rows(subject)
        for (scenario, variable), instances in problems.items():
            observations = [observe(subject, problem) for problem in instances]
            for objective in dict.fromkeys((subject.objective, *OBJECTIVES)):
                pairs = zip(instances, observations, strict=True)
                measured = [measure(subject, problem, objective, seen) for problem, seen in pairs]
                typical = {f.name: _median(getattr(m, f.name) for m in measured) for f in fields(Measurement)}
                rows.append(
                    AuditRow(
                        name=subject.name,
                        source=subject.source,
                        note=subject.note,
                        divergence=subject.divergence,
                        objective=objective,
                        own=objective == subject.objective,
                        scenario=scenario,
                        lengths="variable" if variable else "fixed",
                        worst_bias=worst(m.bias for m in measured),
                        **typical,  # type: ignore[arg-type]
                    )
                )
    return Audit(rows, seeds, beta, drift, list(messages), in_box, under_top_p)


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return median(numbers) if numbers else None
