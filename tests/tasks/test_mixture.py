"""Mixtures: exact proportions in every stretch, every problem in every pass, and each part's own reward."""

import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.tasks import ENDLESS, Problem, Scorer, Task, load_task
from rpg.tasks.sources.mixture import TaggedProblems, finite, mix, parse, pattern
from rpg.tasks.task import TaggedAnswer, tag_of


def score(response, answer, prompt):
    return float(response == answer)


def other_score(response, answer, prompt):
    return float(response == answer[::-1])


def make(name, count, reward=score, **rest):
    problems = [Problem(f"{name} {i}", f"{i:03}") for i in range(count)]
    return Task(name, problems, [Problem(f"{name} test", "12")], reward, **rest)


def test_names():
    assert parse("gsm8k") == [(1.0, "gsm8k")]
    assert parse("0.7*gsm8k + .3 * math") == [(0.7, "gsm8k"), (0.3, "math")]
    assert parse("gsm8k  +  2e1*a+b.jsonl") == [(1.0, "gsm8k"), (20.0, "a+b.jsonl")]
    assert parse("1.*a + .5e1*b*c") == [(1.0, "a"), (5.0, "b*c")]
    assert parse("gym:x?a=1&b=2 + my_task.py:make") == [(1.0, "gym:x?a=1&b=2"), (1.0, "my_task.py:make")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a + ", "beside nothing"),
        ("0*a + b", "weight of a|positive|0"),
        *(("-1*a", "weight of a|-1"), ("nan*a + b", "weight of a|nan"), ("b + INF*a", "weight of a|inf")),
        *(("a + 2*a", "a stands there twice"), ("gsm8k + GSM-8K", "gsm8k stands there twice")),
    ],
)
def test_names_that_are_none(text, words):
    with pytest.raises(ValueError) as error:
        parse(text)
    for word in ("task.name", *words.split("|")):
        assert word in str(error.value)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_after_any_number_of_problems_each_part_has_had_its_share(weights):
    parts, total = pattern(weights), sum(weights)
    counts = Counter()
    for n, part in enumerate(parts * 2, 1):
        counts[part] += 1
        assert all(abs(counts[p] - w * n / total) < 1 for p, w in enumerate(weights))


def test_weights():
    assert Counter(pattern([0.7, 0.3])) == {0: 7, 1: 3}
    assert Counter(pattern([1, 1, 1])) == {0: 1, 1: 1, 2: 1}
    assert Counter(pattern([0.123, 0.877])) == {0: 123, 1: 877}
    fine = Counter(pattern([2**0.5, 1]))
    assert abs(fine[0] / fine.total() - 2**0.5 / (1 + 2**0.5)) < 1e-4
    assert min(Counter(pattern([1e-9, 1])).values()) == 1


def test_passes():
    task = mix([make("a", 30), make("b", 7)], [3, 1], seed=5)
    assert len(task.train) == ENDLESS
    first = task.train[:4000]
    for source, size in (("a", 30), ("b", 7)):
        own = [p.prompt for p in first if p.source == source]
        passes = [own[i : i + size] for i in range(0, len(own) - size, size)]
        assert all(len(set(one)) == size for one in passes)
        assert passes[0] != passes[1]
        assert passes[0] != sorted(passes[0])
    for start in range(0, 4000, 40):
        assert abs(sum(p.source == "a" for p in first[start : start + 40]) - 30) < 2
    again = mix([make("a", 30), make("b", 7)], [3, 1], seed=5)
    assert [again.train[i] for i in (3999, 17, 0)] == [first[i] for i in (3999, 17, 0)]  # in any order
    assert mix([make("a", 30), make("b", 7)], [3, 1], seed=6).train[:100] != first[:100]


def test_tests_stay_apart_and_one_reward_stays_itself():
    task = mix([make("a", 3, notes=("a: note",)), make("b", 3)], [1, 1])
    assert {name: problems[0].prompt for name, problems in task.tests.items()} == {"a": "a test", "b": "b test"}
    assert task.name == "a+b"
    assert task.notes == ("a: note",)
    assert task.reward is score
    assert not isinstance(task.train[0].answer, TaggedAnswer)
    assert len(finite(task.train)) == 6


def test_each_part_has_its_reward():
    task = mix([make("a", 5), make("b", 5, other_score)], [1, 1])
    shown = task.train[:20]
    items = [(p.answer, p.answer, p.prompt) for p in shown] + [(p.answer[::-1], p.answer, p.prompt) for p in shown]
    tests = [problems[0] for problems in task.tests.values()]
    items += [("12", p.answer, p.prompt) for p in tests] + [("21", p.answer, p.prompt) for p in tests]
    palindrome = [p.answer == p.answer[::-1] for p in shown]
    expected = [float(p.source == "a" or same) for p, same in zip(shown, palindrome, strict=True)]
    expected += [float(p.source == "b" or same) for p, same in zip(shown, palindrome, strict=True)] + [1, 0, 0, 1]
    assert 0 < sum(palindrome) < 20
    assert [task.reward(*item) for item in items] == expected
    with Scorer(task.reward, workers=1) as scorer:  # in a process of its own
        assert scorer.score(items).values == expected
    with pytest.raises(ValueError, match="as the task gave it"):
        task.reward("1", str(shown[0].answer), "")


def test_mixtures_of_mixtures_and_of_built_in_tasks():
    inner = mix([make("a", 5), make("b", 5, other_score)], [1, 1])
    task = mix([inner, load_task("arithmetic")], [1, 1])
    for problem in task.train[:40]:
        right = {"a": problem.answer, "b": problem.answer[::-1]}.get(problem.source, f"answer {problem.answer}")
        assert task.reward(right, problem.answer, problem.prompt) == 1
        assert task.reward(f"x{right}x", problem.answer, problem.prompt) == 0
    assert {p.source for p in task.train[:40]} == {"a", "b", "arithmetic"}
    assert len(finite(TaggedProblems(task.train, 0, "x"))) == 10  # the endless part has none to count
    assert finite(load_task("arithmetic").train) == []
    assert load_task("arithmetic + countdown").trusted


@pytest.mark.parametrize("reward", [score, other_score])
def test_test_sets_of_the_same_name_stay_apart(reward):
    tasks = [make("own", 3), make("own", 4, reward), make("own", 5)]
    for task, prefix in zip(tasks, "xyz", strict=True):
        task.test[0] = Problem(f"{prefix} test", "12")
    task = mix(tasks, [1, 1, 1], given=["x/own.jsonl", "y/own.jsonl", "own"])
    assert {name: problems[0].prompt for name, problems in task.tests.items()} == {
        "own": "x test",
        "y/own.jsonl": "y test",
        "own (2)": "z test",
    }
    assert task.name == "own+y/own.jsonl+own (2)"
    assert task.reward("12", task.tests["own (2)"][0].answer, "") == 1


def test_a_part_without_problems():
    with pytest.raises(ValueError, match="empty has no problems to train on"):
        mix([make("a", 3), make("empty", 0)], [1, 1])


def test_tags():
    answer = TaggedAnswer("42", (1, "x"))
    again = pickle.loads(pickle.dumps(answer))
    assert (again, again.tag, hash(again)) == ("42", (1, "x"), hash("42"))
    assert tag_of(again) == (1, "x")
