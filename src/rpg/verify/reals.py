r"""Sets of real numbers, however they are written: (3,\infty), x > 3, 1 < x \le 2, x \ne 3, unions and complements."""

from __future__ import annotations

import re
from itertools import pairwise

from .notation import SET, bare, number
from .structure import JOINT, LABEL, brackets, items, outer, relation, split

FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
REALS = frozenset({"\\mathbb{R}", "all real numbers", "all reals", "(-\\infty,\\infty)", "(-\\infty,+\\infty)"})
AND = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])")
OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\cup")

Piece = tuple[str, str, str]  # brackets, from, to
Reals = tuple[str, list[Piece]]  # the variable, "" if none was named; the pieces of the set


def real_set(text: str) -> Reals | None:
    """Of an interval, a union, x > 3, 1 < x \\le 2, x < 1 or x > 2, x \\ne 3, \\mathbb{R} \\setminus {3}; else None."""
    parts = OR.split(JOINT.sub(r" \1 ", text))
    sets = []
    for part in parts:
        if (one := piece_of(part.strip().rstrip(",").strip())) is None:
            return None
        sets.append(one)
    names = {name for name, _ in sets if name}
    return None if len(names) > 1 else (names.pop() if names else "", [piece for _, pieces in sets for piece in pieces])


def piece_of(text: str) -> Reals | None:
    both = AND.split(text)
    if len(both) == 2:
        return between(piece_of(both[0].strip()), piece_of(both[1].strip()))
    chain = relation(text)
    if len(chain) == 1:
        if bare(text) in REALS:
            return "", [("()", "-\\infty", "\\infty")]
        parts = split(text, "\\setminus")
        if len(parts) == 2 and bare(parts[0]) in REALS and (inside := outer(parts[1], SET)) is not None:
            return holes("", items(inside))
        ends = brackets(text)
        return ("", [(ends[0], *ends[1])]) if ends is not None and len(ends[1]) == 2 else None  # type: ignore[list-item]
    if chain[1] == "\\in" and len(chain) == 3 and LABEL.fullmatch(chain[0]):
        inside_ = real_set(chain[2])
        return None if inside_ is None else (chain[0], inside_[1])
    if len(chain) == 3:
        a, sign, b = chain
        if sign == "\\ne" and symbol(a):
            return holes(a, items(b))
        if sign in FLIP and symbol(b) and not symbol(a):
            a, sign, b = b, FLIP[sign], a
        if sign not in FLIP or not symbol(a) or not b:
            return None
        closed = sign.startswith("\\")
        up = sign in (">", "\\ge")
        return a, [("[)" if closed else "()", b, "\\infty") if up else ("(]" if closed else "()", "-\\infty", b)]
    if len(chain) == 5 and chain[1] in FLIP and chain[3] in FLIP:
        a, first, middle, second, b = chain
        if first in (">", "\\ge"):
            a, first, second, b = b, FLIP[second], FLIP[first], a
        if first in ("<", "\\le") and second in ("<", "\\le") and symbol(middle):
            return middle, [(("[" if len(first) > 1 else "(") + ("]" if len(second) > 1 else ")"), a, b)]
    return None


def between(a: Reals | None, b: Reals | None) -> Reals | None:
    """Of x > 1 and x < 2."""
    if a is None or b is None or a[0] != b[0] or len(a[1]) != 1 or len(b[1]) != 1:
        return None
    if a[1][0][2] != "\\infty":
        a, b = b, a
    (left, low, end), (right, start, high) = a[1][0], b[1][0]
    return (a[0], [(left[0] + right[1], low, high)]) if end == "\\infty" and start == "-\\infty" else None


def symbol(text: str) -> bool:
    return LABEL.fullmatch(text) is not None and text not in ("\\infty", "\\pi", "e", "i")


def holes(name: str, points: list[str]) -> Reals | None:
    """All but these."""
    values = [(number(point), point) for point in points]
    if len(values) > 1 and any(value is None for value, _ in values):
        return None
    ends = ["-\\infty", *(p for _, p in sorted(values, key=lambda one: one[0] or 0)), "\\infty"]
    return name, [("()", a, b) for a, b in pairwise(ends)]
