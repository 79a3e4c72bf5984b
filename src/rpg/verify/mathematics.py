r"""Equal as mathematics, with math-verify's LaTeX parser and sympy. Slow, and not to be trusted with time or memory:
call it where something ends it (see judge.py). What is hopeless is refused before it is parsed.

math-verify's own verdict is asked for only where that is wanted (``by_math_verify``): it rounds to six decimals, strips
letters as units, reads 2 3 as 5, lowers the case of symbols and takes sets for points. Here decimals are exact, symbols
keep their case, and two expressions are equal if their difference vanishes: exactly where it is a polynomial or a
number, and at random points elsewhere.
"""

from __future__ import annotations

import logging
import random
import re
from functools import lru_cache
from typing import Any, NamedTuple

from .compare import COMMAND, FUNCTIONS, same
from .structure import relation
from .worked import undone

LENGTH, DEPTH, DIGITS = 400, 12, 60
POINTS, PLACES, TOLERANCE = 10, 60, 1e-45  # random points at which functions are compared, digits, relative difference
SCALES = (1, 30, 5000)

LARGE = (
    (re.compile(r"\^\s*\{?\s*-?\s*[0-9]{5}"), "an exponent of more than 4 digits"),
    (re.compile(r"\^\s*\{[^{}]*[0-9]\s*(?:\^|!)"), "a power of a power"),
    (re.compile(r"\^\s*\{[^{}]*\{[^{}]*[0-9]\s*(?:\^|!)"), "a power of a power"),
    (re.compile(r"\^\s*[0-9A-Za-z]\s*\^"), "a power of a power"),
    (re.compile(r"[0-9]{5}\s*!|[)}\]!]\s*!|!\s*\^"), "a large factorial"),
    (re.compile(r"\\binom\s*\{[^{}]*(?:[0-9]{5}|\^|!)"), "a large binomial coefficient"),
    (
        re.compile(r"\\(?:sum|prod|i*int|oint|lim|bigcup|bigcap|frac\s*\{\s*d)(?![A-Za-z])"),
        "a sum, product, limit or integral",
    ),
)
UNCLEAR = re.compile(  # 2 3, {2}3, 1/2x, 1 mod 4, y', 0.3..., relations, words
    r"(?<![_0-9])[0-9]+\s+[0-9]|/\s*[0-9]+\s*[A-Za-z(\\]|mod|\.\.|['=<>]|[^\x20-\x7e]"
    r"|(?<![\^_}\]A-Za-z])\{[0-9.]+\}\s*[0-9]|(?<![\^_0-9.])[0-9.]+\s*\{[0-9.]+\}"
)
NUMBERED = re.compile(r"(?<!_)(?<!_\{)[A-Za-z][0-9]")  # x1: x times one, or the first x?
FUNCTION = re.compile(rf"(?<![A-Za-z\\])({'|'.join(sorted(FUNCTIONS, key=len, reverse=True))})(?![A-Za-z])")
MIXED = re.compile(r"(?<![0-9A-Za-z}).^_])([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}")
PRODUCT = re.compile(r"(?:(?<![_^0-9.])[0-9.]+|\))\s*(?=\()|\)(?=\s*[0-9])")  # 2(3) would be read as a mixed number
DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")


class Expression(NamedTuple):
    value: Any  # of sympy
    undone: frozenset[str]  # operations that are left to the reader


def equal(given: str, wanted: str) -> bool | None:
    """None: cannot say. Both as they were written."""
    return same(given, wanted, leaf)


def by_math_verify(response: str, wanted: str) -> bool:
    """Its own verdict, as its README asks for it, but for its time limits: judge.py has some."""
    from math_verify import parse as read
    from math_verify import verify

    truth = wanted if wanted.startswith("$") else f"${wanted}$"
    return bool(verify(read(truth, parsing_timeout=None), read(response, parsing_timeout=None), timeout_seconds=None))


def refusal(text: str) -> str | None:
    """Why this is not even parsed; None if it is."""
    if len(text) > LENGTH:
        return f"longer than {LENGTH} characters"
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEPTH:
        return f"brackets {deepest} deep"
    if re.search(rf"[0-9]{{{DIGITS}}}", text):
        return f"a number of {DIGITS} digits or more"
    for pattern, why in LARGE:
        if pattern.search(text):
            return why
    powers = 1
    for power in re.findall(r"\^\s*\{?\s*([0-9]{1,4})", text) if re.search(r"[)}\]]\s*\^", text) else ():
        powers *= max(int(power), 1)
    return "powers of powers" if powers > 10**6 else None


def leaf(given: str, wanted: str, kind: str) -> bool | None:
    if refusal(given) or refusal(wanted):
        return False
    if kind:
        return relations(given, wanted, kind)
    a, b = parse(given), parse(wanted)
    if a is None or b is None:
        return None
    return a.undone <= b.undone and identical(a.value, b.value)


def relations(given: str, wanted: str, kind: str) -> bool | None:
    """The same equation, up to a factor that is no zero; the same inequality, up to a positive one."""
    import sympy  # type: ignore[import-untyped]

    sides = []
    for text in (given, wanted):
        parts = [parsed for part in relation(text)[::2] if (parsed := parse(part)) is not None]
        if len(parts) != 2:
            return None
        sides.append(parts)
    left = [frozenset().union(*(part.undone for part in side)) for side in sides]
    if not left[0] <= left[1]:
        return False
    a, b = (sympy.expand(side[0].value - side[1].value) for side in sides)
    if a == 0 or b == 0 or not a.free_symbols or a.free_symbols != b.free_symbols:
        return False
    ratio = sympy.simplify(a / b)
    return bool(ratio.is_number and ratio != 0 and (kind == "=" or ratio.is_positive))


def identical(a: Any, b: Any) -> bool | None:
    """No at one point is no. Yes: exactly for polynomials, else at several points, unless sympy objects."""
    import sympy

    if a == b:
        return True
    endless = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    if a.has(*endless) or b.has(*endless):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    seen = 0
    for trial in range(4 * POINTS if symbols else 1):
        x, y = (value(side, tuple(symbols), trial) for side in (a, b))
        if x is None or y is None:
            continue
        if abs(x - y) > (abs(x) + abs(y)) * TOLERANCE:
            return False
        seen += 1
        if seen == 1:
            difference = sympy.expand(a - b)
            if difference == 0:
                return True
            if isinstance(difference, sympy.Rational) or (symbols and rational_polynomial(difference, symbols)):
                return False
            if not symbols:
                return difference.equals(0) is not False
        if seen == POINTS:
            return True
    return None


def rational_polynomial(expression: Any, symbols: list[Any]) -> bool:
    import sympy

    return bool(expression.is_polynomial(*symbols)) and all(
        c.is_Rational for c in sympy.Poly(expression, *symbols).coeffs()
    )


@lru_cache(maxsize=4096)
def value(expression: Any, symbols: tuple[Any, ...], trial: int) -> Any:
    """At a point that is the same for all expressions in these symbols; None where it has no value."""
    import sympy

    rng = random.Random(trial)
    point = {}
    for i, symbol in enumerate(symbols):  # all signs of the first three, near zero and far from it
        negative = trial >> i & 1 if i < 3 else rng.getrandbits(1)
        size = rng.randint(1, 997) * SCALES[(trial // 2 + i) % len(SCALES)]
        point[symbol] = sympy.Rational(-size if negative else size, rng.randint(401, 601))
    result = expression.subs(point).evalf(PLACES)
    return result if all(part.is_Number and part.is_finite for part in result.as_real_imag()) else None


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression | None:
    """None if it is not an expression."""
    load()
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    if UNCLEAR.search(text):
        return None
    latex = plain(text)
    if NUMBERED.search(COMMAND.sub(" ", latex)):
        return None
    try:
        expression = latex2sympy(
            latex,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False),
        )
        if not isinstance(expression, sympy.Expr) or expression.has(sympy.Float):
            return None
        left = undone(expression, text)
        constants = {"i": sympy.I, "e": sympy.E}
        constants = {s: constants[s.name] for s in expression.free_symbols if s.name in constants}
        expression = expression.subs(constants).doit() if constants else expression.doit()
        return None if expression.has(sympy.zoo, sympy.nan) else Expression(expression, left)
    except (MemoryError, RecursionError):
        raise  # given up, and not remembered
    except Exception:  # the parser raises bare Exceptions at what it does not know
        return None


def plain(text: str) -> str:
    """LaTeX that can be read in one way only."""
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = FUNCTION.sub(lambda name: "\\" + {"infinity": "infty"}.get(name[1], name[1]) + " ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = PRODUCT.sub(r"\g<0>\\cdot ", text)
    text = MIXED.sub(lambda m: rf"(\frac{{{int(m[1]) * int(m[3]) + int(m[2])}}}{{{m[3]}}})", text)
    text = DECIMAL.sub(lambda d: rf"(\frac{{{int(d[1] + d[2])}}}{{{10 ** len(d[2])}}})", text)
    text = re.sub(r"\^\s*(\(\\frac\{[0-9]+\}\{[0-9]+\}\))", r"^{\1}", text)
    return re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)


@lru_cache(maxsize=1)
def load() -> None:
    """Import what takes a second; math-verify logs answers whole, which is turned off."""
    import math_verify  # noqa: F401

    for name in ("math_verify", "latex2sympy2_extended", "sympy"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
