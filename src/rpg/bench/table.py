"""Findings -> a table on the terminal, or a page in Markdown: the same cells."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..console import printed
from .rows import Column, Findings, Row, Section, number

MUST = "must hold"


def cells(section: Section) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of texts; columns without a number, and targets where there are none, are left out."""
    columns = [c for c in section.columns if any(c.key in row.values for row in section.rows)]
    targets = any(row.targets for row in section.rows)
    titles = ["", *(c.key for c in columns), *([MUST] if targets else [])]
    return titles, [_row(row, columns, targets) for row in section.rows if not row.error]


def _row(row: Row, columns: list[Column], targets: bool) -> list[str]:
    numbers = [number(row.values[c.key], c.format) if c.key in row.values else "" for c in columns]
    return [row.name, *numbers, *(["; ".join(map(str, row.targets))] if targets else [])]


def failures(section: Section) -> list[str]:
    found = [f"{row.name}: {row.error}" for row in section.rows if row.error]
    return [*found, *([f"{section.name} ended early: {section.error}"] if section.error else [])]


def about_machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items() if found)
    return f"{machine['device']}, {machine['cores']} cores; {versions}; {machine['date']}"


def verdict(findings: Findings) -> str:
    targets = [t for section in findings.sections for row in section.rows for t in row.targets]
    met = sum(t.met is True for t in targets)
    return f"{met} of {len(targets)} targets met" + (
        f"; missed: {', '.join(t.what for t in findings.missed)}" if findings.missed else ""
    )


# ---- the terminal ----------------------------------------------------------------------------------------------------


def show(findings: Findings) -> None:
    with printed() as to:
        to.print(about_machine(findings.machine))
        for section in findings.sections:
            to.print()
            to.print(Text(f"{section.title} ({section.seconds:.0f} s)", style="bold"))
            titles, rows = cells(section)
            table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
            for title in titles:
                words = title in ("", MUST)
                table.add_column(title.replace(" ", "\n"), justify="left" if words else "right", no_wrap=not words)
            for row in rows:
                table.add_row(*map(Text, row))
            if rows:
                to.print(table)
            for line in failures(section):
                to.print(Text(line, style="yellow"))
            to.print(Text(section.about, style="dim"))
        to.print()
        to.print(Text(verdict(findings), style="bold"))


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(findings: Findings, command: str) -> str:
    out = ["# Speed: every part beside its peers and its floor", "", "```", command, "```"]
    out += ["", f"{about_machine(findings.machine)}. {verdict(findings)}.", ""]
    for section in findings.sections:
        titles, rows = cells(section)
        out += [f"## {section.title}", ""]
        if rows:
            align = ["---" if title in ("", MUST) else "---:" for title in titles]
            out += [_line(titles), _line(align), *map(_line, rows), ""]
        out += [f"- {line}" for line in failures(section)]
        meanings = "; ".join(f"*{c.key}*: {c.meaning}" for c in section.columns if c.meaning and c.key in titles)
        out += [text for text in (section.about, meanings + "." if meanings else "") if text]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
