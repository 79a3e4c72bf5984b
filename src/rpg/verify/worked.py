r"""Is the arithmetic done? Of a parsed, unevaluated expression: which operations on numbers are left to the reader.

Usual ways to write a number are not undone: 3/4 and 6/8, 0.75, 10^{3}, 3 \times 10^{4}, \sqrt{12}, 2\sqrt{3}, 12^{1/2},
\frac{1}{\sqrt{2}}, \frac{1+\sqrt{5}}{2}, 2(1+\sqrt{3}), 3+4i, \ln 2, \sin 40^\circ. An operation is undone where

    sum         two terms can be added: 2 + 3 + x, \sqrt{8} + \sqrt{2}, 3\pi - \pi, |2 - \pi|
    product     two factors can be multiplied: 2 \cdot 3x, \sqrt{2}\sqrt{3}, (1 + \sqrt{2})(2 - \sqrt{2}), i(1 + i)
    quotient    10/2, 4\pi/2, a fraction of fractions, a division by what is not real
    power       2^{10}, (1 + i)^{2}, (1 + \sqrt{2})^{2}
    root        \sqrt{16}, \sqrt{-4}
    function    5!, \binom{5}{2}, \log_2 8, \tan 60^\circ, e^{i\pi/3}: it has a value without the function
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

QUOTIENT = re.compile(r"\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\}|(?<![\w.}])([0-9]+)\s*/\s*([0-9]+)(?![\w.])")
INVERSE = re.compile(r"(?<![\w.}])(?!10\s*\^)[0-9]+\s*\^\s*(?:-1(?![0-9])|\{\s*-\s*1\s*\})")
BINOMIAL = re.compile(r"\\binom\{[^{}A-Za-z\\]*\}\{[^{}A-Za-z\\]*\}")

Factors = list[tuple[Any, Any]]  # as they stand, and their values


def undone(tree: Any, text: str) -> frozenset[str]:
    """The kinds of operations that are left; ``text`` is what was parsed, as some the parser does by itself."""
    found: set[str] = set()
    _look(tree, found)
    for whole in QUOTIENT.finditer(text):
        top, bottom = (int(part) for part in whole.groups() if part is not None)
        if bottom and top % bottom == 0:
            found.add("quotient")
    if INVERSE.search(text):
        found.add("power")  # to the parser it is a fraction
    if BINOMIAL.search(text):
        found.add("function")
    return frozenset(found)


def _look(node: Any, found: set[str]) -> Any:
    """The value of the node, as far as sympy has one without being asked; what is undone in it goes into ``found``."""
    import sympy  # type: ignore[import-untyped]

    if not node.args:
        return {"i": sympy.I, "e": sympy.E}.get(node.name, node) if node.is_Symbol else node
    if node.is_Add:
        terms = _parts(node, sympy.Add)
        values = [_look(term, found) for term in terms]
        if any(_alike(a, b) for a, b in combinations([v for v in values if v.is_number], 2)):
            found.add("sum")
        return sympy.Add(*values)
    if isinstance(node, sympy.UnevaluatedExpr):  # \gcd(4, 6), which the parser has worked out
        found.add("function")
        return _look(node.args[0], found)
    if node.is_Mul or (node.is_Pow and node.exp == -1):
        return _look_at_factors(node, found)
    values = [_look(part, found) for part in node.args]
    value = node.func(*values)
    if value.is_number and all(v.is_number for v in values):
        if node.is_Pow:
            found |= _power(node, values[0], values[1], value)
        elif not value.has(node.func) or _polar(value):
            found.add("function")
    return value


def _alike(a: Any, b: Any) -> bool:
    import sympy

    a, b = (sympy.expand_log(value) if value.has(sympy.log) else value for value in (a, b))  # \ln 4 is 2 \ln 2
    return bool((a.is_Rational and b.is_Rational) or (a != 0 and b != 0 and (a / b).is_Rational))


def _look_at_factors(node: Any, found: set[str]) -> Any:
    import sympy

    above, below = ([(factor, _look(factor, found)) for factor in side] for side in _factors(node))
    if _can_be_multiplied(above, bool(below)) or _can_be_multiplied(below, False):
        found.add("product")
    if below and _can_be_divided(above, below):
        found.add("quotient")
    numbers = [[value for _, value in side if value.is_number] for side in (above, below)]
    together = sympy.Mul(*numbers[0]) / sympy.Mul(*numbers[1])
    if together.is_Rational and not all(value.is_Rational for side in numbers for value in side):
        found.add("quotient" if below else "product")
    if not node.free_symbols and numbers[0].count(-1) > 1:
        found.add("product")  # --3
    return sympy.Mul(*(v for _, v in above)) / sympy.Mul(*(v for _, v in below))


def _can_be_multiplied(side: Factors, divided: bool) -> bool:
    import sympy

    rational = _rational(side, divided)
    tens = any(_power_of_ten(factor) for factor, _ in side)  # 3 \\times 10^{4} is one number
    others = [(factor, value) for factor, value in side if value.is_number and not value.is_Rational]
    return len(rational) > 1 + tens or any(
        sum(alike) > 1
        for alike in (
            [factor.is_Add for factor, _ in others],
            [_root(factor) for factor, _ in others],
            [isinstance(value, sympy.exp) or value is sympy.E for _, value in others],
            [value.is_real is False for _, value in others],
        )
    )


def _can_be_divided(above: Factors, below: Factors) -> bool:
    import sympy

    top, bottom = _rational(above, True), _rational(below, False)
    return (
        any(value.is_real is False for _, value in below if value.is_number)
        or any(not value.is_Integer for value in bottom)
        or any(_factors(factor)[1] for factor, _ in below if not factor.free_symbols)
        or bool(bottom and ((sympy.Mul(*top) / sympy.Mul(*bottom)).is_Integer or not all(v.is_Integer for v in top)))
        or any(((a / b) ** 2).is_Integer for f, a in above for g, b in below if _root(f) and _root(g))
    )


def _rational(side: Factors, divided: bool) -> list[Any]:
    """But for signs, and the one of 1/x."""
    return [value for _, value in side if value.is_Rational and value != -1 and not (divided and value == 1)]


def _factors(node: Any) -> tuple[list[Any], list[Any]]:
    """Above and below the line."""
    import sympy

    if node.is_Pow and node.exp == -1:
        return [], _parts(node.base, sympy.Mul)
    above: list[Any] = []
    below: list[Any] = []
    for factor in _parts(node, sympy.Mul):
        if factor.is_Pow and factor.exp == -1:
            below += _parts(factor.base, sympy.Mul)
        else:
            above.append(factor)
    return above, below


def _parts(node: Any, kind: Any) -> list[Any]:
    return [part for one in node.args for part in _parts(one, kind)] if isinstance(node, kind) else [node]


def _power(node: Any, base: Any, exponent: Any, value: Any) -> set[str]:
    if exponent.is_Integer:
        if _power_of_ten(node) or exponent == 1:
            return set()
        worked = base.is_Rational or base.is_Add or base.is_real is False or _root(node.base) or _root(base)
        return {"power"} if worked else set()
    return {"root"} if _gaussian(value) else set()


def _gaussian(value: Any) -> bool:
    """A rational number, or one times i."""
    import sympy

    return bool(value.is_Rational or (value / sympy.I).is_Rational)


def _power_of_ten(node: Any) -> bool:
    return bool(node.is_Pow and node.base == 10 and node.exp.is_Integer)


def _root(node: Any) -> bool:
    return bool(node.is_Pow and node.exp.is_Rational and not node.exp.is_Integer)


def _polar(value: Any) -> bool:
    """e^{i\\pi/3}, which is 1/2 + i\\sqrt{3}/2; e^{2\\pi i/7} is nothing else."""
    import sympy

    if not value.has(sympy.exp) or value.is_real is not False:
        return False
    return not value.rewrite(sympy.cos).has(sympy.exp, sympy.cos, sympy.sin)
