"""verify: what is equal, what is not, and that no input makes it raise or wait."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rpg.verify.answers import final_answer
from rpg.verify.judge import verdict, verify
from rpg.verify.notation import number

MEGABYTE = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def worker_is_up():
    """It imports sympy, which on a busy machine takes longer than any answer may."""
    assert verify("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),  # cut off
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"} { \boxed{4}", "4"),
        (r"\fbox{5}", "5"),
        ("… = 6\n#### 6\n", "6"),
        ("#### 1\nno: #### 2", "2"),
        (r"#### 1 but \boxed{2}", "2"),
        (r"\boxed{2} #### 1", "1"),
        ("Answer: 7", "7"),
        ("**Answer:** 7", "7"),
        ("The answer is 7.", "7."),
        ("the answer is: 7", "7"),
        ("answer 7", "7"),
        ("Answer:\n\n7\n", "7"),
        ("The answer is 7. I hope it is correct.", "7"),
        ("Final Answer: The final answer is $7$.", "$7$."),
        ("**Final Answer**\n\n7", "7"),
        ("\\boxed{8}\nAnswer: 7", "7"),
        ("Answer: 7\n\\boxed{8}", "8"),
        (r"\boxed{8}. So the answer is clear.", "8"),  # prose does not outrank a box
        ("<answer> 7 </answer>", "7"),
        ("<answer>the answer is 7</answer>", "7"),
        (r"<answer>\boxed{7}</answer>", "7"),
        ("<answer>7", None),
        (r"<think>\boxed{1}</think> \boxed{7}", "7"),
        (r"<think>\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1}</think> and <answer>7</answer>", "7"),
        ("答案：7", "7"),
        (r"The answer is \boxed{8}.", "8"),
        (r"\boxed{8} is the answer.", "8"),
        ("Answer: 7\nand more text", None),
        ("the answers are 7", None),
        ("I answered 7", None),
        ("7", None),
        ("The answer is **7**.", "7."),
        ("The answer is 7...", "7..."),
        ("Answer: `7`", "7"),
        ("The answer is:\n\\[\n7\n\\]", "7"),
        ("#### Step 1\nand so on", None),
        ("#### 1. Step\nand so on", None),
        ("#### 7\n#### Check\nand so on", "7"),
        ("#### Seven", "Seven"),
        ("#### Final Answer\n\n7", "7"),
        ("\\boxed{8}\n### Answer\n**7**", "7"),
        ("\\boxed{8}\nThe answer\n7", "8"),
        ("####", None),
        ("####\n7", None),
        ("", None),
        (r"\boxed", None),
        (r"\boxed{", None),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


EQUAL = r"""42|42 ; 42.0|42 ; 042|42 ; +5|5 ; -5|-5 ; −5|-5 ; .5|0.5 ; 5.|5 ; 1/2|0.5 ; 2/4|1/2 ; -1/2|-0.5 ; 1/-2|-0.5
50%|1/2 ; 50\%|0.5 ; 12.5%|1/8 ; 1,234|1234 ; 1,234,567.50|1234567.5 ; 1{,}234|1234 ; 1\,234|1234 ; $1,200|1200
\$5|5 ; €5|5 ; -$5|-5 ; \frac{1}{2}|0.5 ; \dfrac{3}{4}|\tfrac{3}{4} ; \frac{-1}{2}|-\frac{1}{2} ; \frac12|1/2
1e3|1000 ; 1.5e-3|0.0015 ; 1E3|1000 ; $42$|42 ; \(42\)|42 ; \text{42}|42 ; \text{\textbf{42}}|42 ; **42**|42
{42}|42 ; \left(1, 2\right)|(1,2) ; x + 1|x+1 ; \mathrm{A}|A ; yes|Yes ; 1 / 2|0.5 ; 42|\boxed{42}
42|long story #### 42 ; two words|two  words ; 1e999999999|1e999999999"""
DIFFERENT = r"""42|43 ; 1,23|123 ; 1 1/2|11/2 ; 1 2|12 ; 1/0|1/0.0 ; 1/0|0 ; nan|0 ; inf|1e999
50%|5 ; 0.333|1/3 ; x|y ; 1e999999999|1e999999998 ; 1_000|1000 ; 0x10|16 ; ٤٢|42 ; \frac{1}{}|1
__import__('os')|4 ; .|. ; |"""


def pairs(text):
    return [tuple(pair.strip().split("|")) for row in text.split("\n") for pair in row.split(" ; ")]


@pytest.mark.parametrize(("given", "truth"), pairs(EQUAL))
def test_equal(given, truth):
    assert verify(f"\\boxed{{{given}}}", truth)
    assert verify(f"so it is\n#### {given}", truth)


@pytest.mark.parametrize(("given", "truth"), pairs(DIFFERENT))
def test_different(given, truth):
    assert not verify(f"\\boxed{{{given}}}", truth)
    assert not verify(f"\\boxed{{{truth}}}", given)


@pytest.mark.parametrize(("given", "truth"), [("2+2", "4"), ("--5", "5"), ("1/2/3", "1/6"), ("2^{10}", "1024")])
def test_arithmetic_is_not_left_to_the_reader(given, truth):
    assert not verify(f"\\boxed{{{given}}}", truth)
    assert verify(f"\\boxed{{{truth}}}", given)  # worked out further than the truth


@pytest.mark.parametrize(
    ("response", "truth", "reason"),
    [
        ("\\boxed{42}", "42", "same text"),
        ("\\boxed{42.0}", "42", "same number"),
        ("\\boxed{43}", "42", "another number"),
        ("\\boxed{}", "42", "empty answer"),
        ("42", "42", "no final answer"),
        ("\\boxed{42}", " ", "the truth is empty"),
        ("\\boxed{(1, 2)}", "(1,2)", "equal"),
        ("\\boxed{(1, 3)}", "(1,2)", "different"),
        ("\\boxed{5_{}}", "101_2", "different"),  # no base, and no error
        ("\\boxed{t+1}", "x+1", "different"),  # other unknowns: nothing to work out
        ("\\boxed{" + "x" * 601 + "}", "x", "different, and longer than 600 characters"),
        (None, "42", "not text"),
    ],
)
def test_reasons(response, truth, reason):
    assert verdict(response, truth).reason == reason


def test_no_answer_is_wrong():
    assert not verify("42", "42")
    assert not verify("", "")
    assert not verify("\\boxed{}", "")
    assert not verify(None, "42")
    assert not verify("\\boxed{42}", 42)


@given(st.fractions(), st.integers(-20, 20))
def test_numbers_are_exact(value, exponent):
    top, bottom = value.numerator, value.denominator
    assert verify(f"\\boxed{{\\frac{{{top}}}{{{bottom}}}}}", f"{3 * top}/{3 * bottom}")
    assert not verify(f"\\boxed{{{top}/{bottom}}}", f"{top * 10**9 + bottom}/{bottom * 10**9}")
    assert number(f"{top}e{exponent}") == top * Fraction(10) ** exponent
    assert number(f"{top:,}.0") == top


PIECES = [
    *"{}$\\#*%,./-+e0123456789 \n~−€",
    "\\boxed{",
    "\\frac{",
    "####",
    "answer",
    "Answer: ",
    " is ",
    "\\text{",
    "\\left",
    "1e999999999",
    "\ud800",
]
TEXT = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


@settings(max_examples=400, deadline=500)
@given(TEXT, TEXT)
@example("\\boxed{1/0}", "1/0")
def test_never_raises(response, truth):
    assert verify(response, truth) in (True, False)
    assert verify(f"\\boxed{{{response}}}", response) in (True, False)


@pytest.mark.parametrize(
    "piece",
    [
        *PIECES,
        "\\boxed{}",
        "\\boxed ",
        "answer:",
        "answer is ",
        "9",
        "1,",
        "\\fbox",
        "}{",
        "(",
        " 1",
        "#### a\n",
        "`",
        "1. ",
    ],
)
def test_a_megabyte_takes_no_time(piece):
    for tail in ("", "\\boxed{1}", "#### 1", "answer is 1"):
        text = piece * (MEGABYTE // len(piece)) + tail
        start = time.process_time()
        verify(text, "1")
        assert time.process_time() - start < 1.5, tail


def test_a_megabyte_of_answer():
    text = "\\boxed{" + "{" * (MEGABYTE // 2) + "}" * (MEGABYTE // 2) + "}"
    start = time.process_time()
    assert verify(text, "{" * (MEGABYTE // 2) + "}" * (MEGABYTE // 2))
    assert not verify("\\boxed{" + "9" * MEGABYTE + "}", "9" * MEGABYTE + "0")
    assert not verify("\\boxed{1}", "\\boxed{" * (MEGABYTE // 7))
    assert time.process_time() - start < 3
