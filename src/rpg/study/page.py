"""A study as one self-contained HTML page, in the report's style: no script, no network, figures as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .. import report
from ..console import amount, duration, percent, tag, unbroken
from ..report.labels import Style, styles_of, swatch
from .results import Row
from .text import DIFFERENCES, FAILED, LAST, arms_table, differences_table, failure_text, value_text

STYLE = Path(report.__file__).with_name("page.css")
MORE = """
.verdict { font-size: 1.1rem; max-width: 46em; padding-left: 1.2em; } .verdict li { margin: 0 0 .4em; }
.panel svg { display: block; width: 100%; height: auto; } .panel h3 { min-height: 1.4em; }
.target { stroke: var(--muted); stroke-dasharray: 4 4; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0; padding: 0; list-style: none; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 28px 32px; }
.panels { margin-top: 20px; }
td.bar { min-width: 150px; padding: 0 18px 0 0; } .bar svg { display: block; width: 150px; height: 22px; }
.bar .zero { stroke: var(--muted); }
.bar .reach { stroke: var(--ink); stroke-width: 2; } .bar circle { fill: var(--ink); }
.bar .seen { stroke: var(--c2); stroke-width: 3; } .bar circle.seen { fill: var(--c2); stroke: none; }
"""
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 400, 250, 46, 8, 26, 8  # of a panel
AXES = {"steps": "step", "tokens": "tokens", "minutes": "seconds"}  # by the budget, what stands below the curves
NAMES = {"step": "steps", "tokens": "tokens trained on", "seconds": "time of steps"}


def html(result: Row) -> str:
    title = f"{result['study']}: {result['metric']}"
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        '<link rel="icon" href="data:,">',
        tag("title", escape(title)),
        tag("style", STYLE.read_text(encoding="utf-8") + MORE),
    )
    methods = list(dict.fromkeys(arm["method"] for arm in result["arms"]))
    styles = dict(zip(methods, styles_of(methods), strict=True))
    sections = (
        curves_section(result, styles),
        arms_section(result, styles),
        differences_section(result),
        failed_section(result),
        tuning_section(result, styles),
    )
    body = tag("body", _header(result, title), tag("main", *sections), _footer(result))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _header(result: Row, title: str) -> str:
    budget = ", ".join(f"{x:,} {name}" for name, x in result["budget"].items())
    lede = f"{result['planned']} runs on the same budget each: {budget}."
    if result["done"] < result["planned"]:
        lede += f" So far {result['done']} have ended, so this is no final result."
    verdict = tag("ul", *(tag("li", unbroken(line)) for line in result["verdict"]), class_="verdict")
    return tag(
        "header",
        tag("p", "rpg study", class_="kicker"),
        tag("h1", escape(title)),
        verdict,
        tag("p", escape(lede), class_="lede"),
    )


# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Of all panels: what stands on the axes, and where a value is drawn."""

    along: str  # step, tokens or seconds
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.right

    def y(self, share: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - share) / (self.high - self.low)

    def text(self, value: float) -> str:
        if self.along == "step":
            return f"{value:g}" + (" steps" if value == self.right else "")
        return amount(value) if self.along == "tokens" else duration(value)

    def across(self, share: float, kind: str) -> str:
        y = f"{self.y(share):.1f}"
        return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'

    def axes(self) -> Iterator[str]:
        for i in range(5):
            share = self.low + (self.high - self.low) * i / 4
            yield self.across(share, "fine" if i else "base")
            yield f'<text x="{LEFT - 6}" y="{self.y(share) + 4:.1f}" text-anchor="end">{100 * share:.3g} %</text>'
        for i, anchor in enumerate(("start", "middle", "end")):
            value = self.right * i / 2
            where = f'x="{self.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}"'
            yield f"<text {where}>{escape(self.text(value))}</text>"

    def points(self, curve: Sequence[Row], name: str) -> list[str]:
        return [f"{self.x(point[self.along]):.1f},{self.y(point[name]):.1f}" for point in curve]


def curves_section(result: Row, styles: dict[str, Style]) -> str:
    """A panel for each condition, all with the same axes."""
    points = [point for arm in result["arms"] for point in arm["curve"]]
    if not points:
        return ""
    along = AXES[next(iter(result["budget"]))]
    low, high = _bounds([point[name] for point in points for name in ("low", "high")], result["target"])
    frame = Frame(along, max(point[along] for point in points) or 1, low, high)
    conditions = dict.fromkeys(arm["condition"] for arm in result["arms"])
    keys = (tag("li", swatch(style) + escape(name)) for name, style in styles.items())
    caption = (
        f"{result['metric']} over {NAMES[along]}: the mean over the seeds, and a band from the lowest to the highest "
        "of them. A run that ended early keeps its last value."
    )
    caption += "" if result["target"] is None else f" Dashed: the target, {percent(result['target'])}."
    panels = tag("div", *(_panel(result, condition, frame, styles) for condition in conditions), class_="panels")
    figure = tag("figure", tag("ul", *keys, class_="keys"), panels, tag("figcaption", unbroken(caption)))
    return tag("section", tag("h2", "Curves"), figure, id="curves")


def _bounds(values: Sequence[float], target: float | None) -> tuple[float, float]:
    """Whole steps of 5 points around all of them."""
    values = [*values, *([] if target is None else [target])]
    low, high = math.floor(min(values) * 20) / 20, math.ceil(max(values) * 20) / 20
    return low, max(high, low + 0.05)


def _panel(result: Row, condition: str, frame: Frame, styles: dict[str, Style]) -> str:
    arms = [arm for arm in result["arms"] if arm["condition"] == condition and arm["curve"]]
    shapes = [tag("g", *frame.axes(), class_="axes")]
    shapes += [] if result["target"] is None else [frame.across(result["target"], "target")]
    for arm in arms:
        style, curve = styles[arm["method"]], arm["curve"]
        band = " ".join(frame.points(curve, "high") + frame.points(curve[::-1], "low"))
        shapes.append(tag("polygon", class_=f"band c{style.colour}", points=band))
        line = " ".join(frame.points(curve, "mean"))
        name = tag("title", escape(arm["name"]))
        kind = f"line c{style.colour}"
        shapes.append(tag("polyline", name, class_=kind, points=line, stroke_dasharray=style.dash))
    said = "; ".join(f"{arm['method']} ends at {percent(arm['curve'][-1]['mean'])}" for arm in arms)
    svg = tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said or "nothing yet")
    return tag("figure", tag("h3", escape(condition)), svg, class_="panel")


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    """Cells are HTML; the first of a row is its name."""
    top = tag("thead", tag("tr", *(tag("th", escape(head), scope="col") for head in heads)))
    body = (tag("tr", tag("th", row[0], scope="row"), *row[1:]) for row in rows)
    table = tag("table", top, tag("tbody", *body))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _cells(row: Sequence[str]) -> list[str]:
    return [tag("td", unbroken(text)) for text in row]


def arms_section(result: Row, styles: dict[str, Style]) -> str:
    heads, rows = arms_table(result)
    drawn = [
        [swatch(styles[arm["method"]]) + escape(row[0]), *_cells(row[1:])]
        for arm, row in zip(result["arms"], rows, strict=True)
    ]
    notes = LAST + " Tokens and time are of steps, without evaluations, and medians over the runs."
    notes += " (edge): the lowest or highest value that was tried; a better one may lie beyond."
    if result["target"] is not None:
        notes += " To the target: the median over all runs; – where fewer than half get there."
    table = _table(heads, drawn, "Last and best")
    return tag(
        "section", tag("h2", "Last and best"), tag("figure", table, tag("figcaption", unbroken(notes))), id="arms"
    )


def differences_section(result: Row) -> str:
    if not result["differences"]:
        return ""
    heads, rows = differences_table(result)
    bounds = [abs(b) for x in result["differences"] for b in (x["low"], x["high"], x["mean"]) if b is not None]
    widest = max(bounds) or 1.0
    drawn = [
        [escape(row[0]), *_cells(row[1:]), tag("td", _bar(x, widest), class_="bar")]
        for x, row in zip(result["differences"], rows, strict=True)
    ]
    table = _table([*heads, ""], drawn, "Differences")
    return tag(
        "section",
        tag("h2", "Differences"),
        tag("figure", table, tag("figcaption", unbroken(DIFFERENCES))),
        id="differences",
    )


def _bar(x: Row, widest: float) -> str:
    """The interval, with zero in the middle."""

    def at(value: float) -> str:
        return f"{75 + 70 * value / widest:.1f}"

    seen = " seen" if x["p_holm"] is not None and x["verdict"].endswith(" higher") else ""
    reach = ""
    if x["low"] is not None:
        reach = f'<line class="reach{seen}" x1="{at(x["low"])}" x2="{at(x["high"])}" y1="11" y2="11"/>'
    return (
        '<svg viewBox="0 0 150 22" aria-hidden="true"><line class="zero" x1="75" x2="75" y1="0" y2="22"/>'
        f'{reach}<circle class="{seen.strip()}" cx="{at(x["mean"])}" cy="11" r="4"/></svg>'
    )


def failed_section(result: Row) -> str:
    if not result["failed"]:
        return ""
    rows = (tag("li", unbroken(failure_text(row))) for row in result["failed"])
    return tag("section", tag("h2", "Failed runs"), tag("p", FAILED), tag("ul", *rows, class_="notes"), id="failed")


def tuning_section(result: Row, styles: dict[str, Style]) -> str:
    if not result["tuning"]:
        return ""
    by_name = {arm["name"]: arm for arm in result["arms"]}
    rows = []
    for x in result["tuning"]:
        name = swatch(styles[by_name[x["arm"]]["method"]]) + escape(x["arm"])
        tried = ", ".join(f"{path} {value_text(value)}" for path, value in x["tried"].items())
        failed = f"{x['failed']} of {x['runs']}" if x["failed"] else ""
        rows.append([name, *_cells([tried, percent(x["mean"]), failed, "chosen" if x["chosen"] else ""])])
    text = (
        "What was tried for each, with the same budget. Scores are on problems taken out of the training set, which "
        "these runs did not train on; the test problems had no part in it."
    )
    table = _table(["", "value", "score", "failed", ""], rows, "Tuning")
    return tag("section", tag("h2", "How the values were chosen"), tag("p", text), tag("figure", table), id="tuning")


def _footer(result: Row) -> str:
    text = (
        "Every number here is made of results.jsonl, which stands beside this page; rpg study FOLDER makes the page "
        f"again. rpg {result['version']}, model {result['model']}, task {result['task']}, {result['seeds']} seeds."
    )
    return tag("footer", tag("p", escape(text)))
