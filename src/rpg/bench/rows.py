"""What the sections say: rows of numbers, and what some of them must be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Column:
    key: str
    meaning: str
    format: str = ".3g"  # of a number


@dataclass(frozen=True)
class Target:
    """A bound on one number of a row; ``value`` is None where it could not be measured."""

    what: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def mark(self) -> str:
        return {True: "✓", False: "✗", None: "?"}[self.met]

    def __str__(self) -> str:
        """✓ ≥ 20× generate: 23.4"""
        found = "not measured" if self.value is None else number(self.value, ".3g")
        return f"{self.mark} {self.what}: {found}"


@dataclass(frozen=True)
class Row:
    """Of one side at one size. ``error`` is the line that it ended with, instead of numbers."""

    name: str
    values: dict[str, float] = field(default_factory=dict)  # by the key of their column
    targets: tuple[Target, ...] = ()
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"targets": [asdict(target) | {"met": target.met} for target in self.targets]}


@dataclass
class Section:
    name: str
    title: str
    columns: tuple[Column, ...]
    about: str = ""  # what was measured, and how
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0  # that the section took, all in all
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [row.as_dict() for row in self.rows]}

    def value(self, name: str, key: str) -> float | None:
        """A number of the row with this name, where there is one."""
        return next((row.values.get(key) for row in self.rows if row.name == name), None)


@dataclass
class Findings:
    machine: dict[str, Any]
    sizes: dict[str, Any]
    sections: list[Section] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "sizes": self.sizes,
            "sections": [section.as_dict() for section in self.sections],
        }

    @property
    def missed(self) -> list[Target]:
        return [t for section in self.sections for row in section.rows for t in row.targets if t.met is False]


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def number(value: float, form: str) -> str:
    """54,321 rather than 5.43e+04."""
    return f"{value:,.0f}" if form.endswith("g") and abs(value) >= 1000 else f"{value:{form}}"


def error_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return (text if getattr(error, "plain", False) else f"{name}: {text}")[:200] if text else name
