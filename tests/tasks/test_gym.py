"""reasoning-gym's generators: splits that do not meet, its own scores on the final answer, one line for a mistake."""

import json
import pickle

import pytest

from rpg.tasks import ENDLESS, Scorer, load_task
from rpg.tasks.sources import gym
from rpg.tasks.sources.gym import TEMPLATE
from rpg.tasks.task import Task

pytest.importorskip("reasoning_gym")
ARITHMETIC = "gym:basic_arithmetic?max_digits=2&max_terms=3"


def test_train_and_test_do_not_meet():
    task = load_task(ARITHMETIC)
    assert len(task.train) == len(task.test) == ENDLESS
    train, test = task.train[:2000], task.test[:100]
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert len({p.prompt for p in train}) > 1500
    assert len({p.prompt for p in test}) > 90
    assert {p.source for p in train} == {"gym:basic_arithmetic"}
    assert train[0].template == TEMPLATE


def test_the_seed_decides():
    task, other = load_task(ARITHMETIC), load_task(ARITHMETIC, seed=1)
    assert load_task(ARITHMETIC).train[:50] == task.train[:50]
    assert not {p.prompt for p in task.train[:50]} & {p.prompt for p in other.train[:50]}
    assert other.test[:50] == task.test[:50]
    assert task.train[123_456] == task.train[123_456]


def test_options():
    short, long = (
        load_task("gym:basic_arithmetic?max_terms=2"),
        load_task("gym:basic_arithmetic?min_terms=9&max_terms=9"),
    )
    assert max(len(p.prompt) for p in short.train[:50]) < min(len(p.prompt) for p in long.train[:50])
    words = load_task('gym:basic_arithmetic?operators=["*"]')
    assert not any("+" in p.prompt for p in words.train[:50])


def test_scores_are_of_the_final_answer():
    task = load_task(ARITHMETIC)
    problem = task.train[7]
    scores = {
        f"I think <answer>{problem.answer}</answer>": 1,
        f"so \\boxed{{{problem.answer}}}": 1,
        f"it may be {problem.answer}, or not": 0,
        problem.answer: 0,
        f"<answer>{problem.answer}</answer> no, <answer>{int(problem.answer) + 1}</answer>": 0,
        "": 0,
    }
    for response, expected in scores.items():
        assert (task.reward(response, problem.answer, problem.prompt) > 0.5) == expected
        assert expected or task.reward(response, problem.answer, problem.prompt) < 0.1


def test_several_right_answers_in_a_process_of_its_own():
    """A generator whose score needs more than the answer: the problem goes to the worker as well."""
    task = load_task("gym:word_sorting?max_words=4")
    problems = [*task.train[5000:5003], *task.test[:2]]
    right = [(f"<answer>{p.answer}</answer>", p.answer, p.prompt) for p in problems]
    wrong = [("<answer>zebra</answer>", p.answer, p.prompt) for p in problems]
    with Scorer(task.reward, workers=1) as scorer:
        found = scorer.score(right + wrong)
    assert found.failures == {"raised": 0, "timed_out": 0, "not_finite": 0}
    assert found.values[:5] == [1.0] * 5
    assert max(found.values[5:]) < 0.5


def test_wrong_answers_do_not_count_as_solved():
    task = load_task("gym:game_of_life")
    for problem in task.train[:5]:
        board = json.loads(problem.answer)
        board[0][0] = 1 - board[0][0]
        assert task.reward(f"<answer>{problem.answer}</answer>", problem.answer, problem.prompt) == 1
        assert 0.4 < task.reward(f"<answer>{json.dumps(board)}</answer>", problem.answer, problem.prompt) <= 0.5
    assert not task.notes


def test_scores_that_take_anything_for_right_are_told():
    assert load_task("gym:game_of_life_halting").notes[0] == (
        "gym:game_of_life_halting: its score is 1 for nonsense in 3 of 3 trials: wrong answers count as solved"
    )
    other = load_task("gym:puzzle24").notes
    assert len(other) == 1
    assert "gym:puzzle24: its score is 1 for the answer to another problem in 3 of 3 trials" in other[0]
    assert not load_task("gym:prime_factorization").notes  # whose score raises on nonsense


def test_the_problem_travels_with_its_answer(monkeypatch):
    """Some take seconds to make, which would be taken from the response's time."""
    task = load_task("gym:word_sorting?max_words=4")
    problem = pickle.loads(pickle.dumps(task.train[5]))
    reward = pickle.loads(pickle.dumps(task.reward))
    monkeypatch.setattr(gym, "_entry", None)
    made = gym._dataset.cache_info().misses
    assert reward(f"<answer>{problem.answer}</answer>", problem.answer, problem.prompt) == 1
    assert gym._dataset.cache_info().misses == made


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gym:basic_arithmetics", "unknown generator 'basic_arithmetics'|Did you mean 'basic_arithmetic'?"),
        ("gym:", "unknown generator ''"),
        ("gym:basic_arithmetic?max_digit=3", "unknown option 'max_digit'|Did you mean 'max_digits'?"),
        ("gym:basic_arithmetic?seed=3", "unknown option 'seed'"),
        ("gym:basic_arithmetic?min_terms=0", "gym:basic_arithmetic cannot be made|min_terms"),
        ("gym:composite", "gym:composite mixes others: write 0.5*gym:"),
    ],
)
def test_mistakes(name, words):
    with pytest.raises(ValueError) as error:
        load_task(name)
    assert "\n" not in str(error.value)
    for word in words.split("|"):
        assert word in str(error.value)


def test_as_part_of_a_mixture_and_as_a_test():
    task = load_task(f"0.5*arithmetic + 0.5*{ARITHMETIC}", test=f"{ARITHMETIC}, countdown")
    assert isinstance(task, Task)
    assert list(task.tests) == ["gym:basic_arithmetic", "countdown"]
    for problem in [*task.train[:6], *task.tests["gym:basic_arithmetic"][:3]]:
        right = f"answer {problem.answer}" if problem.source == "arithmetic" else f"<answer>{problem.answer}</answer>"
        assert task.reward(right, problem.answer, problem.prompt) == 1
        assert task.reward("answer 777", problem.answer, problem.prompt) < 0.1
