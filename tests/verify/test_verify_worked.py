"""Numbers are worked out, for all kinds of truth: answers that are right by construction, and with a step undone."""

import random
from math import comb

import pytest

from rpg.rewards import worker
from rpg.verify.judge import judged, verify
from rpg.verify.mathematics import refusal

SQUAREFREE = [2, 3, 5, 6, 7, 10, 11, 13]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Without a worker: nothing here is slow."""
    monkeypatch.setattr(worker, "inside_worker", True)
    judged.cache_clear()


def undone(rng, n):
    """The number with a step left to the reader."""
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    ways = [
        f"({n - k}+{k})",
        f"({n + k}-{k})",
        f"\\frac{{{k * n}}}{{{k}}}",
        f"({k}\\cdot {n}-{k - 1}\\cdot {n})",
        f"\\sqrt{{{n * n}}}",
        f"\\binom{{{n}}}{{1}}",
        f"({n + m * m}-{m}^2)",
        f"|{-n}|",
        f"(\\sqrt{{{n + m}}}^2-{m})",
    ]
    if n % 2 == 0:
        ways += [f"2\\cdot {n // 2}", f"(2\\times {n // 2})"]
    if n in (4, 9, 16, 25, 36):
        ways.append(f"{round(n**0.5)}^{{2}}")
    if n == comb(5, 2):
        ways.append("\\binom{5}{2}")
    return rng.choice(ways)


def made(rng):
    """(truth, the same as others write it, the same with @ for one of its numbers, that number)"""
    a, b, c = rng.randint(2, 30), rng.randint(2, 12), rng.choice(SQUAREFREE)
    whole, surd = rng.randint(2, 30), f"{b}\\sqrt{{{c}}}"
    return rng.choice(
        [
            (f"{a}\\pi", [f"\\pi\\cdot {a}", f"{a}.0\\pi"], "@\\pi", a),
            (f"{a}+{surd}", [f"{surd}+{a}", f"{a}+\\sqrt{{{b * b * c}}}"], f"@+{surd}", a),
            (surd, [f"\\sqrt{{{b * b * c}}}", f"\\frac{{{b * c}}}{{\\sqrt{{{c}}}}}"], f"{b}\\sqrt{{@}}", c),
            (f"{a}-{b}i", [f"-{b}i+{a}"], f"{a}-@i", b),
            (f"\\frac{{{2 * a + 1}}}{{2}}\\pi", [f"{a}.5\\pi"], "\\frac{@}{2}\\pi", 2 * a + 1),
            (f"{a}x^{{{b}}}+{whole}", [f"{whole}+{a}x^{{{b}}}"], f"{a}x^{{{b}}}+@", whole),
            (f"{a}x^{{{b}}}+{whole}", [f"x^{{{b}}}\\cdot {a}+{whole}"], f"{a}x^{{@}}+{whole}", b),
            (f"(x+{a})(x-{b})", [f"x^2+{a}x-{b}x-{a * b}"], f"(x+@)(x-{b})", a),
            (f"({a},{surd})", [f"({a}.0,\\sqrt{{{b * b * c}}})"], f"(@,{surd})", a),
            (f"[{a},\\infty)", [f"x\\ge {a}"], "[@,\\infty)", a),
            (f"y={a}x+{b}", [f"{a}x-y+{b}=0"], f"y={a}x+@", b),
            (f"e^{{{b}}}", [f"\\exp({b})"], "e^{@}", b),
            (f"\\ln {c}", [f"\\ln({c})", f"\\frac{{\\ln {c * c}}}{{2}}"], "\\ln(@)", c),
            (f"\\frac{{{a}+\\sqrt{{{c}}}}}{{31}}", [f"\\frac{{{a}}}{{31}}+\\frac{{\\sqrt{{{c}}}}}{{31}}"],
             f"\\frac{{@+\\sqrt{{{c}}}}}{{31}}", a),
            (f"{a}\\pm {surd}", [f"{a}+{surd}, {a}-{surd}"], f"@\\pm {surd}", a),
            (f"{a}", [f"{a}.0", f"x={a}", f"{a}\\text{{ cm}}", f"{a}00\\cdot10^{{-2}}"], "@", a),
        ]
    )  # fmt: skip


def otherwise(seed, count):
    """What is judged in another way than it was made."""
    rng = random.Random(seed)
    for _ in range(count):
        truth, same, form, n = made(rng)
        left = form.replace("@", undone(rng, n))
        for given, wanted, right in [(truth, truth, True), *((one, truth, True) for one in same), (left, truth, False)]:
            if verify(f"\\boxed{{{given}}}", wanted) != right:
                yield given, wanted, right
        if "=" not in truth and not refusal(left) and not verify(f"\\boxed{{{truth}}}", left):
            yield truth, left, True


def test_made_answers():
    assert list(otherwise(0, 50)) == []


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"\ln 4-\ln 2", r"\ln 2", False),
        (r"2\ln 2", r"\ln 4", True),
        (r"\frac{1\pm\sqrt5}{2}", r"\frac{1\pm\sqrt5}{2}", True),
        (r"\frac{2+2\sqrt{5}}{4}", r"\frac{1+\sqrt5}{2}", True),
        (r"e^{2}\cdot e", r"e^3", False),
    ],
)
def test_terms_that_are_alike_only_after_a_look(answer, truth, right):
    assert verify(rf"\boxed{{{answer}}}", truth) is right
