"""Pairs that people would argue about, each judged by hand; and answers of a real dataset against themselves."""

import re
from pathlib import Path

import pytest
import yaml

from rpg.verify.judge import verdict, verify

FOLDER = Path(__file__).parent / "pairs"


def load(name):
    groups = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return [(group, *row) for group, rows in groups.items() for row in rows]


ANSWERS, RESPONSES = load("answers"), load("responses")
MATH = [line for line in (FOLDER / "math.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def judged_otherwise(rows, form="%s"):
    """The rows that the judge sees another way than the people did, each with both reasons."""
    verdicts = [(row, verdict(form % row[1], row[2])) for row in rows]
    return [f"{row}: {seen.reason}" for row, seen in verdicts if seen.right != (row[3] == "right")]


def test_answers():
    wrong = judged_otherwise(ANSWERS, "so it is \\boxed{%s}")
    assert not wrong, "\n".join(wrong)


def test_responses():
    wrong = judged_otherwise(RESPONSES)
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_of_both():
    verdicts = [row[3] for row in ANSWERS + RESPONSES]
    assert set(verdicts) == {"right", "wrong"}
    assert len(verdicts) >= 800
    assert verdicts.count("wrong") >= 0.4 * len(verdicts)
    assert len({row[1:3] for row in ANSWERS}) == len(ANSWERS)


def rewritten(text):
    """The same answer as another hand would write it."""
    yield text.replace("\\frac", "\\dfrac")
    yield text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    yield re.sub(r"([+\-=])", r" \1 ", text)
    yield re.sub(r"(?<=[,+=-]) | (?=[,+=-])", "", text)
    yield f"${text}$."
    yield text.replace("(", "\\left(").replace(")", "\\right)") if "\\left" not in text else text
    if re.match(r"[0-9]", text) and ":" not in text:
        yield re.sub(r"\s*\\(text|mbox|textnormal)\{[^}]*\}(\^2)?\.?$", "", text)


@pytest.mark.parametrize("form", ["\\boxed{%s}", "Answer: %s", "#### %s", "The answer is %s", "<answer>%s</answer>"])
def test_math_answers_verify_against_themselves(form):
    assert len(MATH) >= 300
    assert [answer for answer in MATH if not verify("so\n" + form % answer, answer)] == []


def test_math_answers_in_another_hand():
    wrong = [(new, old) for old in MATH for new in rewritten(old) if not verify(f"\\boxed{{{new}}}", old)]
    assert wrong == []


def test_math_answers_differ_from_each_other():
    neighbours = [(a, b) for i, a in enumerate(MATH) for b in MATH[i + 1 : i + 4]]
    bare = [tuple(re.sub(r"\\text|\\mbox|[\\\s{}.]", "", text) for text in pair) for pair in neighbours]
    same = [
        pair
        for pair, plain in zip(neighbours, bare, strict=True)
        if plain[0] != plain[1] and verify(f"\\boxed{{{pair[0]}}}", pair[1])
    ]
    assert same == []
