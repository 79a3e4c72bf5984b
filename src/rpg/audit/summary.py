"""An audit as its readers see it: one line per loss, the verdict on it, and the numbers in words."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol, Self, TypeVar

from ..console import two_digits
from .box import BoxRow
from .measure import Subject, worst
from .names import SWAPPED
from .problem import FEEDS, SCENARIOS
from .results import RIGHT, Audit, AuditRow
from .truncated import SHOWN, TOP_P, TruncatedRow

EXACT = 1e-10  # rounding of float64
LENGTHS = ("fixed", "variable")
ON_POLICY, REF_IS_OLD, THREE_POLICIES = SCENARIOS
SHORT = {ON_POLICY: "on-policy", REF_IS_OLD: "ref=old", THREE_POLICIES: "three policies"}
LIBRARIES = {"trl": "TRL", "liger-kernel": "Liger", "user": "your losses"}
SOME_SEEDS = "not all seeds"  # right in the median, in all six settings
LEVEL_NAMES = {"token": "token", "sequence": "seq.", "geometric": "geo.", "geometric, token KL": "geo."}


def grade(bias: float | None) -> str:
    """absent, exact, rounding, small (< 10 %), medium (< 50 %) or large."""
    if bias is None:
        return "absent"
    for name, bound in (("exact", EXACT), ("rounding", RIGHT), ("small", 0.1), ("medium", 0.5)):
        if bias < bound:
            return name
    return "large"


def is_right(bias: float | None) -> bool:
    return grade(bias) in ("exact", "rounding")


def bias_text(bias: float | None) -> str:
    """A relative bias in words: exact, 1e-07, 6.7 %, 120 %."""
    if bias is None:
        return "–"
    if math.isnan(bias):
        return "nan"
    if bias < EXACT:
        return "exact"
    if bias < 1e-5:
        return f"{bias:.0e}"
    return f"{two_digits(100 * bias) if bias < 1e4 else narrow(100 * bias)} %"


def narrow(x: float) -> str:
    """A large number, in a narrow column: 5.7e9"""
    return f"{x:.1e}".replace("e+0", "e").replace("e+", "e")


def span(values: Sequence[float]) -> str:
    low, high = bias_text(min(values)), bias_text(max(values))
    if low == high:
        return low
    return f"{low.removesuffix(' %')}–{high}" if low.endswith("%") else f"{low} to {high}"


@dataclass(frozen=True)
class Line:
    """One loss in every setting."""

    subject: Subject
    rows: tuple[AuditRow, ...]
    box: tuple[BoxRow, ...] = ()
    truncated: tuple[TruncatedRow, ...] = ()
    names: tuple[str, ...] = ()  # what is wrong with it, where that could be recognised

    def row(self, scenario: str, lengths: str = "fixed", objective: str | None = None) -> AuditRow:
        objective = objective or self.subject.objective
        return next(r for r in self.rows if (r.scenario, r.lengths, r.objective) == (scenario, lengths, objective))

    def bias(self, scenario: str, lengths: str = "fixed") -> float:
        return self.row(scenario, lengths).bias

    def kl_bias(self, scenario: str = THREE_POLICIES) -> float | None:
        return self.row(scenario).kl_bias

    @property
    def worst_variable(self) -> float:
        return worst(self.bias(s, "variable") for s in SCENARIOS)

    @property
    def worst(self) -> float:
        """Over every setting and seed, against its own objective."""
        return worst(r.worst_bias for r in self.rows if r.own)

    def in_box(self, scenario: str) -> BoxRow:
        """As shipped, where its clip does nothing."""
        return next(r for r in self.box if r.scenario == scenario)

    @property
    def box_error(self) -> float:
        """Of the expected gradient or, if larger, of one token's part in it: what is only noise counts as well."""
        row = self.in_box(THREE_POLICIES)
        return worst((row.bias, row.apart or 0.0))

    def truncated_bias(self, top_p: float = SHOWN, feed: str | None = None) -> float | None:
        """Under top-p sampling; None where nobody feeds it so."""
        feed = feed or self.subject.feeds[0]
        return next((r.bias for r in self.truncated if (r.top_p, r.feed) == (top_p, feed)), None)

    @property
    def checks(self) -> dict[str, float]:
        """What --strict holds it to, each with the worst over the settings and seeds."""
        return {
            "six settings": self.worst,
            "in the box": worst(r.worst for r in self.box),
            "top-p": worst(r.worst_bias for r in self.truncated if r.usual),
        }

    @property
    def hidden(self) -> dict[str, float]:
        """The worst over the seeds, wherever the median is right."""
        settings = {
            f"{SHORT[s]} at {n} lengths": row.worst_bias
            for s in SCENARIOS
            for n in LENGTHS
            if is_right((row := self.row(s, n)).bias)
        }
        box = {
            f"{SHORT[r.scenario]} in the box": r.worst
            for r in self.box
            if all(is_right(bias or 0.0) for bias in (r.bias, r.kl_bias, r.apart))
        }
        top_p = {f"top-p {r.top_p:g}": r.worst_bias for r in self.truncated if r.usual and is_right(r.bias)}
        return settings | box | top_p

    @property
    def failed(self) -> list[str]:
        failed = [check for check, bias in self.checks.items() if not bias <= RIGHT]
        return [*failed, "clip"] if self.wrong_side else failed

    @property
    def wrong_side(self) -> bool:
        """Does its clip cut only where it must not? One that cuts on both sides may be meant as a mask."""
        return SWAPPED in self.names

    @property
    def off(self) -> list[str]:
        """Where they failed: all six settings; in the box: ref=old; top-p: 0.9, 0.7"""
        places = {
            f"{n} lengths": [SHORT[s] for s in SCENARIOS if not self.row(s, n).worst_bias <= RIGHT] for n in LENGTHS
        }
        everywhere = all(len(scenarios) == len(SCENARIOS) for scenarios in places.values())
        if everywhere:
            places = {}
        places["in the box"] = [SHORT[r.scenario] for r in self.box if not r.worst <= RIGHT]
        places["top-p"] = [f"{r.top_p:g}" for r in self.truncated if r.usual and not r.worst_bias <= RIGHT]
        listed = [f"{place}: {', '.join(where)}" for place, where in places.items() if where]
        listed += ["the side its clip cuts on"] if self.wrong_side else []
        return ["all six settings", *listed] if everywhere else listed

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def dtype(self) -> str:
        return str(self.subject.dtype).removeprefix("torch.")

    @property
    def has_kl(self) -> bool:
        return self.subject.divergence != "none"

    @property
    def label(self) -> str:
        """The name without what the library's heading says already, and a file without its folder."""
        first, _, rest = self.name.partition(" ")
        if rest and self.subject.source.startswith(first):
            return rest
        return self.name.rsplit("/", 1)[-1] if ":" in self.name else self.name

    @property
    def claim(self) -> str:
        divergence = self.subject.divergence
        return f"{'no KL' if divergence == 'none' else divergence}, {LEVEL_NAMES[self.subject.objective]}"

    @property
    def right_where(self) -> str:
        """Where its expected gradient is exact."""
        right = {(s, n) for s in SCENARIOS for n in LENGTHS if is_right(self.bias(s, n))}
        if len(right) == len(SCENARIOS) * len(LENGTHS):
            return "everywhere" if is_right(self.worst) else SOME_SEEDS
        if right >= {(s, "fixed") for s in SCENARIOS}:
            return "fixed lengths"
        if right >= {(ON_POLICY, n) for n in LENGTHS}:
            return "on-policy"
        if (ON_POLICY, "fixed") in right:
            return "on-pol., fixed"
        return "in part" if right else "nowhere"


RIGHT_WHERE = {
    "everywhere": "in all six settings",
    "fixed lengths": "while all responses have the same length",
    "on-policy": "while the sampler is the current policy",
    "on-pol., fixed": "while the sampler is the current policy and all responses have the same length",
    "in part": "in some of the six settings",
    "nowhere": "in none of the six settings",
}


@dataclass(frozen=True)
class Library:
    """The losses of one library."""

    source: str
    lines: list[Line]

    @property
    def title(self) -> str:
        package, _, number = self.source.partition(" ")
        return f"{LIBRARIES.get(package, package)} {number}".strip()

    @property
    def dtype(self) -> str:
        """The type its losses compute in, where that is not float64."""
        others = {line.dtype for line in self.lines} - {"float64"}
        return ", ".join(sorted(others))

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.dtype})" if self.dtype else self.title

    @property
    def with_kl(self) -> list[Line]:
        return [line for line in self.lines if line.has_kl]

    @property
    def right_off_policy(self) -> list[Line]:
        """Of those with a KL term; responses of one length. The one count of all surfaces."""
        return [line for line in self.with_kl if is_right(line.bias(THREE_POLICIES))]


@dataclass(frozen=True)
class AuditReport:
    """An audit and how it was made."""

    audit: Audit
    subjects: Sequence[Subject]
    command: str
    date: str
    versions: dict[str, str]

    @classmethod
    def of(cls, audit: Audit, subjects: Sequence[Subject], command: str) -> Self:
        from .. import __version__

        versions = {"rpg": __version__, "torch": version("torch"), "python": platform.python_version()}
        versions |= dict(s.source.split(" ", 1) for s in subjects if " " in s.source)
        return cls(audit, subjects, command, date.today().isoformat(), versions)

    @cached_property
    def lines(self) -> list[Line]:
        audit = self.audit
        rows, box, truncated = _by_name(audit.rows), _by_name(audit.box), _by_name(audit.truncated)
        return [
            Line(s, rows[s.name], box[s.name], truncated[s.name], tuple(audit.names.get(s.name, ())))
            for s in self.subjects
        ]

    @cached_property
    def libraries(self) -> list[Library]:
        sources = dict.fromkeys(line.subject.source for line in self.lines)
        return [Library(s, [line for line in self.lines if line.subject.source == s]) for s in sources]

    @property
    def setup(self) -> str:
        seeds = self.audit.seeds
        return f"β = {self.audit.beta:g}, median of {seeds} seed{'s' if seeds != 1 else ''}"

    @property
    def version_text(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())

    def as_dict(self) -> dict[str, Any]:
        subjects = [
            {
                "name": s.name,
                "source": s.source,
                "divergence": s.divergence,
                "objective": s.objective,
                "dtype": line.dtype,
                "note": s.note,
                "right": line.right_where,
                "names": list(line.names),
                "feeds": list(s.feeds),
            }
            for s, line in zip(self.subjects, self.lines, strict=True)
        ]
        about = {"command": self.command, "date": self.date, "versions": self.versions, "subjects": subjects}
        return _without_nan(about | self.audit.as_dict())  # type: ignore[no-any-return]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=_Named)


def _by_name(rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    named: dict[str, tuple[Row, ...]] = {}
    for row in rows:
        named[row.name] = (*named.get(row.name, ()), row)
    return named


def _without_nan(x: Any) -> Any:
    """JSON has no nan: what is undefined becomes null."""
    if isinstance(x, dict):
        return {k: _without_nan(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_without_nan(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def finding(report: AuditReport) -> str:
    """How many losses are exact, and what the others need for it."""
    total = len(report.lines)
    losses = {where: sum(line.right_where == where for line in report.lines) for where in _ONLY}
    if total == 1:
        (line,) = report.lines
        where = RIGHT_WHERE.get(line.right_where, "in most seeds, but not in all")
        return f"{line.label} has the exact gradient {where}."
    if losses["everywhere"] == total:
        return f"All {total} losses have the exact gradient in every setting."
    others = [f"{n} {_ONLY[where]}" for where, n in losses.items() if n and where != "everywhere"]
    right = losses["everywhere"]
    has = "has" if right == 1 else "have"
    return f"{right} of {total} losses {has} the exact gradient in every setting; {', '.join(others)}."


_ONLY = {
    "everywhere": "in every setting",
    SOME_SEEDS: "not in all seeds",
    "fixed lengths": "only at fixed lengths",
    "on-policy": "only on-policy",
    "on-pol., fixed": "only on-policy at fixed lengths",
    "in part": "in some settings",
    "nowhere": "in none",
}


def worst_findings(report: AuditReport) -> list[str]:
    """Where the median, which the table shows, hides a seed that is off: the worst."""
    out = []
    for line in report.lines:
        hidden = {place: bias for place, bias in line.hidden.items() if not is_right(bias)}
        if hidden:
            where = f"its worst of {report.audit.seeds} seeds is off by {bias_text(worst(hidden.values()))}"
            out.append(f"{line.label}: exact in the median, but {where}: {', '.join(hidden)}.")
    return out


def clip_finding(report: AuditReport) -> list[str]:
    """What of a clip is not seen, where the policies are close."""
    if not report.audit.inside_clip:
        return []
    sides = any(line.subject.source == "user" for line in report.lines)
    but = ", but for the side it cuts on" if sides else ""
    return [f"The clip itself is not checked here{but}: no ratio leaves ±20 %."]


def shipped_finding(report: AuditReport) -> str:
    """How many are exact with their clip on, where it does nothing, and how many under top-p sampling."""
    total = len(report.lines)
    if total == 1:
        (line,) = report.lines
        biases = (line.box_error, line.truncated_bias())
        in_box, cut = ("exact" if is_right(bias) else f"off by {bias_text(bias)}" for bias in biases)
        return f"As shipped, inside its clip, it is {in_box}; under top-p {SHOWN:g} sampling it is {cut}."
    box = sum(is_right(line.box_error) for line in report.lines)
    truncated = sum(is_right(line.truncated_bias()) for line in report.lines)
    return (
        f"As shipped, inside their clip, {box} of {total} {is_or_are(box)} exact; under top-p {SHOWN:g} sampling "
        f"{truncated}."
    )


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def feed_findings(report: AuditReport) -> list[str]:
    """For your losses: what top-p sampling does to them, by what your trainer hands them."""
    out = []
    for line in report.lines:
        if line.subject.source == "user" and len(line.subject.feeds) > 1:
            biases = (f"{_at_each_top_p(line, feed)} with {FEEDS[feed]}" for feed in line.subject.feeds)
            out.append(f"{line.label} under top-p {', '.join(f'{p:g}' for p in TOP_P)}: {'; '.join(biases)}.")
    return out


def _at_each_top_p(line: Line, feed: str) -> str:
    texts = [bias_text(line.truncated_bias(top_p, feed)) for top_p in TOP_P]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def named(report: AuditReport) -> list[tuple[str, list[tuple[str, list[Line]]]]]:
    """What is wrong in words, most frequent first, each with the losses that have it, by library."""
    lines: dict[str, list[Line]] = {}
    for line in report.lines:
        for words in line.names:
            lines.setdefault(words, []).append(line)
    by_count = sorted(lines.items(), key=lambda item: -len(item[1]))
    return [
        (words, [(b.title, own) for b in report.libraries if (own := [x for x in having if x in b.lines])])
        for words, having in by_count
    ]


def off_policy_finding(library: Library) -> str:
    """Of its losses with a KL term: how many are exact with three policies, and how far off the others are."""
    if not library.with_kl:
        return "no KL term"
    count = len(library.right_off_policy)
    right = f"{count} of {len(library.with_kl)} with a KL {is_or_are(count)} right off-policy"
    off = [line.bias(THREE_POLICIES) for line in library.with_kl if line not in library.right_off_policy]
    if not off:
        return right
    return f"{right}, the {'other' if len(off) == 1 else 'others'} off by {span(off)}"


def kl_finding(library: Library) -> str:
    """How far off its KL terms are, alone, with three policies."""
    off = [b for line in library.with_kl if (b := line.kl_bias()) is not None and not is_right(b)]
    if not off:
        return "all right"
    wrong = "the one that is wrong off-policy is" if len(off) == 1 else "those that are wrong off-policy are"
    return f"{wrong} off by {span(off)}"


def merge(lines: Iterable[Line], values: Callable[[Line], tuple[float | None, ...]]) -> list[tuple[str, Line]]:
    """Lines that cannot be told apart by ``values``, as (their labels together, the first of them)."""
    alike: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        key = tuple(grade(v) if is_right(v) else bias_text(v) for v in values(line))
        alike.setdefault((line.subject.source, *key), []).append(line)
    return [(joined_labels(same), same[0]) for same in alike.values()]


def joined_labels(lines: Sequence[Line]) -> str:
    """grpo · dapo (each: KL correction); vanilla · cispo, each + low_var_kl"""
    stems: dict[str, list[str]] = {}
    for line in lines:
        cut = min((i for mark in (" (", " + ") if (i := line.label.find(mark)) >= 0), default=len(line.label))
        stems.setdefault(line.label[cut:], []).append(line.label[:cut])
    texts = []
    for variant, names in stems.items():
        if len(names) > 1 and variant:
            variant = f" (each: {variant[2:]}" if variant.startswith(" (") else f", each{variant}"
        texts.append(" · ".join(names) + variant)
    return "; ".join(texts)
