"""The unit at the end of an answer: 5 cm, \\$5, 50%, 90^\\circ. A unit may be left out; a different one is wrong."""

from __future__ import annotations

import re
from typing import NamedTuple

from .notation import END, WORD

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
# these change the value, or say that there is more than one, or none
NO_UNIT = """
one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety
hundred thousand million billion trillion dozen score half third quarter twice times over plus minus or and to not no
tens hundreds thousands millions billions trillions dozens halves thirds fourths fifths sixths sevenths eighths ninths
tenths hundredths thousandths below zero wrong false incorrect
between about around approximately nearly roughly than least most remainder choose factorial squared cubed root pi
infinity infinite base mod modulo if when for where all any except maybe either double triple negative by because since
is are was k bn mn
"""
NOT_UNITS = frozenset(NO_UNIT.split())
WORDS = re.compile(r"[A-Za-z¢.'/ -]+")
TRAILING = re.compile(
    rf"(?P<core>.*?[0-9.}})%]|.*?(?={WORD}))(?P<gap>\s*)"
    rf"(?:{WORD}(?P<marked>[^{WORD}{END}]*){END}|(?P<plain>[A-Za-z¢][A-Za-z¢. /]*+))"
    r"\s*(?:\^\s*(?:\{(?P<p1>[23])\}|(?P<p2>[23])))?",
    re.DOTALL,
)
DEGREES = re.compile(r"(.*[0-9})])\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*([FC]?)", re.DOTALL)
FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc|log|ln")


class Measured(NamedTuple):
    core: str
    unit: str  # "" if there is none


def measured(text: str) -> Measured:
    text = text.strip()
    for sign in CURRENCIES:
        for start in (sign, "-" + sign, sign + " ", "+" + sign):
            if text.startswith(start):
                core, unit = measured(text[len(start) :])
                if unit in SYNONYMS and unit != sign:
                    return Measured(text, "")  # \$5 cents
                per = "/" + unit.removeprefix("per ") if unit.startswith("per ") else ""
                return Measured((start[0] if start[0] in "-+" else "") + core, sign + per)
    if text[-1:] in ("%", "$", "€"):
        return Measured(text[:-1].strip(), text[-1])
    degrees = DEGREES.fullmatch(text)
    if degrees is not None and not FUNCTION.search(text):
        return Measured(degrees[1], f"deg {degrees[2]}".strip())
    trailing = TRAILING.fullmatch(text)
    if trailing is None:
        return Measured(text, "")
    marked = trailing["marked"] is not None
    noun = trailing["marked"] if marked else trailing["plain"]
    unit = noun.strip() if marked and noun.strip() in LETTERS else canonical(noun, marked or bool(trailing["gap"]))
    if not unit or not trailing["core"].strip():
        return Measured(text, "")
    return Measured(trailing["core"], unit + (trailing["p1"] or trailing["p2"] or ""))


def canonical(words: str, free: bool) -> str:
    """One name for a unit; "" if these are not the words of one. ``free``: set apart, so it may be any noun."""
    parts = [part.replace(".", "") for part in re.split(r"[\s-]+", words.strip().lower()) if part.strip(".")]
    if not 1 <= len(parts) <= 4 or not WORDS.fullmatch(words) or not NOT_UNITS.isdisjoint(parts):
        return ""
    power = ""
    if parts[0] in ("square", "sq", "cubic", "cu") and len(parts) > 1:
        power = "2" if parts[0][0] == "s" else "3"
        parts = parts[1:]
    names = [name(part) for part in parts]
    if len(names) == 1 and parts[0] not in NAMES and names[0] not in SYNONYMS and (not free or len(parts[0]) < 3):
        return ""  # 5 x is no measurement
    if not free and len(words) == 1:
        return ""  # nor is 5m
    if not free and len(names) > 1:
        return ""
    whole = " ".join(names)
    return RATES.get(whole.replace(" per ", "/"), whole) + power


def agree(a: str, b: str) -> bool:
    """The same unit, or one is left out; of degrees the scale, of a price what it is per."""
    short, long = sorted((a, b), key=len)
    return short in ("", long) or (short in ("deg", *CURRENCIES) and long.startswith((f"{short} ", f"{short}/")))


def name(word: str) -> str:
    if "/" in word:
        rate = "/".join(name(part) for part in word.split("/"))
        return RATES.get(rate, rate)
    single = word if word in NAMES or len(word) < 4 or not word.endswith("s") else word[:-1]
    return NAMES.get(word, NAMES.get(single, single))
