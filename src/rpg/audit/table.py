"""An audit as text: a table for the terminal or a pipe, and the whole of it in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..console import percent_two_digits, printed, tag, two_digits
from .names import NO_KL
from .problem import FEEDS, SCENARIOS
from .summary import (
    EXACT,
    LENGTHS,
    LIBRARIES,
    REF_IS_OLD,
    RIGHT_WHERE,
    SHORT,
    THREE_POLICIES,
    AuditReport,
    Line,
    bias_text,
    clip_finding,
    feed_findings,
    finding,
    grade,
    joined_labels,
    named,
    narrow,
    shipped_finding,
    worst_findings,
)
from .truncated import SHOWN, TOP_P

COLOURS = {"exact": "green", "rounding": "green", "small": "yellow", "medium": "red", "large": "bold red"}
HTML_COLOURS = {
    "green": "color: #0f8b76",
    "yellow": "color: #a87400",
    "red": "color: #d9601a",
    "bold red": "color: #b3261e; font-weight: 600",
}
MARKS = {"everywhere": "✓", "nowhere": "✗"}


@dataclass(frozen=True)
class AuditColumn:
    title: str
    meaning: str
    cell: Callable[[Line], Text]
    number: bool = True


def _bias(value: Callable[[Line], float | None]) -> Callable[[Line], Text]:
    def cell(line: Line) -> Text:
        bias = value(line)
        return Text(bias_text(bias), style=COLOURS.get(grade(bias), "dim"))

    return cell


def _plain(value: Callable[[Line], str]) -> Callable[[Line], Text]:
    return lambda line: Text(value(line))


def variance_text(variance: float | None) -> str:
    """6.7, 10,868, 5.7e9"""
    if variance is None:
        return "–"
    if variance >= 1e6:
        return narrow(variance)
    return two_digits(variance) if variance < 1000 else f"{variance:,.0f}"


def _verdict_cell(line: Line) -> Text:
    where = line.right_where
    colour = {"everywhere": "green", "nowhere": "red"}.get(where, "yellow")
    return Text(f"{MARKS.get(where, '~')} {where}", style=colour)


def _scenario_columns(lengths: str) -> list[AuditColumn]:
    return [
        AuditColumn(SHORT[s], f"relative bias, clip open; {text}", _bias(lambda line, s=s: line.bias(s, lengths)))  # type: ignore[misc]
        for s, text in SCENARIOS.items()
    ]


_LOSS = AuditColumn("loss", "", _plain(lambda line: line.label), number=False)
_CLAIM = AuditColumn(
    "ascends",
    "what it is held to: the D in E[R] − β·D, and the level of its ratios",
    _plain(lambda line: line.claim),
    number=False,
)
_RIGHT = AuditColumn("right", "where its expected gradient is the one of that objective", _verdict_cell, number=False)
_FIXED, _VARIABLE = (_scenario_columns(lengths) for lengths in LENGTHS)
_WORST_VARIABLE = AuditColumn(
    "varied lengths",
    "the worst of the three where responses differ in length: a 1/|y| shows here",
    _bias(lambda line: line.worst_variable),
)
_KL = AuditColumn(
    "KL term",
    "relative bias of the KL term alone, rewards zero; three policies",
    _bias(lambda line: line.kl_bias()),
)
_SEQUENCE = AuditColumn(
    "sequence",
    "relative bias against the sequence objective, whatever its level; three policies",
    _bias(lambda line: line.row(THREE_POLICIES, objective="sequence").bias),
)
_VARIANCE = AuditColumn(
    "variance",
    "of one response's gradient, over |∇J|²; three policies",
    _plain(lambda line: two_digits(line.row(THREE_POLICIES).variance)),
)
_CUT = AuditColumn(
    "cut",
    "share of tokens that the clip cuts off from the reward; three policies",
    _plain(lambda line: percent_two_digits(line.row(THREE_POLICIES).cut)),
)
_LEFT = AuditColumn(
    "left",
    "gradient that remains on those tokens, over |∇J|; three policies",
    _plain(lambda line: percent_two_digits(line.row(THREE_POLICIES).left)),
)

_IN_BOX = AuditColumn(
    "in the box",
    "as shipped, clip on, ratios inside it: the bias or, if larger, one token's error",
    _bias(lambda line: line.box_error),
)
_NOISE = AuditColumn(
    "KL noise",
    "variance of the KL term's gradient over its squared size; in the box, ref = old",
    _plain(lambda line: variance_text(line.in_box(REF_IS_OLD).kl_variance)),
)
_APART = AuditColumn(
    "apart",
    "in the box: a token's coefficient with and without the clip; relative to the largest",
    _bias(lambda line: line.in_box(THREE_POLICIES).apart),
)
_TRUNCATED = {
    top_p: AuditColumn(
        f"top-p {top_p:g}",
        f"relative bias if samples come from the top {top_p:g} of μ, held to π, μ, ref cut alike",
        _bias(lambda line, top_p=top_p: line.truncated_bias(top_p)),  # type: ignore[misc]
    )
    for top_p in TOP_P
}
_ENGINE = {
    top_p: AuditColumn(
        f"engine's old {top_p:g}",
        "the same with old as the engine drew it, the others over the whole vocabulary",
        _bias(lambda line, top_p=top_p: line.truncated_bias(top_p, "engine")),  # type: ignore[misc]
    )
    for top_p in TOP_P
}
_CLIPPED = AuditColumn(
    "clipped",
    "relative bias with the clip in place; three policies",
    _bias(lambda line: line.row(THREE_POLICIES).clipped_bias),
)
_COSINE = AuditColumn(
    "cosine",
    "between the expected gradient and the exact one; three policies",
    _plain(lambda line: f"{line.row(THREE_POLICIES).cosine:.3f}"),
)

_SHIPPED = [_IN_BOX, _NOISE, _APART]
_OFF_POLICY = replace(_FIXED[-1], title="off policy", meaning="relative bias, clip open; π, μ and ref all differ")
MAIN = [_LOSS, _RIGHT, _CLAIM, _OFF_POLICY, _WORST_VARIABLE, _KL, _IN_BOX, _NOISE, _TRUNCATED[SHOWN]]
SETTINGS = [_LOSS, *_FIXED, *_VARIABLE]
DETAILS = [_LOSS, _SEQUENCE, _COSINE, _VARIANCE, _CLIPPED, _CUT, _LEFT, _APART]
SAMPLING = [_LOSS, *_TRUNCATED.values(), *_ENGINE.values()]
_NAMES = AuditColumn(
    "named", "what is wrong, where its gradient gives it away", _plain(lambda line: "; ".join(line.names)), number=False
)
EVERYTHING = [
    *(_LOSS, _RIGHT, _CLAIM, *_FIXED, *_VARIABLE, _KL),
    *(*_SHIPPED, *_TRUNCATED.values(), _ENGINE[SHOWN]),
    *(_SEQUENCE, _COSINE, _VARIANCE, _CLIPPED, _CUT, _LEFT, _NAMES),
]
TABLES = {
    "Every setting: responses of one length, then of different lengths": SETTINGS,
    "The sequence objective, variance and the clip": DETAILS,
    "Truncated sampling": SAMPLING,
}


def show(report: AuditReport, verbose: bool = False) -> None:
    with printed() as to:
        _show(report, to, verbose)


def _show(report: AuditReport, to: Console, verbose: bool) -> None:
    to.print(Text(finding(report), style="bold"))
    to.print(shipped_finding(report))
    to.print(f"Relative bias of the expected gradient against the exact one; {report.setup}.")
    to.print("Clips are open but for “in the box”; a token-level loss is held to the token-level objective.")
    to.print(_table(report, MAIN))
    _explain(to, MAIN)
    for text in clip_finding(report):
        to.print(text)
    for text in worst_findings(report):
        to.print(Text(text, style="yellow"))
    for text in feed_findings(report):
        to.print(text)
    _names(report, to)
    if verbose:
        for title, columns in TABLES.items():
            to.print()
            to.print(Text(title, style="bold"))
            to.print(_table(report, columns))
            _explain(to, columns)
        _notes(report, to)
    for message in report.audit.messages:
        to.print(Text(f"not audited: {message}", style="yellow"))


def text(report: AuditReport) -> str:
    """As printed to a file: no colours, 100 columns."""
    written = StringIO()
    _show(report, Console(file=written, width=100, force_jupyter=False, color_system=None), verbose=False)
    return written.getvalue().rstrip()


def html_table(report: AuditReport) -> str:
    """The verdict, the names and the main table, to stand in a notebook."""
    head = tag("tr", *(tag("th", escape(column.title), title=escape(column.meaning) or None) for column in MAIN))
    rows = [tag("tr", *(_html_cell(column.cell(line)) for column in MAIN)) for line in report.lines]
    names = tag("ul", *(tag("li", escape(name)) for line in report.lines for name in line.names))
    setup = tag("p", escape(f"Relative bias of the expected gradient; {report.setup}."))
    return tag("div", tag("p", tag("b", escape(finding(report)))), names, tag("table", head, *rows), setup)


def _html_cell(cell: Text) -> str:
    return tag("td", escape(cell.plain), style=HTML_COLOURS.get(str(cell.style)))


def _names(report: AuditReport, to: Console) -> None:
    """What is wrong, in words, and with which losses."""
    found = named(report)
    if found:
        to.print()
        to.print(Text("What is wrong, recognised by its gradient", style="bold"))
    for words, libraries in found:
        to.print(Text(f"✗ {words}", style="red"))
        for title, lines in libraries if len(report.lines) > 1 else ():
            heading = f"{title}: " if len(report.libraries) > 1 else ""
            to.print(Padding(Text(heading + joined_labels(lines)), (0, 0, 0, 4)))
    yours = [words for words, libraries in found if any(title == LIBRARIES["user"] for title, _ in libraries)]
    if any(re.match(r"the KL counts \d", words) for words in yours):
        to.print("A loss with a β of its own has to be audited with it: --beta")
    if NO_KL in yours:
        to.print("A loss that has no KL term on purpose: --divergence none")


def _table(report: AuditReport, columns: list[AuditColumn]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for column in columns:
        first, _, last = column.title.rpartition(" ")
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(f"{first}\n{last}", justify=justify, no_wrap=column is not _LOSS, overflow="fold")
    for library in report.libraries:
        table.add_section()
        table.add_row(Text(library.heading, style="bold"))
        for line in library.lines:
            label, *cells = (column.cell(line) for column in columns)
            table.add_row(Padding(label, (0, 0, 0, 2)), *cells)
    return table


def _explain(to: Console, columns: list[AuditColumn]) -> None:
    width = max(len(column.title) for column in columns)
    for title, meaning in {column.title: column.meaning for column in columns if column.meaning}.items():
        to.print(Text(f"{title:<{width}}  {meaning}", style="dim"))
    if _KL in columns:
        to.print(Text(f"{'exact':<{width}}  below {EXACT:g}, the rounding of float64", style="dim"))


def _notes(report: AuditReport, to: Console) -> None:
    noted = [line for line in report.lines if line.subject.note]
    if noted:
        to.print()
        to.print(Text("Settings", style="bold"))
    for line in noted:
        to.print(f"{line.name}: {line.subject.note}")


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(report: AuditReport) -> str:
    titles = [column.title for column in EVERYTHING]
    for offset, lengths in zip((3, 6), LENGTHS, strict=True):
        for i in range(len(SCENARIOS)):
            titles[offset + i] = f"{titles[offset + i]}, {lengths}"
    meanings = [c.meaning for c in EVERYTHING]
    out = [
        "# The audit: is this loss's gradient the one that was meant?",
        "",
        "```",
        report.command,
        "```",
        f"{report.version_text}; {report.date}; {report.setup}.",
        "",
        f"**{finding(report)}** {shipped_finding(report)} A bias is relative: |E[g] − ∇J| / |∇J|, by enumeration of "
        "every response.",
        "",
    ]
    for library in report.libraries:
        noted = any(line.subject.note for line in library.lines)
        header = [*titles, "setting"] if noted else titles
        align = ["---:" if c.number else "---" for c in EVERYTHING] + (["---"] if noted else [])
        out += [f"## {library.heading}", "", _row(header), _row(align)]
        for line in library.lines:
            cells = [column.cell(line).plain for column in EVERYTHING]
            out.append(_row([*cells, line.subject.note] if noted else cells))
        out.append("")
    out += ["## What the columns say", ""]
    out += [f"- **{title}**: {text}" for title, text in zip(titles, meanings, strict=True) if text]
    out += [f"- **exact**: below {EXACT:g}, the rounding of float64", *_feeds(report)]
    out += [f"- **{where}**: {text}" for where, text in RIGHT_WHERE.items()]
    out += [f"- Not audited: {message}" for message in report.audit.messages]
    return "\n".join(out) + "\n"


def _feeds(report: AuditReport) -> list[str]:
    """What each library's trainer hands to its loss under truncated sampling."""
    feeds: dict[str, list[str]] = {}
    for library in report.libraries:
        feeds.setdefault(library.lines[0].subject.feeds[0], []).append(library.title)
    return [f"- **top-p**, {', '.join(titles)}: the loss is given {FEEDS[feed]}" for feed, titles in feeds.items()]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
