r"""Where the final answer of a response is. Single passes: the time is linear in the length, whatever is in it.

Forms, of which the last one in the text counts:

    \boxed{x}, \fbox{x}       the last one that is closed
    #### x                    to the end of the line; not a heading ("#### Step 2" with text below it)
    <answer>x</answer>        the last one that is closed
    Answer: x                 on a line of its own, with nothing after it but x (also "Final answer: …", "答案：x")

Only where there is none of these: "… so the answer is x" at the very end, on one line. What may stand before it in its
sentence is a list of what is right ("we conclude that", …): "I doubt that the answer is x" is no answer. After
``</think>`` only what follows counts, even if nothing does: an answer that was only thought of was not given.
``<think>`` that is never closed is a response that was cut off: no answer.
"""

from __future__ import annotations

import re

TAIL = 1200  # characters from the end in which an answer may be said in words

BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\[\\{}]|[{}]")
SAID = re.compile(r"(?<![A-Za-z</])answer(?![A-Za-z])|答案", re.IGNORECASE)
AFTER_SAID = re.compile(r"[\s:：=*_`]*+(?:is(?![A-Za-z])|[是为])?[\s:：=*_`]*+", re.IGNORECASE)
BEFORE_SAID = re.compile(r"[\s*_#>-]*+(?:the\s+)?+(?:final\s+)?+", re.IGNORECASE)
BETWEEN = re.compile(r"[\s:：*_]*(?:(?:so|thus|hence)\W+)?(?:the\s+)?(?:final\s+)?", re.IGNORECASE)
SENTENCE = re.compile(r"[.!?](?=\s|$)|[。！？]|\n\s*+(?![a-z])|\n[ \t]*+\n")
CLAUSE = re.compile(r"[.,;:!?，；：]|\b(?:and|(so|thus|hence|therefore|then|finally|consequently))\b", re.IGNORECASE)
LEADS = """
in conclusion summary we i it this that which means shows tells us gives is get have find found know see believe think
conclude follows the a my our final correct right required desired overall numerical exact now as result can say hope
"""
LEADING = frozenset(LEADS.split())
LEADING_CHINESE = re.compile(r"(?:所以|因此|因而|故|则|综上|最终|最后|正确|本题|这道题|题目|的|[\s*_])*+")
DOUBT = re.compile(
    r"\b(?:doubt|not|never|wrong|false|unless|whether|deny|denies|unlikely|incorrect|if|nobody|refuse|mistaken)\b|n['’]t\b",
    re.IGNORECASE,
)
LATIN_WORD = re.compile(r"[^\W\d_]+|[0-9]+|[^\w\s*_>#`$\\-]")
DISPLAY = re.compile(r"(?:\\\[|\$\$)\s*+([^\n]*+)\n\s*+(?:\\\]|\$\$)\.?")  # a formula on lines of its own
HEADING = re.compile(r"[*_\s]*+(?:[0-9]++[.):]\s++)?+[*_]*+[^\W\d_]")
HOPE = re.compile(r"\.?\s*I hope (?:it|this) is correct\.?", re.IGNORECASE)  # Minerva's prompt ends its answers so
THINK, THOUGHT, OPEN, CLOSE = "<think>", "</think>", "<answer>", "</answer>"

Located = tuple[int, str]  # where an answer begins, the answer


def final_answer(response: str) -> str | None:
    """The text of the last answer; None if there is none."""
    text = response.rpartition(THOUGHT)[2]
    if THINK in text and text.rfind(OPEN) < text.rfind(THINK):
        return None  # begun to think (again), and never finished
    said = said_answer(text)
    marked = marked_answer(text)
    if marked and not (said and said[2] and said[0] > marked[0]):
        return marked[1]
    return said[1] if said else None


def marked_answer(text: str) -> Located | None:
    """Of the last \\boxed{x}, #### x or <answer>x</answer>."""
    answers = [one for one in (tagged(text), lined(text), boxed(text)) if one is not None]
    return max(answers, key=lambda one: one[0], default=None)


def lined(text: str) -> Located | None:
    end, last = len(text), len(text.rstrip())
    while (start := text.rfind("####", 0, max(end, 0))) >= 0:
        stop = text.find("\n", start)
        line = text[start + 4 : stop if stop >= 0 else len(text)].strip()
        if not line:
            return None
        if not (0 <= stop < last and HEADING.match(line)):
            return start, line
        end = text.rfind("\n", 0, start)
    return None


def tagged(text: str) -> Located | None:
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    inside = text[start + len(OPEN) : end].strip()
    said = said_answer(inside)
    return start, inside if said is None else said[1]


def boxed(text: str) -> Located | None:
    """The box that begins last among those that are closed."""
    if "boxed" not in text and "fbox" not in text:
        return None
    opened: list[tuple[int, int] | None] = []  # the braces that are open; of a box, where it begins and its content
    last = (-1, 0, 0)
    for brace in BRACE.finditer(text):
        token = brace.group()
        if token == "{":
            opened.append(None)
        elif token == "}":
            at = opened.pop() if opened else None
            if at is not None and at[0] > last[0]:
                last = (*at, brace.start())
        elif len(token) > 2:
            opened.append((brace.start(), brace.end()))
    return (last[0], text[last[1] : last[2]]) if last[0] >= 0 else None


def said_answer(text: str) -> tuple[int, str, bool] | None:
    """Of "the answer is x" with nothing but x after it, on one line; True if it is a line of its own, "Answer: x"."""
    text = text.rstrip()
    start = max(0, len(text) - TAIL)
    tail = text[start:]
    hope = tail.lower().rfind("i hope")
    if hope >= 0:
        hoped = HOPE.search(tail, max(0, hope - 8))
        if hoped is not None and hoped.end() == len(tail):
            tail = tail[: hoped.start()]
    first, what = None, ""
    for said in reversed(list(SAID.finditer(tail))):
        after = AFTER_SAID.match(tail, said.end())
        assert after is not None  # it matches nothing, too
        rest = unmarked(tail[after.end() :])
        if "\n" in rest:
            break
        if first is None:
            if not rest.strip(".。"):
                continue
            what = rest
        elif not prefix(tail[said.end() : first]):
            break
        first = said.start()
        line = tail.rfind("\n", 0, first) + 1
        heading = "#" in tail[line:first] and "\n" in after.group()  # "#### Final answer", and x below it
        if BEFORE_SAID.fullmatch(tail, line, first) and (heading or ":" in after.group() or "：" in after.group()):
            return start + first, what, True
    return None if first is None or not asserted(tail[:first]) else (start + first, what, False)


def asserted(before: str) -> bool:
    """Whether what stands before "answer" in its sentence leads to it, and does not take it back."""
    sentence = SENTENCE.split(before)[-1]
    cut = max(CLAUSE.finditer(sentence), key=re.Match.start, default=None)
    clause = sentence[cut.end() if cut else 0 :]
    if not LEADING_CHINESE.fullmatch(clause):
        words = LATIN_WORD.findall(clause.lower())
        if not LEADING.issuperset(words) or words[:1] in (["that"], ["is"]):
            return False
    return bool(cut and cut[1]) or not DOUBT.search(sentence)


def unmarked(text: str) -> str:
    """Without the marks of Markdown around it, before or after the full stop, and out of its display."""
    core = text.rstrip("*_`. \t")
    text = core + "." * text.count(".", len(core))
    shown = DISPLAY.fullmatch(text)
    return text.lstrip(" \t") if shown is None else shown[1].strip()


def prefix(text: str) -> bool:
    """Of "Final Answer: The final answer is": what stands between the two."""
    return len(text) < 40 and BETWEEN.fullmatch(text) is not None
