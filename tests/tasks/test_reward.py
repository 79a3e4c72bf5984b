"""Rewards that are sums: their parts, what counts as solved, what a part that fails costs, and form."""

import os
import time

import pytest

from rpg.rewards.scoring import Scorer
from rpg.tasks import Problem, Task
from rpg.tasks.reward import make_reward, well_formed
from rpg.tasks.templates import TEMPLATES

OWN = """
import asyncio, os, sys, time

def length(response, answer, prompt):
    if "raise" in response: raise ValueError("no length")
    if "nan" in response: return float("nan")
    if "hang" in response: time.sleep(1000)
    if "die" in response: os._exit(3)
    return len(response) / 10

async def judge(response, answer, prompt):
    await asyncio.sleep(0.01)
    if "judge" in response: raise KeyError("judge")
    return 0.5

def pid(response, answer, prompt):
    return os.getpid()

def huge(response, answer, prompt):
    return float(response)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(OWN)
    return path


def ends_in(response, answer, prompt):
    return float(response.endswith(answer))


def where(response, answer, prompt):
    return os.getpid()


def task(reward=ends_in, template="boxed", **options):
    problems = [Problem("6*7", "42", template=template)]
    return Task("t", problems, problems, reward, **options)


def score(parts, responses, reward=ends_in, own=None, trusted=True, template=None, **options):
    made = make_reward(own, parts, task(reward, trusted=trusted), template)
    with Scorer(made, **options) as scorer:
        return scorer.score([(response, "42", "6*7") for response in responses])


def test_the_tasks_own_reward_and_one_function_are_as_before(own):
    for scores in (
        score({}, ["42", "41"]),
        score({}, ["42", "41"], trusted=False),
        score({}, ["42", "41"], own=f"{__file__}:ends_in"),
    ):
        assert scores.values == [1.0, 0.0]
        assert scores.solved == [True, False]
        assert scores.parts == {}
    assert score({}, ["12345678"], own=f"{own}:length").values == [0.8]
    failed = score({}, ["raise"], own=f"{own}:length", on_error=1.0)
    assert (failed.values, failed.solved) == ([1.0], [False])  # a call that failed solves nothing


def test_the_sum_and_its_parts(own):
    boxed, plain, wrong = "It is \\boxed{42} so 42", "so 42", "\\boxed{41}"
    scores = score({"correct": 1, "format": 0.5, f"{own}:length": -0.1}, [boxed, plain, wrong])
    lengths = [len(boxed) / 10, len(plain) / 10, len(wrong) / 10]
    assert scores.parts == {"correct": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 1.0], "mine.length": lengths}
    assert scores.values == pytest.approx([1.5 - 0.1 * lengths[0], 1 - 0.1 * lengths[1], 0.5 - 0.1 * lengths[2]])
    assert scores.solved == [True, True, False]
    assert scores.messages == []


def test_a_bonus_never_counts_as_solved():
    parts = {"correct": 0.1, "format": 5}
    scores = score(parts, ["\\boxed{41}", "42"])
    assert scores.values == [5.0, 0.1]
    assert scores.solved == [False, True]
    assert score({"format": 1}, ["\\boxed{41}", "42"]).solved == [True, False]  # nothing else to go by
    assert score({"format": 0.4}, ["\\boxed{41}", "42"]).solved == [False, False]


def test_a_part_that_fails_costs_that_part(own):
    responses = ["raise 42", "nan 42", "hang 42", "die 42", "judge 42", "42"]
    parts = {"correct": 1.0, f"{own}:length": 10.0, f"{own}:judge": 2.0}
    for workers, trusted in ((1, True), (2, False)):
        scores = score(parts, responses, trusted=trusted, workers=workers, timeout=1.0, on_error=-1.0)
        assert scores.parts["correct"] == [1.0] * 6
        assert scores.parts["mine.length"] == [-1.0, -1.0, -1.0, -1.0, 0.8, 0.2]
        assert scores.parts["mine.judge"] == [0.5, 0.5, 0.5, 0.5, -1.0, 0.5]
        assert scores.values == [-8.0, -8.0, -8.0, -8.0, 7.0, 4.0]
        assert scores.solved == [True] * 6
        assert scores.failures == {"raised": 3, "timed_out": 1, "not_finite": 1}
        assert sorted(scores.messages) == [
            "mine.judge: KeyError: 'judge' (mine.py:13)",
            "mine.length: ValueError: no length (mine.py:5)",
            "mine.length: no answer after 1 s",
            "mine.length: returned nan, not a finite number",
            "mine.length: worker died: exit code 3",
        ]


def broken(response, answer, prompt):
    raise RuntimeError("cannot say")


def test_where_the_deciding_part_fails_nothing_is_solved(own):
    scores = score({"correct": 1.0, "format": 1.0}, ["\\boxed{42}"], reward=broken, on_error=1.0)
    assert (scores.values, scores.solved) == ([2.0], [False])
    assert scores.messages == [
        f"correct: RuntimeError: cannot say (test_reward.py:{broken.__code__.co_firstlineno + 1})"
    ]


def test_trusted_parts_are_called_here_and_others_are_not(own):
    scores = score({"correct": 1, f"{own}:pid": 1}, ["x"], reward=where)
    assert scores.parts["correct"] == [os.getpid()]
    assert scores.parts["mine.pid"] != [os.getpid()]
    scores = score({"correct": 1, f"{own}:pid": 1}, ["x"], reward=where, trusted=False, workers=1)
    assert scores.parts["correct"] == scores.parts["mine.pid"] != [os.getpid()]


def test_a_weight_of_zero_only_reports(own):
    scores = score({"correct": 1, f"{own}:length": 0}, ["42"])
    assert (scores.values, scores.parts["mine.length"]) == ([1.0], [0.2])


def test_a_sum_that_is_no_reward_is_a_failure(own):
    """Of finite parts: too large for Python, for float32, or two infinities that cancel."""
    responses = ["1e308", "1e38", "1", "-1e308"]
    scores = score({f"{own}:huge": 10.0}, responses, on_error=-1.0)
    assert scores.values == [-1.0, -1.0, 10.0, -1.0]
    assert scores.solved == [False, False, True, False]
    assert scores.failures == {"raised": 0, "timed_out": 0, "not_finite": 3}
    assert scores.messages == ["the sum of weight × part is beyond ±3.4e+38"]
    scores = score({"correct": 1.0, f"{own}:huge": 10.0}, ["1e308"], reward=lambda *_: 1.0)
    assert (scores.values, scores.solved) == ([0.0], [True])  # as correct says
    again = f"{os.path.dirname(own)}/./mine.py:huge"
    scores = score({f"{own}:huge": 10.0, again: -10.0}, ["1e308", "1"])
    assert (scores.values, scores.solved, scores.failures["not_finite"]) == ([0.0, 0.0], [False, False], 1)
    assert score({"format": 1}, ["\\boxed{1}"], on_error=1.0).values == [1.0]


def test_names_of_parts(tmp_path):
    def names(*specs):
        return [part.name for part in make_reward(None, dict.fromkeys(specs, 1.0), task())]

    assert names("correct", "format") == ["correct", "format"]
    assert names("a/mine.py:f", "package.module:g") == ["mine.f", "package.module.g"]
    assert names("a/mine.py:f", "b/mine.py:f") == ["a_mine.py:f", "b_mine.py:f"]


def test_mistakes_are_one_line():
    for own, parts, words in (
        ("mine.py:f", {"correct": 1.0}, "task.reward is the only reward|task.rewards"),
        (None, {"corect": 1.0}, "task.rewards|'corect'. Did you mean 'correct'?|file.py:name"),
        (None, {"fromat": 1.0}, "Did you mean 'format'?"),
        (None, {"my_reward": 1.0}, "unknown reward|'my_reward'|file.py:name"),
        (None, {"correct": float("nan")}, "task.rewards|weight of correct|nan"),
        (None, {"correct": "much"}, "weight of correct|'much'"),
        (None, {"correct": 0.0, "format": 0}, "all weights are 0"),
    ):
        with pytest.raises(ValueError) as error:
            make_reward(own, parts, task())
        assert "\n" not in str(error.value)
        for word in words.split("|"):
            assert word in str(error.value)


# ---- form ------------------------------------------------------------------------------------------------------------

THINK = "<think>\nSix sevens.\n</think>\n\nIt is \\boxed{42}."


@pytest.mark.parametrize(
    ("template", "good", "bad"),
    [
        (
            "boxed",
            [
                *("so \\boxed{42}", "\\boxed{\\frac{1}{2}} it is", "\\boxed{wrong}", THINK, "\\boxed{} \\boxed{1}"),
                *(
                    "\\boxed{\\pi}",
                    "\\boxed{\\{\\}}",
                    "\\boxed{\\text{B}}",
                    "\\boxed{\\infty}",
                    "\\boxed{<}",
                    "\\boxed{[]-}",
                ),
            ],
            [
                *("42", "", "\\boxed{}", "\\boxed{ }", "\\boxed{42", "Answer: 42", "<think>\\boxed{42}</think> done"),
                *(
                    "\\boxed{\\,}",
                    "\\boxed{$$}",
                    "\\boxed{\\text{ }}",
                    "\\boxed{\\quad.}",
                    "\\boxed{\\\\}",
                    "\\boxed{~}",
                ),
            ],
        ),
        (
            "answer",
            ["so\nAnswer: 42", "Answer: $42$\n\n", "**Answer:** 42", "answer : 42", "<think>x</think>\nAnswer: 1"],
            [
                *("42", "the Answer: 42", "Answer: 42\nI hope so", "Answer:", "Answer: **", "\\boxed{42}", "Answer 42"),
                *("Answer: .", "Answer: $", "Answer: $$.", "Answer: \\", "**Answer:** ___", "Answer: \\(\\)"),
            ],
        ),
        (
            "think",
            [THINK, "Six sevens.</think>\\boxed{42}", "  <think></think>\\boxed{42}"],
            [
                "\\boxed{42}",
                "<think>Six sevens. \\boxed{42}",
                "<think>Six \\boxed{42}</think> so 42",
                f"Well. {THINK}",
                f"<think>{THINK}",
                f"{THINK} <think>again",
                f"{THINK} </think> \\boxed{{42}}",
                f"{THINK} {THINK}",
                "<think>Six sevens.</think> Answer: 42",
            ],
        ),
        (
            "plain",
            ["\\boxed{42}", "#### 42", "Answer: 42", "<answer>42</answer>"],
            [
                *("no idea", "", "<think>\\boxed{42}</think>"),
                *("\\boxed{}", "<answer></answer>", "<answer> </answer>", "Answer: $", "#### .", "the answer is $."),
            ],
        ),
        (
            "{prompt} <think> reason </think> <answer> result </answer>",
            ["<think>x</think> <answer>42</answer>", "x</think>\nso\n<answer>\nwrong\n</answer>\n"],
            [
                *("<answer>42</answer>", "<think>x</think>\\boxed{42}", "<think>x</think> <answer>.</answer>"),
                *("<think>x</think> <answer>42", "<think>x</think> 42</answer>", "x</think></answer>42<answer>"),
                *("<think>x</think> <answer>1</answer> <answer>2</answer>", "x</think><answer>42</answer> or so"),
                "<think><answer>42</answer></think>",
            ],
        ),
        (
            "{prompt} <answer> \\boxed{} </answer>",
            ["so <answer>it is \\boxed{42}</answer>"],
            ["\\boxed{42}", "<answer>42</answer>", "\\boxed{42} <answer>42</answer>", "<answer>\\boxed{}</answer>"],
        ),
        ("Q: {prompt} <think>", ["x</think>\n#### 42"], ["#### 42"]),
        ("{prompt} Write Answer: at last", ["Answer: 42"], ["#### 42"]),
    ],
)
def test_the_form_is_what_the_template_asks_for(template, good, bad):
    responses = good + bad
    expected = [1.0] * len(good) + [0.0] * len(bad)
    found = score({"format": 1}, responses, template=template).values
    assert dict(zip(responses, found, strict=True)) == dict(zip(responses, expected, strict=True))


def test_without_a_template_of_the_run_the_problems_templates_count():
    problems = [Problem("a", "1", template="boxed"), Problem("b", "2", template="answer")]
    made = make_reward(None, {"format": 1}, Task("t", problems[:1], {"x": problems[1:]}, ends_in))
    with Scorer(made) as scorer:
        responses = ["\\boxed{1}", "Answer: 1", "#### 1"]
        assert scorer.score([(r, "1", "") for r in responses]).values == [1.0, 1.0, 0.0]
    made = make_reward(None, {"format": 1}, Task("t", problems[:1], {"x": problems[1:]}, ends_in), "boxed")
    with Scorer(made) as scorer:
        assert scorer.score([(r, "1", "") for r in responses]).values == [1.0, 0.0, 0.0]


def test_hostile_responses_take_linear_time():
    start = time.perf_counter()
    texts = ["<think>", "</think>", "{", "\\boxed{", "}", "*", "_ ", "answer", "Answer:", "\n", "\\boxed{}"]
    for text in (*texts, "<answer>", "</answer>", "\\text", "\\quad", "Answer: \\"):
        for template in (*TEMPLATES.values(), "{prompt} <answer>"):
            well_formed(text * (400_000 // len(text)), "", "", asked=(template,))
    assert time.perf_counter() - start < 20
