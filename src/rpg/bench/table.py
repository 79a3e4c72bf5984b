"""What the sections measured: rows of numbers, what some of them must be, and the tables of them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..console import printed

MUST = "must hold"


@dataclass(frozen=True)
class Quantity:
    """A column of a section's table."""

    key: str
    meaning: str
    format: str = ".3g"  # of a number


@dataclass(frozen=True)
class Target:
    """A bound on one number of a row; ``value`` and ``met`` are None where it could not be measured."""

    what: str
    value: float | None
    least: float | None = None
    most: float | None = None
    met: bool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.value is not None:
            enough = self.least is None or self.value >= self.least
            object.__setattr__(self, "met", enough and (self.most is None or self.value <= self.most))

    @property
    def mark(self) -> str:
        return {True: "✓", False: "✗", None: "?"}[self.met]

    def __str__(self) -> str:
        """✓ ≥ 20× generate: 23.4"""
        return f"{self.mark} {self.what}: {'not measured' if self.value is None else number(self.value, '.3g')}"


@dataclass(frozen=True)
class BenchRow:
    """A row: one side at one size. ``error`` is the line that it ended with, instead of numbers."""

    name: str
    values: dict[str, float] = field(default_factory=dict)  # by the key of their quantity
    targets: tuple[Target, ...] = ()
    error: str = ""


@dataclass
class Section:
    name: str
    title: str
    columns: tuple[Quantity, ...]
    about: str = ""  # what was measured, and how
    rows: list[BenchRow] = field(default_factory=list)
    seconds: float = 0.0  # that the section took, all in all
    error: str = ""

    def value(self, name: str, key: str) -> float | None:
        """A number of the row with this name, where there is one."""
        return next((row.values.get(key) for row in self.rows if row.name == name), None)

    def require(self, name: str, *targets: Target) -> None:
        self.rows = [replace(row, targets=targets) if row.name == name else row for row in self.rows]


@dataclass
class BenchReport:
    machine: dict[str, Any]
    sizes: dict[str, Any]
    sections: list[Section] = field(default_factory=list)


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def number(value: float, form: str) -> str:
    """54,321 rather than 5.43e+04."""
    return f"{value:,.0f}" if form.endswith("g") and abs(value) >= 1000 else f"{value:{form}}"


# ---- texts -----------------------------------------------------------------------------------------------------------


def cells(section: Section) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of texts; columns without a number, and targets where there are none, are left out."""
    measured = [row for row in section.rows if not row.error]
    columns = [c for c in section.columns if any(c.key in row.values for row in measured)]
    titles = ["", *(c.key for c in columns)]
    rows = [
        [row.name, *(number(row.values[c.key], c.format) if c.key in row.values else "" for c in columns)]
        for row in measured
    ]
    if any(row.targets for row in section.rows):
        titles.append(MUST)
        rows = [[*texts, "; ".join(map(str, row.targets))] for texts, row in zip(rows, measured, strict=True)]
    return titles, rows


def failures(section: Section) -> list[str]:
    lines = [f"{row.name}: {row.error}" for row in section.rows if row.error]
    return [*lines, *([f"{section.name} ended early: {section.error}"] if section.error else [])]


def about_machine(machine: dict[str, Any], threads: str = "") -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return f"{machine['device']}, {machine['cores']} cores{threads}; {versions}; {machine['date']}"


def verdict(report: BenchReport) -> str:
    targets = [target for section in report.sections for row in section.rows for target in row.targets]
    missed = [target.what for target in targets if target.met is False]
    met = sum(target.met is True for target in targets)
    return f"{met} of {len(targets)} targets met" + (f"; missed: {', '.join(missed)}" if missed else "")


# ---- the terminal ----------------------------------------------------------------------------------------------------


def terminal_table(titles: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        left = title in ("", MUST)
        table.add_column(title.replace(" ", "\n"), justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def show(report: BenchReport) -> None:
    with printed() as to:
        to.print(about_machine(report.machine))
        for section in report.sections:
            to.print()
            to.print(Text(f"{section.title} ({section.seconds:.0f} s)", style="bold"))
            titles, rows = cells(section)
            if rows:
                to.print(terminal_table(titles, rows))
            for line in failures(section):
                to.print(Text(line, style="yellow"))
            to.print(Text(section.about, style="dim"))
        to.print()
        to.print(Text(verdict(report), style="bold"))


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(report: BenchReport, command: str) -> str:
    out = ["# Speed: every part beside its peers and its floor", "", "```", command, "```"]
    out += ["", f"{about_machine(report.machine)}. {verdict(report)}.", ""]
    for section in report.sections:
        titles, rows = cells(section)
        out += [f"## {section.title}", ""]
        if rows:
            align = ["---" if title in ("", MUST) else "---:" for title in titles]
            out += [_line(titles), _line(align), *map(_line, rows), ""]
        out += [f"- {line}" for line in failures(section)]
        out += _wrapped(section.about)
        meanings = [(c.key, c.meaning) for c in section.columns if c.meaning and c.key in titles]
        out += ["", *(line for key, text in meanings for line in _wrapped(f"- *{key}*: {text}"))] if meanings else []
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
