r"""How an answer is put together: the parts of lists, sets, points, intervals, equations and matrices, as text."""

from __future__ import annotations

import re

from .notation import CLOSERS, END, OPENERS, ROW, SET, TES, WORD, bare, closing, number
from .units import measured

RELATION = re.compile(
    rf"\\(?:le|ge|ne|in|approx|equiv|notin|subset)(?![A-Za-z])|[=<>]|[{re.escape(OPENERS + CLOSERS)}]"
)
LABEL = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z])(?:_(?:\{[^{}]*\}|\w))?'*(?:\([A-Za-z, ]{1,9}\))?|\|?[A-Z]{1,4}\|?|\\angle ?[A-Z]{1,3}"
    rf"|\([A-Za-z](?:, ?[A-Za-z])*\)|{WORD}[^{WORD}{END}]*{END}"
)
JOINT = re.compile(rf"{WORD}\s*(and|or|;|,)\s*{END}")
COMMA = re.compile(r"(?<![A-Za-z\\])(?:,?\s*)(?:and|or)(?![A-Za-z])|;")
PLUS_MINUS, MINUS_PLUS = (re.compile(rf"\\{name}(?![A-Za-z])") for name in ("pm", "mp"))
CLOSES = {SET: TES, "(": ")"}


def split(text: str, at: str) -> list[str]:
    """At the top level, outside all brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] in OPENERS:
            depth += 1
        elif text[i] in CLOSERS:
            depth -= 1
        elif depth == 0 and text.startswith(at, i):
            parts.append(text[start:i])
            i = start = i + len(at)
            continue
        i += 1
    return [*parts, text[start:]]


def outer(text: str, opener: str) -> str | None:
    """What is inside the brackets around all of it."""
    text = text.strip()
    if text.startswith(opener) and closing(text, 0) == len(text) - 1 and text[-1] == CLOSES[opener]:
        return text[1:-1]
    return None


def brackets(text: str) -> tuple[str, list[str]] | None:
    """("(]", ["0", "1"]) of (0,1]."""
    text = text.strip()
    if not text or text[0] not in "([" or text[-1] not in ")]" or closing(text, 0) != len(text) - 1:
        return None
    inside = text[1:-1].replace(";", ",")
    parts = [part.strip() for part in split(inside, ",")]
    if any(part.startswith(" ") for part in split(inside, ",")[1:]):
        parts = items(inside)
    return (text[0] + text[-1], parts) if len(parts) > 1 and all(parts) else None


def items(text: str, braced: bool = False) -> list[str]:
    """The parts of a list; of 1,234 one part, but two if it stood in braces. ``and`` and ``or`` are commas."""
    text = COMMA.sub(" , ", JOINT.sub(r" \1 ", text))
    if not braced and number(measured(text).core) is not None:
        return [text]
    parts = split(text, ",")
    if any(part.startswith(" ") for part in parts[1:]):  # spaced: the commas without a space may be of thousands
        joined = [parts[0]]
        for part in parts[1:]:
            if re.match(r"[0-9]{3}(?![0-9])", part) and re.search(r"(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})*$", joined[-1]):
                joined[-1] += "," + part
            else:
                joined.append(part)
        parts = joined
    parts = [part.strip() for part in parts]
    return parts if all(parts) else [part for part in parts if part] if len(parts) > 2 else [text]


def labelled(text: str) -> tuple[str, str]:
    """("x", "3") of x = 3."""
    parts = split(text, "=")
    if len(parts) == 2 and LABEL.fullmatch(parts[0].strip()):
        return bare(parts[0]), parts[1].strip()
    return "", text


def shared(marks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """x = 1, 2 as x = 1, x = 2."""
    alone = len(marks) > 1 and marks[0][0] and not any(label for label, _ in marks[1:])
    return [(marks[0][0], value) for _, value in marks] if alone else marks


def plus_minus(parts: list[str]) -> list[str]:
    """Each part with \\pm in it as two."""
    signed = []
    for part in parts:
        if PLUS_MINUS.search(part):
            signed += [MINUS_PLUS.sub(b, PLUS_MINUS.sub(a, part)).strip() for a, b in (("+", "-"), ("-", "+"))]
        else:
            signed.append(part)
    return [re.sub(r"^((?:[^=]*=)?)\s*\+\s*", r"\1", part) for part in signed]


def relation(text: str) -> list[str]:
    """[a, "<", b, "\\le", c] of a < b \\le c, at the top level."""
    parts, depth, start = [], 0, 0
    for sign in RELATION.finditer(text):
        token = sign.group()
        if token in OPENERS:
            depth += 1
        elif token in CLOSERS:
            depth -= 1
        elif depth == 0:
            parts += [text[start : sign.start()].strip(), token]
            start = sign.end()
    return [*parts, text[start:].strip()]


def is_relation(text: str) -> bool:
    return len(relation(text)) > 1


def rows(text: str) -> list[str]:
    return [row for row in re.split(rf"{ROW}(?:\[[^\]]*\])?", text) if row.strip()]
