r"""How answers are written: LaTeX and plain text brought into one form, numbers read exactly. Nothing is evaluated.

``clean`` gives text in which words stand between ``WORD`` marks and ``\{ \}`` are single characters, so that later
passes see one character per bracket. ``number`` reads what is a written-out rational number, and only that.
"""

from __future__ import annotations

import re
from fractions import Fraction

WORD, END, SET, TES, ROW = "\ue000\ue001\ue002\ue003\ue005"  # around words from \text{…}; the braces of a set; \\
OPENERS, CLOSERS = "([{" + SET + WORD, ")]}" + TES + END

WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|md|up)?|math(?:rm|bf|it|sf|tt|bb(?=\{[^RCQZN])|normal|cal)|mbox|hbox|emph|"
    r"operatorname\*?|boxed|fbox|underline)\s*\{([^{}]*)\}"
)
NOTHING = re.compile(
    r"\\[,!]|\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|textstyle|limits|boldsymbol|bm)(?![A-Za-z])"
    r"|\\(?:phantom|(?:text)?color(?![A-Za-z]))\s*(?:\{[^{}]*\})?|\*\*(?=[\s.]*$)|^\s*\*\*|[\u200b\u2060\ufeff]"
)
GAP = re.compile(r"\\[;:()\[\]]|\\q?quad(?![A-Za-z])")
EMPHASIS = re.compile(r"\s*([*_`]{1,2})(.+)\1([\s.]*)", re.DOTALL)
STYLE = re.compile(r"\{\s*\\(?:bf|it|rm|sf|tt|em)(?![A-Za-z])\s*([^{}]*)\}")
OVER_BAR = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
UNIT_LETTER = re.compile(r"\s*[mgshlLNJVW]\s*")  # after a number, in upright letters: metres, …
COMMAND = re.compile(r"\\[A-Za-z]+")
THOUSANDS = re.compile(r"(?<=[0-9])\s*(?:\{\s*,\s*\}|,\s*\\!\s*)(?=[0-9]{3}(?![0-9]))")
ARGUMENT = re.compile(
    r"(\\(?:frac|binom))\s*([0-9A-Za-z])|(\\(?:sqrt|mathbb|pmod))\s*([0-9A-Za-z])"
    r"|(\\(?:frac|binom|sqrt))\s+(?=[{\[\\])"
)
TWO_ARGUMENTS = re.compile(r"\\(?:frac|binom)\{")
INFINITY = re.compile(r"(?<![A-Za-z\\])infinity(?![A-Za-z])", re.IGNORECASE)
OPERATOR_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh log ln exp gcd lcm
"""
OPERATORS = frozenset(OPERATOR_NAMES.split())
DIGIT_OR_CLOSED = tuple("0123456789})")
COUNTED = re.compile(r"\s*([-+]?[0-9][0-9.,]*)\s+([A-Za-z][A-Za-z ]*)")
SPACE = re.compile(r"\s+")
LOOSE_SPACE = re.compile(r"(?<![^\W_]) | (?![^\W_])")  # one that does not stand between two letters or digits
SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SUPERS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
FULL = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
SAME = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "…": "...",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "±": r"\pm ", "√": r"\sqrt ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R} ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅔": r"\frac{2}{3}", "≈": r"\approx ", "、": ",", "。": ".", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
}  # fmt: skip
SPELLED = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne",
    r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\lt": "<", r"\gt": ">", r"\langle": "(", r"\rangle": ")",
    r"\lbrace": SET, r"\rbrace": TES, r"\lbrack": "[", r"\rbrack": "]", r"\varnothing": r"\emptyset",
    r"\lparen": "(", r"\rparen": ")", r"\colon": ":", r"\ast": r"\cdot", r"\degree": r"^\circ", r"\lvert": "|",
    r"\rvert": "|", r"\vert": "|", r"\mid": "|", r"\vee": " or ", r"\lor": " or ", r"\wedge": " and ",
    r"\land": " and ", r"\Rightarrow": " ", r"\implies": " ", r"\simeq": r"\approx", r"\div": "/",
    r"\smallsetminus": r"\setminus", r"\backslash": r"\setminus", r"\euro": "€", r"\pounds": "£", r"\dots": "...",
    r"\ldots": "...", r"\cdots": "...", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
}  # fmt: skip

DECIMAL = re.compile(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*)(?:\\(?:overline|bar)\{([0-9]+)\})?)?")
EXPONENT = re.compile(r"(?:(?<=[0-9.])e|^10\^|(?<=[0-9.])(?:\\times|\\cdot|\*)10\^)(\{?)([+-]?[0-9]{1,3})(\}?)")
LIST = re.compile(r",\s")
MIXED = re.compile(r"([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+) ([0-9]+)/([0-9]+)")
OVER = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}|([^/]*)/([^/]*)")


def clean(text: str) -> str:
    """One way to write what has several, with all that has a meaning kept."""
    if (marked := EMPHASIS.fullmatch(text)) is not None:
        text = ended(marked[2]) + marked[3]
    text = text.translate(FULL)
    text = text.replace("\\\\", ROW) if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = SUPERS.sub(lambda digits: "^{" + digits.group().translate(SUPER) + "}", text)
    for old, new in SAME.items():
        if old in text:
            text = text.replace(old, new)
    text = THOUSANDS.sub("", text).replace(r"\%", "%").replace("{,}", ",").replace("~", " ").replace("\\ ", " ")
    dollar = text.count("$") - text.count(r"\$")
    text = text.replace(r"\$", "\ue004")
    text = text.replace("$", "\ue004" if dollar == 1 else " ").replace("\ue004", "$")
    text = text.replace(r"\{", SET).replace(r"\}", TES)
    text = GAP.sub(" ", NOTHING.sub("", text))
    text = OVER_BAR.sub(r"\\frac{\1}{\2}", STYLE.sub(r"\\text{\1}", text))
    text = COMMAND.sub(lambda command: SPELLED.get(command.group(), command.group()), text)
    for _ in range(4):
        text, count = WRAPPER.subn(word, text)
        if not count:
            break
    text = INFINITY.sub(r"\\infty ", text)
    text = braced(ARGUMENT.sub(argument, text))
    return ended(SPACE.sub(" ", text).strip()).lstrip("=").strip()


def ended(text: str) -> str:
    """Without a full stop or the like; with the dots of 0.333... and 1,2,3,..., which say that there is more."""
    core = text.rstrip(".,;:\\ ")
    return text if ".." in text[len(core) :] else core


def word(match: re.Match[str]) -> str:
    """Marked as a word if it has two letters or more; a lone letter is a symbol, digits are digits."""
    inside = match.group(1).replace(WORD, "").replace(END, "")
    if inside.strip() in OPERATORS:
        return f"\\{inside.strip()} "
    if INFINITY.fullmatch(inside.strip()):
        return r"\infty "
    if match.group().startswith((r"\boxed", r"\fbox")):
        return match.group(1)
    upright = match.group().startswith((r"\text{", r"\mathrm", r"\textrm", r"\mbox"))
    if upright and UNIT_LETTER.fullmatch(inside) and match.string[: match.start()].rstrip()[-1:] in DIGIT_OR_CLOSED:
        return f"{WORD}{inside}{END}"
    if "\\" in inside or not re.search(r"[^\W\d_]{2}|[A-Za-z]\.", inside):
        return inside
    if counted := COUNTED.fullmatch(inside):
        return f"{counted[1]}{WORD}{counted[2]}{END}"
    pieces = re.split(r"(,|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))", inside)
    return "".join(p if i % 2 or not p.strip() else f"{WORD}{p}{END}" for i, p in enumerate(pieces))


def argument(match: re.Match[str]) -> str:
    a, b, c, d, e = match.groups()
    return e or f"{a or c}{{{b or d}}}"


def braced(text: str) -> str:
    r"""\frac{a}b and \frac{a} {b} as \frac{a}{b}, \binom{n}2 as \binom{n}{2}."""
    opened = TWO_ARGUMENTS.search(text)
    while opened is not None:
        end = closing(text, opened.end() - 1)
        if end < 0:
            break
        rest = text[end + 1 :].lstrip(" ")
        if rest[:1].isalnum():
            rest = "{" + rest[0] + "}" + rest[1:]
        text = text[: end + 1] + rest
        opened = TWO_ARGUMENTS.search(text, opened.end())
    return text


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at ``start`` is closed; -1 if nowhere. Kinds may differ: (0, 1]."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] in OPENERS:
            depth += 1
        elif text[at] in CLOSERS:
            depth -= 1
            if depth <= 0:
                return at if depth == 0 else -1
    return -1


def bare(text: str) -> str:
    """For comparing as text: no marks, no loose spaces, no brackets around all."""
    text = text.replace(WORD, " ").replace(END, " ")
    text = ended(LOOSE_SPACE.sub("", SPACE.sub(" ", text).strip()))
    while (
        len(text) > 1 and text[0] in "{(" and closing(text, 0) == len(text) - 1 and text[-1] in "})" and "," not in text
    ):
        text = text[1:-1].strip()
    return text


def number(text: str) -> Fraction | None:
    r"""Of 12, -1,234.50, 1.5e3, 1.5\times10^{3}, 3/4, \frac{3}{4}, 1\frac{1}{2}, 0.\overline{3}; None for all else."""
    if LIST.search(text):
        return None
    text = bare(text)
    sign = -1 if text.startswith("-") else 1
    text = (text.removeprefix("-") if sign < 0 else text.removeprefix("+")).lstrip()
    while (
        len(text) > 1
        and text[0] in "{("
        and closing(text, 0) == len(text) - 1
        and text[-1] in "})"
        and text[1:2] != "-"
        and "," not in text  # (20,100) is a point
    ):
        text = text[1:-1].strip()
    mixed = MIXED.fullmatch(text)
    if mixed is not None:
        whole, top, bottom = (int(part) for part in mixed.groups() if part is not None)
        return sign * (whole + Fraction(top, bottom)) if bottom and top < bottom else None
    over = OVER.fullmatch(text)
    if over is None:
        value = scientific(text)
        return None if value is None else sign * value
    above, below = (part.strip().strip("()") if "e" not in part else "" for part in over.groups() if part is not None)
    for part in (above, below):
        if part.startswith("-"):
            sign = -sign
    above, below = above.removeprefix("-"), below.removeprefix("-")
    top_, bottom_ = decimal(above), decimal(below)
    return sign * top_ / bottom_ if top_ is not None and bottom_ else None


def divided(text: str) -> bool:
    """10/2: a whole number that is still to be worked out. 10/4 is a number in a usual notation."""
    value = number(text) if "/" in text or "\\frac" in text else None
    return value is not None and value.denominator == 1


def scientific(text: str) -> Fraction | None:
    """Without a sign: a decimal, or one times a power of ten."""
    text = text.replace(" ", "") if "10^" in text else text
    power = EXPONENT.search(text.lower())
    if power is None or power.end() != len(text) or bool(power[1]) != bool(power[3]):
        return decimal(text)
    value = decimal(text[: power.start()] or "1")
    return None if value is None else value * Fraction(10) ** int(power[2])


def decimal(text: str) -> Fraction | None:
    """Digits, with thousands, a point, a repeating part."""
    digits = DECIMAL.fullmatch(text)
    if digits is None:
        return None
    whole, part, again = (digits[1] or "").replace(",", ""), digits[2] or "", digits[3] or ""
    if not whole and not part and not again:
        return None
    value = Fraction(int((whole + part) or "0"), 10 ** len(part))
    return value + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(part)) if again else value
