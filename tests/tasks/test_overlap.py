"""Duplicates and overlap: what counts as the same problem, what as nearly, and what a user is told."""

import random
import time

import pytest

from rpg.tasks.overlap import BANDS, NEAR, RUN, Index, lines, merge, notes, word_list, wrapped
from rpg.tasks.task import ENDLESS, Problem
from rpg.tasks.templates import TEMPLATES, fill


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $x + 1$?", "what is  x+1"),
        ("Find \\(\\left(a, b\\right)\\).", "Find $(a,\\, b)$"),
        ("Evaluate $\\dfrac{1}{2}$", "evaluate \\frac12"),
        ("What's the \\text{area}", "What s the area"),
    ],
)
def test_the_same_problem(one, other):
    index = Index([Problem(one, "1")])
    assert [pair.same for pair in index.overlap([Problem(other, "1")]).pairs] == [True]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Compute 3+4", "Compute 3-4"),
        ("Compute 12", "Compute 1 2"),
        ("Compute x^2", "Compute x_2"),
        ("Is a < b", "Is a > b"),
        ("求三", "求二"),
    ],
)
def test_another_problem(one, other):
    assert word_list(one) != word_list(other)


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_wrapped_around_a_problem_does_not_count(template):
    prompt = "How many primes are below 100? Put them in a box and think about them, step by step."
    assert word_list(fill(template, prompt)) == word_list(prompt)
    assert wrapped(fill(template, prompt)) == (template != "plain")
    assert not wrapped(prompt)
    verl = prompt + ' Let\'s think step by step and output the final answer after "####".'
    assert word_list(verl) == word_list(prompt)
    assert wrapped(verl)


def text(rng, length, vocabulary=500):
    return [f"w{chr(97 + rng.randrange(26))}{chr(97 + rng.randrange(26))}" for _ in range(length)]


def similarity(a, b):
    a, b = ({tuple(x[i : i + RUN]) for i in range(len(x) - RUN + 1)} for x in (a, b))
    return len(a & b) / len(a | b)


def test_nearly_the_same_is_what_comparing_all_pairs_says():
    rng = random.Random(0)
    train = [text(rng, 60) for _ in range(400)]
    test, expected = [], []
    for changes in range(8):
        for original in train[:25]:
            changed = list(original)
            for place in rng.sample(range(60), changes):
                changed[place] = "changed"
            test.append(changed)
            expected.append(max(similarity(changed, other) for other in train) >= NEAR and changes > 0)
    assert 20 < sum(expected) < 150
    index = Index([Problem(" ".join(t), "1") for t in train])
    found = index.overlap([Problem(" ".join(t), "1") for t in test])
    near = {pair.problem.prompt: pair.other.prompt for pair in found.near}
    missed = [t for t, wanted in zip(test, expected, strict=True) if wanted and " ".join(t) not in near]
    assert len(missed) <= 1
    assert len(near) == sum(expected) - len(missed)  # and no other
    for changed, place in zip(test, range(len(test)), strict=True):
        if " ".join(changed) in near:
            assert near[" ".join(changed)] == " ".join(train[place % 25])
    assert {pair.problem.prompt for pair in found.same} == {" ".join(t) for t in train[:25]}


def test_four_fifths_are_nearly_the_same():
    base, more = text(random.Random(4), 44), text(random.Random(5), 11)  # 40 runs, and one for each word more
    index = Index([Problem(" ".join(base), "1")])
    for added, near in ((10, 1), (11, 0)):  # 40 of 50, 40 of 51
        assert len(index.overlap([Problem(" ".join(base + more[:added]), "1")]).near) == near


def test_within_a_training_set():
    rng = random.Random(1)
    base = " ".join(text(rng, 60))
    problems = [
        Problem(base, "1"),
        Problem("other words here", "1"),
        Problem(base.upper() + "!", "2"),
        Problem(base + " x", "1"),
    ]
    found = Index(problems).repeated
    assert [(pair.problem, pair.other, pair.same) for pair in found.pairs] == [
        (problems[2], problems[0], True),
        (problems[3], problems[0], False),
    ]
    told = list(lines(found, {}))
    assert told[0].startswith(
        "train: 1 of 4 problems (and 1 nearly, 1 of them with the same answer) repeat an earlier one"
    )
    assert told[1].startswith("train: 1 of them have another answer there")
    assert told[1].endswith("'1' and '2'")


def test_the_first_of_several_is_named():
    problems = [Problem(text, "1") for text in ("Who is it?", "who is it", "WHO IS IT")]
    assert [pair.other for pair in Index(problems).repeated.pairs] == problems[:1] * 2


def test_short_and_empty_texts():
    assert not Index([Problem("7 * 8", "56"), Problem("7 * 9", "63"), Problem("!", "1")]).repeated.pairs
    assert not Index([]).repeated.pairs
    assert not Index([Problem("p", "1")]).overlap([]).pairs


def test_notes():
    train = [Problem("How many are there?", "1"), Problem("Where are they?", "2")]
    assert list(notes(train, {"own": [Problem("Who?", "3")]})) == []
    assert list(notes(train, {"own": [Problem("WHERE are they", "2"), Problem("Who?", "3")]})) == [
        "own: 1 of 2 problems are in the training set and stay there, such as 'WHERE are they'"
    ]

    rng = random.Random(3)
    base = " ".join(text(rng, 60))
    variant = {"own": [Problem(base + " x", "2")]}
    assert list(notes([Problem(base, "1")], variant)) == []  # another answer: another problem
    assert "and 1 nearly" in next(
        lines(Index([]).repeated, {"own": Index([Problem(base, "1")]).overlap(variant["own"])})
    )
    assert "and 1 nearly, 1 of them" in next(notes([Problem(base, "2")], variant))

    few = [Problem(base, "1"), Problem(base + " x", "1")]
    others = [Problem(" ".join(text(rng, 60)), "1") for _ in range(1100)]
    assert "and 1 nearly" in next(notes([*few, *others[:900]], {}))
    assert list(notes([*few, *others], {})) == []  # one in a thousand is none

    class Endless(list):
        def __len__(self):
            return ENDLESS

    assert list(notes([], {"own": train})) == []
    assert list(notes(train, {"own": Endless()})) == []


def test_merge():
    rows = [Problem(prompt, answer) for prompt, answer in ("b1", "a1", "b1", "b2", "a1", "b1")]
    kept, copies = merge(rows)
    assert [(p.prompt + p.answer) for p in kept] == ["b1", "a1", "b2"]
    assert copies == 3


def test_it_is_fast():
    rng = random.Random(2)
    problems = [Problem(" ".join(text(rng, 60)), "1") for _ in range(5000)]
    start = time.process_time()
    list(notes(problems, {"own": problems[:500]}))
    assert time.process_time() - start < 3
    assert BANDS == 16
