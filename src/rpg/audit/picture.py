"""One picture of an audit for a README: the bias of every KL-regularised gradient on a logarithmic axis."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from html import escape

from .summary import THREE_POLICIES, AuditReport, Library, Line, grade, joined_labels, span

WIDTH, LEFT, RIGHT_EDGE = 860, 128, 836
TOP, LANE, BOTTOM = 92, 74, 34
LOWEST, HIGHEST = 1e-16, 10.0
WIDEST_PITCH = 8.2  # between the centres of dots that touch
COLOURS = {"exact": "#0f8b76", "rounding": "#0f8b76", "small": "#a86f00", "medium": "#c9530f", "large": "#b3261e"}
INK, MUTED, RULE, CARD = "#1c1f23", "#5f6770", "#e4e4dd", "#fdfdfb"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def svg(report: AuditReport) -> str:
    libraries = [library for library in report.libraries if library.with_kl]
    height = TOP + LANE * max(1, len(libraries)) + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, \'Segoe UI\', Roboto, Helvetica, Arial, sans-serif" role="img">',
        "<title>Relative bias of the KL-regularised gradient, off-policy, by library</title>",
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="{CARD}" stroke="#d4d4cc"/>',
        _text(24, 32, "How far is the gradient from the exact one?", 17, INK, weight=600),
        _text(
            24,
            53,
            f"Relative bias against E[R] − β·KL at the level of its ratios; π, μ, ref differ; {report.setup}",
            13,
            MUTED,
        ),
        *_axis(height),
    ]
    pitch = fitting_pitch(libraries)
    for i, library in enumerate(libraries):
        lines += _lane(library, TOP + LANE * i, pitch)
    if not libraries:
        lines.append(_text(WIDTH / 2, TOP + LANE / 2, "no audited loss has a KL term", 13, MUTED, "middle"))
    foot = (
        f"Each dot is one loss, its own code on enumerated responses of equal length, clip bounds opened. {report.date}"
    )
    lines += [_text(24, height - 12, foot, 11, MUTED), "</svg>"]
    return "\n".join(lines) + "\n"


def place(bias: float) -> float:
    """The x of a bias on the axis; what is undefined or larger stands at its end."""
    bounded = HIGHEST if math.isnan(bias) else min(max(bias, LOWEST), HIGHEST)
    share = math.log10(bounded / LOWEST) / math.log10(HIGHEST / LOWEST)
    return LEFT + 20 + share * (RIGHT_EDGE - LEFT - 20)


def _axis(height: int) -> Iterable[str]:
    for power in (-16, -12, -8, -4, 0):
        x = place(10.0**power)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM}" stroke="{RULE}"/>'
        label = "100 %" if power == 0 else "10" + str(power).translate(SUPERSCRIPTS)
        yield _text(x, TOP - 14, label, 11, MUTED, "middle")


def _lane(library: Library, y: float, pitch: float) -> Iterable[str]:
    right = library.right_off_policy
    wrong = [line for line in library.with_kl if line not in right]
    yield f'<line x1="24" x2="{RIGHT_EDGE}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>'
    yield _text(24, y + (24 if wrong else 32), library.title, 14, INK, weight=600)
    yield _text(
        24,
        y + (42 if wrong else 50),
        f"{len(right)} of {len(library.with_kl)} right",
        12,
        COLOURS["exact"] if right else MUTED,
    )
    if wrong:
        yield _text(24, y + 58, f"others {span([_bias(line) for line in wrong])} off", 12, COLOURS["large"])
    for line, x, offset in swarm(library.with_kl, pitch):
        colour = COLOURS[grade(_bias(line))]
        title = f"<title>{escape(line.name)}: {_bias(line):.2g}</title>"
        centre = f'cx="{x:.1f}" cy="{y + LANE / 2 + offset:.1f}"'
        yield f'<circle {centre} r="{0.46 * pitch:.2f}" fill="{colour}">{title}</circle>'
    start = max((place(_bias(line)) for line in right), default=place(LOWEST)) + 12
    end = min((place(_bias(line)) for line in wrong), default=float(RIGHT_EDGE)) - 12
    above = wrap(joined_labels(right), end - start, 2 if wrong else 4)
    published = "as published: " if wrong and library.source.startswith("rpg") else ""
    below = wrap(published + joined_labels(wrong), end - start, 4 - len(above)) if wrong else []
    first = y + LANE / 2 + 4 - 7.5 * (len(above) + len(below) - 1)
    for i, text in enumerate(above):
        yield _text(start, first + 15 * i, text, 11.5, COLOURS["exact"])
    for i, text in enumerate(below, start=len(above)):
        yield _text(end, first + 15 * i, text, 11.5, INK, "end")


def _bias(line: Line) -> float:
    return line.bias(THREE_POLICIES)


def swarm(lines: list[Line], pitch: float) -> list[tuple[Line, float, float]]:
    """(line, x, offset from the lane's middle): dots that would touch are moved up and down, never sideways."""
    placed: list[tuple[Line, float, float]] = []
    for line in sorted(lines, key=_bias):
        x = place(_bias(line))
        steps = (pitch / 2 * k * sign for k in range(4 * len(lines) + 1) for sign in (1, -1))
        offset = next(o for o in steps if all(math.hypot(x - px, o - po) >= pitch - 1e-9 for _, px, po in placed))
        placed.append((line, x, offset))
    return placed


def fitting_pitch(libraries: list[Library]) -> float:
    """The widest that keeps every lane's dots inside it."""
    pitch = WIDEST_PITCH
    while pitch > 1:
        reach = max((abs(offset) for g in libraries for *_, offset in swarm(g.with_kl, pitch)), default=0.0)
        if reach + pitch / 2 < LANE / 2 - 2:
            break
        pitch -= 0.2
    return pitch


def wrap(text: str, width: float, most: int, size: float = 11.5) -> list[str]:
    """Lines that fit the width, at most so many, broken between names; the last says how many names are left out."""
    if not text or most < 1:
        return []
    fits = int(width / (0.56 * size))
    rows: list[str] = [""]
    names = re.split(r" · |(?<=;) ", text)
    for i, name in enumerate(names):
        joined = rows[-1] + (" " if rows[-1].endswith(";") else " · ") + name if rows[-1] else name
        if len(joined) <= fits:
            rows[-1] = joined
        elif len(rows) < most:
            rows.append(name)
        else:
            rows[-1] = rows[-1].rstrip(";") + f" · {len(names) - i} more"
            break
    return rows


def _text(x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}" stroke="{CARD}" stroke-width="3" paint-order="stroke">{escape(text)}</text>'
    )
