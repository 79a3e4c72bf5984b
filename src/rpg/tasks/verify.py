"""Is the final answer of a response the true one? Strings and exact rational numbers; nothing is ever evaluated.

Every step is a single pass over its text, and answers longer than ``LONG`` are compared as they stand: the time is
linear in the length of the response, whatever is in it.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONG = 600  # characters; below the least limit that Python can have on the digits of an int

BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\[{}]|[{}]")
SAID = re.compile(r"(?<![A-Za-z])answer(?![A-Za-z])", re.IGNORECASE)
AFTER_SAID = re.compile(r"[\s:=*_]*+(?:is(?![A-Za-z]))?[\s:=*_]*+", re.IGNORECASE)

WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
NOTHING = re.compile(r"\\[,;:! ()\[\]]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\$|\*\*")
SPACE = re.compile(r"\s+")
LOOSE_SPACE = re.compile(r"(?<![^\W_]) | (?![^\W_])")  # one that does not stand between two letters or digits
SAME = (("\\$", ""), ("\\%", "%"), ("{,}", ","), ("~", " "), ("−", "-"), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"))

DECIMAL = re.compile(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(\.[0-9]*)?(?:e([+-]?[0-9]{1,3}))?")
OVER = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}|\\frac([0-9])([0-9])|([^/]*)/([^/]*)")


def verify(response: str, truth: str) -> bool:
    """True if the last final answer in the response equals the truth. Never raises, whatever the two are.

    A final answer is ``\\boxed{x}``, ``#### x``, or ``answer: x`` (``answer is x``, ``answer x``) at the very end.
    50% is 1/2, not 50; the truth may be written as an answer too.
    """
    if not isinstance(response, str) or not isinstance(truth, str):
        return False
    given = final_answer(response)
    if given is None:
        return False
    marked = marked_answer(truth)
    wanted = truth if marked is None else marked[1]
    if len(given) > LONG or len(wanted) > LONG:
        return given.strip() == wanted.strip()
    given, wanted = normal(given), normal(wanted)
    if not wanted:
        return False
    if given == wanted:
        return True
    value = number(given)
    return value is not None and value == number(wanted)


def final_answer(response: str) -> str | None:
    """The text of the last answer; None if there is none."""
    marked = marked_answer(response)
    said = said_answer(response)
    last = max((found for found in (marked, said) if found is not None), key=lambda found: found[0], default=None)
    return None if last is None else last[1]


def marked_answer(text: str) -> tuple[int, str] | None:
    """(where, what) of the last \\boxed{x} or #### x."""
    found: list[tuple[int, str]] = []
    start = text.rfind("####")
    if start >= 0:
        lines = text[start + 4 :].lstrip(" \t").splitlines()
        if lines and lines[0].strip():
            found.append((start, lines[0]))
    opened: list[tuple[int, int] | None] = []  # the braces that are open; of a box, where it begins and its content
    box = (-1, 0, 0)
    for brace in BRACE.finditer(text) if "boxed" in text or "fbox" in text else ():
        token = brace.group()
        if token == "{":
            opened.append(None)
        elif token == "}":
            at = opened.pop() if opened else None
            if at is not None and at[0] > box[0]:
                box = (*at, brace.start())
        elif len(token) > 2:
            opened.append((brace.start(), brace.end()))
    if box[0] >= 0:
        found.append((box[0], text[box[1] : box[2]]))
    return max(found, default=None)


def said_answer(text: str) -> tuple[int, str] | None:
    """(where, what) of "the answer is x" with nothing but x after it, on one line."""
    text = text.rstrip()
    for said in reversed(list(SAID.finditer(text, max(0, len(text) - 2 * LONG)))):
        after = AFTER_SAID.match(text, said.end())
        rest = text[after.end() if after else said.end() :].strip("*_ \t")
        if "\n" in rest:
            return None
        if rest.strip("."):
            return said.start(), rest
    return None


def normal(text: str) -> str:
    """Without what does not change the meaning: LaTeX wrappers, spacing, currency, case, the full stop."""
    for old, new in SAME:
        text = text.replace(old, new)
    text = NOTHING.sub("", WRAPPER.sub(r"\1", WRAPPER.sub(r"\1", text))).strip().rstrip(".").strip()
    text = LOOSE_SPACE.sub("", SPACE.sub(" ", text)).strip("€£¥")
    while text.startswith("{") and text.endswith("}") and text.find("}") == len(text) - 1:
        text = text[1:-1]
    return text.casefold()


def number(text: str) -> Fraction | None:
    """Of 12, -1,234.50, 1e3, 3/4, \\frac{3}{4}, 50%; None for anything else."""
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-") if sign < 0 else text.removeprefix("+")
    text = text.lstrip("€£¥")
    unit = Fraction(sign, 100) if text.endswith("%") else Fraction(sign)
    text = text.removesuffix("%")
    over = OVER.fullmatch(text)
    if over is None:
        value = decimal(text)
        return None if value is None else unit * value
    above, below = (part for part in over.groups() if part is not None)
    for part in (above, below):
        if part.startswith("-"):
            unit = -unit
    top, bottom = decimal(above.removeprefix("-")), decimal(below.removeprefix("-"))
    return unit * top / bottom if top is not None and bottom else None


def decimal(text: str) -> Fraction | None:
    """Without a sign."""
    found = DECIMAL.fullmatch(text)
    if found is None:
        return None
    whole, part, exponent = (found[1] or "").replace(",", ""), (found[2] or "")[1:], found[3] or "0"
    if not whole and not part:
        return None
    return Fraction(int(whole + part)) * Fraction(10) ** (int(exponent) - len(part))
