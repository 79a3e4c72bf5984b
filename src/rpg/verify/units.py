"""The unit at the end of an answer: 5 cm, \\$5, 50%, 90^\\circ. A unit may be left out; a different one is wrong.

Units and nouns are those of a list (here and in nouns.py). Words that are not in it are part of the answer: they may
not be left out, and the truth must have the same. Words like million multiply.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from .notation import END, WORD, number
from .nouns import ADJECTIVES, NOUNS, singular

SYNONYMS = {
    "$": "dollar buck usd", "€": "euro eur", "£": "gbp", "¥": "yen", "cent": "¢ penny pennies",
    "%": "percent percentage pct", "deg": "degree degs", "rad": "radian",
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram", "mg": "milligram",
    "kg": "kilogram kilo", "lb": "pound", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre",
    "gal": "gallon", "s": "second sec", "min": "minute", "h": "hour hr", "day": "days", "week": "wk",
    "month": "", "year": "yr",
    "mph": "", "kmh": "kph", "unit": "", "am": "", "pm": "", "acre": "", "person": "people",
    "F": "fahrenheit", "C": "celsius centigrade", "N": "newton", "J": "joule", "V": "volt", "W": "watt",
}  # fmt: skip
CURRENCIES = "$€£¥"
LETTERS = frozenset("NJVW")  # units only in upright letters, \text{N}: elsewhere they are symbols
RATES = {"km/h": "kmh", "mi/h": "mph"}
NAMES = {word: name for name, words in SYNONYMS.items() for word in (name, *words.split())}
SCALES = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "million": 6,
    "crore": 7,
    "billion": 9,
    "trillion": 12,
    "quadrillion": 15,
    "quintillion": 18,
}  # powers of ten
TIMES = {"dozen": Fraction(12), **{word: Fraction(10**power) for word, power in SCALES.items()}}
ALONE = frozenset(("square", "cube", "root"))  # as the last word these say what to do with the number
WORDS = re.compile(r"[A-Za-z¢.'/ -]+")
TRAILING = re.compile(
    rf"(?P<core>.*?[0-9.}})%]|.*?(?={WORD}))(?P<gap>\s*)"
    rf"(?:{WORD}(?P<marked>[^{WORD}{END}]*){END}|(?P<plain>[A-Za-z¢][A-Za-z¢. /]*+))"
    r"\s*(?:\^\s*(?:\{(?P<p1>[23])\}|(?P<p2>[23])))?",
    re.DOTALL,
)
DEGREES = re.compile(r"(.*[0-9})])\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*([FC]?)", re.DOTALL)
FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc|log|ln")


LISTED = frozenset((*SYNONYMS, *NOUNS, *ADJECTIVES, *RATES.values()))
UNKNOWN = "?"  # before words that are no unit


class Measured(NamedTuple):
    core: str
    unit: str  # "" if there is none


def measured(text: str) -> Measured:
    text = text.strip()
    for sign in CURRENCIES:
        for start in (sign, "-" + sign, sign + " ", "+" + sign):
            if text.startswith(start):
                core, unit = measured(text[len(start) :])
                if unit.startswith(UNKNOWN) or (unit in SYNONYMS and unit != sign):
                    return Measured(text, "")  # \\$5 cents
                per = "/" + unit.removeprefix("per ") if unit.startswith("per ") else ""
                return Measured((start[0] if start[0] in "-+" else "") + core, sign + per)
    if text[-1:] in ("%", "$", "€"):
        return Measured(text[:-1].strip(), text[-1])
    degrees = DEGREES.fullmatch(text)
    if degrees is not None and not FUNCTION.search(text):
        return Measured(degrees[1], f"deg {degrees[2]}".strip())
    trailing = TRAILING.fullmatch(text)
    if trailing is None or not trailing["core"].strip():
        return Measured(text, "")
    marked = trailing["marked"] is not None
    noun = (trailing["marked"] if marked else trailing["plain"]).strip()
    core, noun = multiplied(trailing["core"], noun) if marked or trailing["gap"] else (trailing["core"], noun)
    if not noun:
        return Measured(core, "")
    unit = noun if marked and noun in LETTERS else canonical(noun, marked, marked or bool(trailing["gap"]))
    return Measured(core, unit + (trailing["p1"] or trailing["p2"] or "")) if unit else Measured(text, "")


def multiplied(core: str, words: str) -> tuple[str, str]:
    """("5000000", "dollars") of ("5", "million dollars")."""
    first, _, rest = words.partition(" ")
    while (scale := TIMES.get(first.lower())) is not None and (value := number(core)) is not None:
        core, words = str(value * scale), rest.strip()
        first, _, rest = words.partition(" ")
    return core, words


def canonical(words: str, marked: bool, apart: bool) -> str:
    """One name for a unit; "?…" of words that are not in the list; "" where they may be symbols: 5 x, 5xy."""
    parts = [part.replace(".", "") for part in re.split(r"[\s-]+", words.lower()) if part.strip(".")]
    if not parts or (not apart and (len(parts) > 1 or len(words) == 1)):
        return ""  # nor is 5m a measurement
    power = ""
    if parts[0] in ("square", "sq", "cubic", "cu") and len(parts) > 1:
        power = "2" if parts[0][0] == "s" else "3"
        parts = parts[1:]
    names = [name(part) for part in parts]
    if len(parts) == 1 and len(parts[0]) < 3 and parts[0] not in NAMES and names[0] not in SYNONYMS:
        return UNKNOWN + words if marked else ""
    attached = apart or parts[0].partition("/")[0] in NAMES  # 5cm, 18km/h; not 5eggs
    if attached and len(parts) <= 4 and parts[-1] not in ALONE and all(known(one) for one in names):
        whole = " ".join(names)
        return RATES.get(whole.replace(" per ", "/"), whole) + power
    return UNKNOWN + " ".join(words.lower().split()) if marked or max(map(len, parts)) > 3 else ""


def known(word: str) -> bool:
    return all(part in LISTED for part in word.split("/"))


def agree(a: str, b: str) -> bool:
    """The same unit, or one is left out; of degrees the scale, of a price what it is per."""
    short, long = sorted((a, b), key=len)
    if long.startswith(UNKNOWN):
        return short == long
    return short in ("", long) or (short in ("deg", *CURRENCIES) and long.startswith((f"{short} ", f"{short}/")))


def name(word: str) -> str:
    if "/" in word:
        rate = "/".join(name(part) for part in word.split("/"))
        return RATES.get(rate, rate)
    single = word if word in NAMES or len(word) < 4 or not word.endswith("s") else word[:-1]
    return NAMES.get(word) or NAMES.get(single) or singular(word)
