r"""Are two answers the same? Structure first (lists, sets, points, intervals, equations, matrices), then the parts.

Three values: True, False, and None where a part would have to be worked out, which is left to ``leaf`` (see
mathematics.py). The wanted answer says what kind is asked for. Without a leaf nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial

from .notation import END, SET, TES, WORD, bare, clean, divided, number
from .reals import FLIP, REALS, Reals, real_set
from .structure import (
    LABEL,
    PLUS_MINUS,
    brackets,
    is_relation,
    items,
    labelled,
    outer,
    plus_minus,
    relation,
    rows,
    shared,
    split,
)
from .units import agree, measured

Leaf = Callable[[str, str, str], bool | None]  # given, wanted, and "=" for equations, "<" for relations, "" for values
MOST = 60  # parts of an answer: the time grows with their square

SEPARATOR = re.compile(r"[,;&]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|\\cup|\\pm")
MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
BASE = re.compile(r"\(?(-?(?:[0-9]|[A-Za-z]+[0-9])[0-9A-Za-z]*(?:\.[0-9A-Za-z]+)?)\)?\s*_\s*(?:\{([^{}]*)\}|([0-9]))")
DIGITS = re.compile(rf"{WORD}\s*([0-9A-Z]+)\s*{END}")
BASE_NAMES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "sixteen"]
BASES = dict(zip(BASE_NAMES, [*range(2, 13), 16], strict=True))
BUILDER = re.compile(rf"{SET}\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*(.*){TES}", re.DOTALL)
VALUE = re.compile(  # what has a name of its own
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|angle|triangle|bar|overline|vec|hat|Delta|max|min|det|deg|lfloor|lceil|Re|Im)"
    r"(?![A-Za-z])|[fghFGHPQE](?:_\w|'|\^\{-1\})*\(|^\|[A-Za-z]\|$"
)
SYMBOL = re.compile(r"[A-Za-z](?:_(?:\{[^{}]*\}|\w))?")
COMMAND = re.compile(r"\\[A-Za-z]+")
LETTERS = re.compile(r"[^\W\d_]+")
CHOICE = re.compile(r"\(?([A-Z])[).]?", re.IGNORECASE)
CHOSEN = re.compile(r"\(([A-E])\)\s+(.+)")  # \textbf{(C)}\ 5
NAMED = """
sin cos tan cot sec csc log ln exp sqrt pi arcsin arccos arctan sinh cosh tanh infinity infty theta alpha beta
"""
FUNCTIONS = frozenset(NAMED.split())
GREEK = frozenset(
    "\\" + name
    for name in ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "rho", "sigma", "tau", "phi", "omega")
)
NOTHING = frozenset(
    {"\\emptyset", SET + TES, "no solution", "no solutions", "no real solution", "no real solutions", "empty set"}
)


def same(given: str, wanted: str, leaf: Leaf | None = None) -> bool | None:
    """Of answers as they were written."""
    given, wanted = clean(given), clean(wanted)
    if max(len(SEPARATOR.findall(text)) for text in (given, wanted)) > MOST:
        return same_text(given, wanted)
    return compare(given, wanted, leaf)


def compare(given: str, wanted: str, leaf: Leaf | None = None) -> bool | None:
    """Of clean ones."""
    if not bare(given) or not bare(wanted):
        return False
    if same_text(given, wanted):
        return True
    if (y := number(wanted)) is not None and (x := number(given)) is not None:
        return x == y and (divided(wanted) or not divided(given))
    wanted, given = (unwrapped(text) for text in (wanted, given))
    if not bare(given) or not bare(wanted):
        return False
    for names in (NOTHING, REALS):
        if bare(wanted).lower() in names:
            if bare(given).lower() in names:
                return True
            if names is NOTHING:
                return False
    if PLUS_MINUS.search(given) or PLUS_MINUS.search(wanted):
        return compare_lists(plus_minus(items(given)), plus_minus(items(wanted)), False, leaf)
    related = is_relation(given) or is_relation(wanted)
    if related or "\\setminus" in given + wanted or "\\mathbb" in given + wanted:
        a, b = real_set(given), real_set(wanted)
        if a is not None and b is not None:
            return compare_sets(a, b, leaf)
    return compare_parts(given, wanted, related, leaf)


def unwrapped(text: str) -> str:
    """x > 3 of {x | x > 3}, {1, 2} of x \\in {1, 2}."""
    text = text.removeprefix("\\approx").strip()
    if (builder := BUILDER.fullmatch(text)) is not None:
        return builder[1]
    chain = relation(text)
    member = len(chain) == 3 and chain[1] == "\\in" and LABEL.fullmatch(chain[0]) and outer(chain[2], SET) is not None
    return chain[2] if member else text


def compare_parts(given: str, wanted: str, related: bool, leaf: Leaf | None) -> bool | None:
    again = partial(compare, leaf=leaf)
    inside, other = outer(wanted, SET), outer(given, SET)
    parts = items(given) if other is None else items(other, braced=True)
    if inside is not None:
        return compare_lists(parts, items(inside, braced=True), True, leaf)
    if len(items(wanted)) > 1:
        return compare_lists(parts, items(wanted), other is not None, leaf)
    if len(parts) > 1:
        return False  # several candidates
    if other is not None:
        return again(parts[0], wanted)
    if related:
        return compare_relations(given, wanted, leaf)
    pieces = split(given, "\\cup"), split(wanted, "\\cup")
    if len(pieces[0]) > 1 or len(pieces[1]) > 1:
        return match_all(*pieces, again)
    if "\\begin" in given or "\\begin" in wanted:
        return compare_matrices(given, wanted, leaf)
    a, b = brackets(given), brackets(wanted)
    if a is None and b is None:
        return compare_leaves(given, wanted, leaf)
    if a is None or b is None or a[0] != b[0] or len(a[1]) != len(b[1]):
        return False
    return every(again(g, w) for g, w in zip(a[1], b[1], strict=True))


# ---- leaves ----------------------------------------------------------------------------------------------------------


def compare_leaves(given: str, wanted: str, leaf: Leaf | None) -> bool | None:
    if (verdict := compare_bases(given, wanted)) is not None:
        return verdict
    if (chosen := CHOSEN.fullmatch(given)) is not None:
        core = measured(chosen[2]).core
        if not unknowns(core) and not is_text(core):
            given = chosen[1] if CHOICE.fullmatch(bare(wanted)) else chosen[2]
    a, b = measured(given), measured(wanted)
    if not agree(a.unit, b.unit):
        return False
    if a.unit and not b.unit and is_text(wanted):
        return False
    x, y = number(a.core), number(b.core)
    if y is not None:
        return x is not None and same_number(x, a.unit, y, b.unit) and (divided(b.core) or not divided(a.core))
    if ":" in b.core:
        left, right = a.core.split(":"), b.core.split(":")
        return len(left) == len(right) and all(
            number(p) is not None and number(p) == number(q) and not divided(p)
            for p, q in zip(left, right, strict=True)
        )
    if is_text(b.core) or is_text(a.core):
        return same_text(a.core, b.core)
    if same_text(a.core, b.core):
        return True
    if unknowns(a.core) != unknowns(b.core):
        return False
    return leaf(a.core, b.core, "") if leaf is not None else None


def unknowns(text: str) -> set[str]:
    """The symbols in it: x + 1 cannot be 5, nor t + 1."""
    symbols = set(COMMAND.findall(text)) & GREEK
    for run in LETTERS.findall(COMMAND.sub(" ", text)):
        if run.lower() not in FUNCTIONS:
            symbols.update(run)
    return symbols - {"e", "i"}


def same_number(given: Fraction, unit: str, wanted: Fraction, wanted_unit: str) -> bool:
    """5% is 0.05, or 5 where the truth is one or more: then it was asked for in per cent. The truth's sign may be left
    out."""
    if unit == "%" and wanted_unit == "":
        return given == wanted if abs(wanted) >= 1 else given / 100 == wanted
    if unit == "" and wanted_unit == "%":
        return given in (wanted, wanted / 100)
    return given == wanted


def compare_bases(given: str, wanted: str) -> bool | None:
    """Digits and base must be the same: 101_2 is not 5, which would be the question again. The base may be left out."""
    a, b = numeral(given), numeral(wanted)
    if b is None:
        return False if a is not None and number(wanted) is not None else None
    return bare(given).lstrip("0").upper() == b[0] if a is None else a == b


def numeral(text: str) -> tuple[str, int] | None:
    """("101", 2) of 101_2; None unless these are digits of that base."""
    written = BASE.fullmatch(DIGITS.sub(r"\1", text))
    if written is None:
        return None
    digits, named = written[1].lstrip("0").upper(), bare(written[2] or written[3] or "").lower()
    base = int(named) if named.isascii() and named.isdigit() and len(named) < 3 else BASES.get(named, 0)
    try:
        int(digits.replace(".", "") or "0", base if base > 1 else 1)
    except ValueError:
        return None
    return digits, base


def is_text(text: str) -> bool:
    """Words rather than an expression: marked ones, or runs of letters that no product of symbols would be."""
    if WORD in text:
        return True
    plain = COMMAND.sub(" ", text)
    for run in LETTERS.findall(plain):
        if run.lower() in FUNCTIONS:
            continue
        if len(run) >= 4 or not run.isascii() or (len(run) > 1 and run.isupper()):
            return True
    whole = bare(plain)
    return len(whole) >= 3 and whole.isalpha()


def same_text(given: str, wanted: str) -> bool:
    """Blind to case where they are words, or a letter to choose."""
    a, b = bare(given), bare(wanted)
    if a == b:
        return True
    if a.casefold() != b.casefold():
        one, other = CHOICE.fullmatch(a), CHOICE.fullmatch(b)
        return bool(one and other and other[1].isupper() and one[1].upper() == other[1] and len(a + b) > 2)
    return is_text(wanted) or (len(b) == 1 and b.isupper())


# ---- lists -----------------------------------------------------------------------------------------------------------


def every(verdicts: Iterable[bool | None]) -> bool | None:
    all_of_them = list(verdicts)
    return False if False in all_of_them else None if None in all_of_them else True


def match_all(given: Sequence[str], wanted: Sequence[str], again: Callable[[str, str], bool | None]) -> bool | None:
    """One to one, in any order."""
    if len(given) != len(wanted):
        return False
    left = list(given)
    unknown = False
    for one in wanted:
        verdicts = [again(other, one) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def compare_lists(given: list[str], wanted: list[str], as_set: bool, leaf: Leaf | None) -> bool | None:
    again = partial(compare, leaf=leaf)
    if len(given) == 1 and (inside := outer(given[0], SET)) is not None:
        given, as_set = items(inside, braced=True), True
    if len(wanted) == 1 and (inside := outer(wanted[0], SET)) is not None:
        wanted, as_set = items(inside, braced=True), True
    if not given or not wanted:
        return False
    marks = tuple(shared([labelled(one) for one in side]) for side in (given, wanted))
    names = [[label for label, _ in side] for side in marks]
    values = [[value for _, value in side] for side in marks]
    if all(names[1]) and len(set(names[1])) > 1:  # x = 1, y = 2
        if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) != len(names[0]):
            return False
        by_label = dict(marks[0])
        return every(again(by_label[label], value) for label, value in marks[1])
    if any(names[0]):
        if not all(names[0]) or (all(names[1]) and set(names[0]) != set(names[1])):
            return False
        unknown = {label.split("_")[0] for label in names[0]}
        if len(unknown) > 1:  # their order is that of the question
            if len(given) != len(wanted) or any(names[1]):
                return False
            in_order = [value for _, value in sorted(marks[0], key=lambda mark: mark[0])]
            return every(again(g, w) for g, w in zip(in_order, wanted, strict=True))
    if all(names[1]) or not any(names[1]):
        given, wanted = values[0], values[1]
    if as_set:
        given, wanted = distinct(given, again), distinct(wanted, again)
    return match_all(given, wanted, again)


def distinct(parts: list[str], again: Callable[[str, str], bool | None]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if not any(again(part, one) for one in kept):
            kept.append(part)
    return kept


# ---- relations -------------------------------------------------------------------------------------------------------


def compare_sets(given: Reals, wanted: Reals, leaf: Leaf | None) -> bool | None:
    if given[0] and wanted[0] and bare(given[0]) != bare(wanted[0]):
        return False
    written = [[f"{ends[0]}{start},{stop}{ends[1]}" for ends, start, stop in side[1]] for side in (given, wanted)]
    return match_all(written[0], written[1], partial(compare, leaf=leaf))


def compare_relations(given: str, wanted: str, leaf: Leaf | None) -> bool | None:
    """y = 2x + 3 is 2x + 3 and the other way round; x = 5 is not 2x = 10, which is to be solved still."""
    a, b = relation(given), relation(wanted)
    again = partial(compare, leaf=leaf)
    equations = set(a[1::2]) <= {"=", "\\approx", "\\in"}, set(b[1::2]) <= {"=", "\\approx", "\\in"}
    if not all(equations):
        if a[1::2] and b[1::2] and len(a) == len(b) == 3:
            if a[1] in FLIP and b[1] == FLIP[a[1]]:
                a = [a[2], b[1], a[0]]
            if a[1] == b[1]:
                both = every((again(a[0], b[0]), again(a[2], b[2])))
                return True if both else leaf(" ".join(a), " ".join(b), "<") if leaf is not None else None
        return False
    if len(b) == 1:
        return again(value_of(a), wanted) if solved(a[0], wanted) and consistent(a) and in_order(a[0]) else False
    named = LABEL.fullmatch(b[0]) is not None
    if len(a) == 1:
        if named:
            return again(given, b[-1]) if in_order(b[0]) else False
        constants = [part for part in b[::2] if number(measured(part).core) is not None]
        return any(again(given, part) for part in constants) if len(constants) == len(b[::2]) else False
    if named and same_text(a[-1], b[0]) and len(a) == 3:
        a = a[::-1]
    if named and same_text(a[0], b[0]):
        return again(value_of(a), b[-1])
    if len(a) != 3 or len(b) != 3 or (named and number(measured(b[-1]).core) is not None):
        return False
    return leaf(" ".join(a), " ".join(b), "=") if leaf is not None else None


def solved(part: str, wanted: str) -> bool:
    """No: x + 1 (= 5), to be solved for x still. Yes: x, f(2), \\sin x, |z|, a + b, and what the truth is made of."""
    if LABEL.fullmatch(part) or VALUE.search(part) or is_text(part):
        return True
    symbols = set(COMMAND.findall(part)) & GREEK | set(SYMBOL.findall(COMMAND.sub(" ", part)))
    return len(symbols - {"e", "i"}) != 1 or unknowns(part) <= unknowns(wanted)


def in_order(label: str) -> bool:
    """(x, y) and not (y, x), as a name for a point that was asked for without one."""
    letters = [letter.strip() for letter in label.strip("() ").split(",")]
    return letters == sorted(letters)


def value_of(chain: list[str]) -> str:
    """The last part of a = b = c; of b \\approx c the exact b, unless that is but a name."""
    parts = chain[::2]
    for i, sign in enumerate(chain[1::2]):
        if sign == "\\approx" and not LABEL.fullmatch(parts[i]):
            return parts[i]
    return parts[-1]


def consistent(chain: list[str]) -> bool:
    """No 3 = 4: all numbers in it are the same. Words in it are names."""
    if any(
        is_text(part) and re.search("[0-9]", measured(part).core) and number(measured(part).core) is None
        for part in chain[::2]
    ):
        return False  # "4 because 2 + 2 = 4"
    if "\\approx" in chain:
        return True
    numbers = [(number(core), unit == "%") for core, unit in (measured(part) for part in chain[::2])]
    values = {value for value, percent in numbers if not percent and value is not None}
    shares = {value for value, percent in numbers if percent and value is not None}
    return len(values) <= 1 and len(shares) <= 1 and all(p in values or p / 100 in values for p in shares if values)


# ---- matrices --------------------------------------------------------------------------------------------------------


def compare_matrices(given: str, wanted: str, leaf: Leaf | None) -> bool | None:
    a, b = MATRIX.fullmatch(given.strip("()[] ")), MATRIX.fullmatch(wanted.strip("()[] "))
    if a is None or b is None or (a[1] in ("vmatrix", "Vmatrix")) != (b[1] in ("vmatrix", "Vmatrix")):
        return False
    left, right = ([[cell.strip() for cell in row.split("&")] for row in rows(m[2])] for m in (a, b))
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    pairs = [(g, w) for x, y in zip(left, right, strict=True) for g, w in zip(x, y, strict=True)]
    return every(compare(g, w, leaf) for g, w in pairs)
