"""One audit: every loss in every setting, and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from .box import BoxProblems, BoxRow
from .measure import Measurement, Subject, measure, observe, worst
from .names import Recogniser, wrong_side
from .problem import SCENARIOS, EnumeratedProblem
from .truncated import DRIFT as LARGEST_TRUNCATED_DRIFT
from .truncated import TruncatedProblems, TruncatedRow

RIGHT = 1e-6  # rounding of float32: right as well, though not to the last digit
NOT_FINITE = "the loss is not finite"
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
    names: dict[str, list[str]] = field(default_factory=dict)  # of a loss that is off: what is wrong, where it is known
    inside_clip: bool = False  # did no ratio of the six settings leave ±20 %?

    @property
    def truncated_drift(self) -> float:
        return min(self.drift, LARGEST_TRUNCATED_DRIFT)

    def select(self, **wanted: object) -> list[AuditRow]:
        return [r for r in self.rows if all(getattr(r, k) == v for k, v in wanted.items())]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    What is off is named, where its gradient gives the mistake away (``Audit.names``).
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
    recogniser = Recogniser(beta, drift)
    names: dict[str, list[str]] = {}
    for subject in subjects:
        progress(subject.name)
        as_shipped = box.rows(subject)
        in_box += as_shipped
        own: list[float] = [row.worst for row in as_shipped]
        truncated = top_p.rows(subject)
        under_top_p += truncated
        for (scenario, variable), instances in problems.items():
            observations = [observe(subject, problem) for problem in instances]
            for objective in dict.fromkeys((subject.objective, *OBJECTIVES)):
                pairs = zip(instances, observations, strict=True)
                measured = [measure(subject, problem, objective, seen) for problem, seen in pairs]
                own += [m.bias for m in measured] if objective == subject.objective else []
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
        if not all(math.isfinite(bias) for bias in [*own, *(row.worst_bias for row in truncated)]):
            names[subject.name] = [NOT_FINITE]
        elif not worst(own) <= RIGHT and (words := recogniser.names(subject)):
            names[subject.name] = words
        if subject.source == "user" and (side := wrong_side(subject.clipped or subject.coefficients, beta)):
            names.setdefault(subject.name, []).append(side)
    inside = all(problem.inside_clip for instances in problems.values() for problem in instances)
    return Audit(rows, seeds, beta, drift, list(messages), in_box, under_top_p, names, inside)


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return median(numbers) if numbers else None
