"""The built-in problems checked independently, the scorers, and the base model that comes with the package."""

import itertools
import json
import re

import pytest

from rpg.tasks import load_task
from rpg.tasks.sources.builtin import LARGEST, score_arithmetic, score_countdown, score_mixed

NAMES = ("arithmetic", "countdown", "mixed")
COUNT = 10_000


@pytest.fixture(scope="module")
def problems():
    """10,000 of each split."""
    tasks = {name: load_task(name) for name in NAMES}
    return {name: (task.train[:COUNT], task.test[:COUNT]) for name, task in tasks.items()}


# ---- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_a_function_of_seed_and_index(name):
    task = load_task(name, seed=3)
    some = [task.train[i] for i in (0, 7, 1_000_000)]
    assert some == [load_task(name, seed=3).train[i] for i in (0, 7, 1_000_000)]
    assert task.train[5:8] == [task.train[5], task.train[6], task.train[7]]
    assert task.train[:50] != load_task(name, seed=4).train[:50]
    assert task.test[:50] == load_task(name, seed=4).test[:50]  # what runs are compared on


def test_problems_are_the_same_on_every_machine():
    task = load_task("arithmetic")
    assert [p.prompt for p in task.train[:3]] == ["20+4+1+13-11+11\n", "4+15*6+11-20\n", "15+3+9-1\n"]
    assert [p.prompt for p in task.test[:3]] == ["17+15+11+20-17-14\n", "19*4+2-10\n", "17+6+17-7-15\n"]


@pytest.mark.parametrize("name", NAMES)
def test_train_and_test_are_disjoint_whatever_the_seed(name, problems):
    train, test = ({p.prompt for p in split} for split in problems[name])
    assert not train & test
    assert not {p.prompt for p in load_task(name, seed=99).train[:COUNT]} & test
    assert len(train) > 0.5 * COUNT  # they hardly repeat


def test_arithmetic_is_right_and_its_steps_stay_in_range(problems):
    for p in itertools.chain(*problems["arithmetic"]):
        expression = p.prompt.removesuffix("\n")
        assert re.fullmatch(r"\d+(?:[-+*]\d+)+", expression)
        assert int(p.answer) == eval(expression)
        assert 0 <= int(p.answer) <= LARGEST
        assert len(re.findall(r"[-+*]", expression)) == p.level + 1
        for product in re.findall(r"\d+(?:\*\d+)+", expression):
            assert eval(product) <= LARGEST


def chain_values(numbers):
    """All values of a∘b∘c … from left to right, in every order."""
    found = set()
    for order in set(itertools.permutations(numbers)):
        for operators in itertools.product("+-*", repeat=len(order) - 1):
            value = order[0]
            for operator, number in zip(operators, order[1:], strict=True):
                value = eval(f"({value}){operator}{number}")
            found.add(value)
    return found


def test_countdown_can_be_solved(problems):
    for p in (*problems["countdown"][0][:150], *problems["countdown"][1][:150]):
        target, numbers = re.fullmatch(r"make (\d+) from ((?:\d+ ?)+)\n", p.prompt).groups()
        numbers = [int(n) for n in numbers.split()]
        assert target == p.answer
        assert int(target) in chain_values(numbers)
        assert len(numbers) == (4 if p.level == 3 else 3)
        assert max(numbers) <= (20 if p.level == 2 else 9)


@pytest.mark.parametrize(("name", "levels"), [("arithmetic", {1, 2, 3, 4}), ("countdown", {1, 2, 3})])
def test_levels_are_about_equally_frequent(name, levels, problems):
    for split in problems[name]:
        share = {level: sum(p.level == level for p in split) / COUNT for level in levels}
        assert sum(share.values()) == 1
        assert all(value == pytest.approx(1 / len(levels), abs=0.03) for value in share.values())


def test_mixed_has_both(problems):
    for split in problems["mixed"]:
        assert sum(p.prompt.startswith("make") for p in split) / COUNT == pytest.approx(0.5, abs=0.03)


# ---- scorers ---------------------------------------------------------------------------------------------------------

HOSTILE = [
    "",
    "answer",
    "answer ",
    "27",
    "answer  27",
    "answer 27 answer",
    "answer 27 28",
    "answer 2 7",
    "answer 27\nanswer 28",
    "answer 27.0",
    "answer 0027",
    "answer +27",
    "answer ٢٧",
    "answer -27",
    "answer twenty-seven",
    "answer 2" + "7" * 100_000,
    "answer " * 100_000,
    "answer (" * 50_000,
    "\x00answer\x0027",
    "ANSWER 27",
    "answer __import__('os').system('true')",
    "answer 9**9**9",
]


@pytest.mark.parametrize("response", HOSTILE, ids=lambda text: repr(text[:24]))
def test_hostile_arithmetic_responses_earn_nothing(response):
    assert score_arithmetic(response, "27", "3+3*8\n") == 0.0


@pytest.mark.parametrize("response", ["answer 27", "3+24=27\nanswer 27", "answer 3\nanswer 27\n", "xanswer 27  \n"])
def test_right_arithmetic_responses_earn_one(response):
    assert score_arithmetic(response, "27", "3+3*8\n") == 1.0


@pytest.mark.parametrize("response", ["answer 3*5+9", "answer 5*3+9", "no\nanswer 3*5+9\n", "answer 9 \nanswer 5*3+9"])
def test_right_countdown_responses_earn_one(response):
    assert score_countdown(response, "24", "make 24 from 3 5 9\n") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        *HOSTILE,
        "answer 24",
        "answer 3*5+9+0",
        "answer 3*5",
        "answer 9+5*3",  # from left to right this is 42
        "answer 9+(5*3)",
        "answer (3*5+9)",
        "answer 3*5+9=24",
        "answer 3*5+9-",
        "answer -3*5+9",
        "answer 3**5+9",
        "answer 3*5+09",
        "answer 15+9",
        "answer 3*3+15",
        "answer 12+12",
        "answer 3 5 9",
        "answer ",
        "3*5+9",
        "answer 9*" + "9*" * 40 + "9",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_wrong_countdown_responses_earn_nothing(response):
    assert score_countdown(response, "24", "make 24 from 3 5 9\n") == 0.0


def test_a_number_given_twice_is_to_be_used_twice():
    assert score_countdown("answer 4*4+8", "24", "make 24 from 4 8 4\n") == 1.0
    assert score_countdown("answer 4*8-8", "24", "make 24 from 4 8 4\n") == 0.0


def test_mixed_scores_by_the_prompt():
    assert score_mixed("answer 3*5+9", "24", "make 24 from 3 5 9\n") == 1.0
    assert score_mixed("answer 24", "24", "make 24 from 3 5 9\n") == 0.0
    assert score_mixed("answer 27", "27", "3+3*8\n") == 1.0


def test_every_answer_scores_one_and_its_neighbour_nothing(problems):
    for p in problems["arithmetic"][1][:500]:
        assert score_arithmetic(f"answer {p.answer}", p.answer, p.prompt) == 1.0
        assert score_arithmetic(f"answer {int(p.answer) + 1}", p.answer, p.prompt) == 0.0


# ---- the base model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    from rpg.models.policy import Policy

    return Policy.load("builtin")


def test_the_base_model_is_a_small_standard_llama(policy):
    from rpg.models import BUILTIN

    assert sum(file.stat().st_size for file in BUILTIN.iterdir()) < 5e6
    assert type(policy.model).__name__ == "LlamaForCausalLM"
    assert type(policy.model).__module__.startswith("transformers.")
    assert "auto_map" not in json.loads((BUILTIN / "config.json").read_text())
    assert 0.8e6 < sum(p.numel() for p in policy.model.parameters()) < 1.2e6
    assert policy.linear


def test_the_tokenizer_gives_back_what_the_tasks_write(policy, problems):
    unknown = policy.tokenizer.pad_token_id
    for name in NAMES:
        for p in problems[name][1][:300]:
            ids = policy.encode(p.prompt)
            assert policy.decode(ids) == p.prompt
            assert unknown not in ids
    response = "3+24=27\nanswer 5*3+9"
    assert policy.decode(policy.encode(response)) == response


def test_the_base_model_has_room_for_every_prompt_and_response(policy, problems):
    from rpg.run.auto import settled
    from rpg.run.config import Config

    config = settled(Config())
    for name in NAMES:
        longest = max(len(policy.encode(p.prompt)) for p in problems[name][1][:1000])
        assert longest <= config.rollout.max_prompt_tokens
        assert longest + config.rollout.max_new_tokens <= policy.context


def test_the_base_model_begins_between_20_and_40_percent(policy):
    from rpg.rollout import NativeEngine
    from rpg.run.auto import settled
    from rpg.run.config import Config
    from rpg.tasks import Scorer
    from rpg.training.evaluate import evaluate
    from rpg.training.samples.collect import Sampler

    task, config = load_task("arithmetic"), settled(Config())
    with Scorer(task.reward, trusted=True) as scorer:
        engine = NativeEngine(policy.model, policy.tokenizer)
        (found,) = evaluate(Sampler(policy, engine, scorer, config), {task.name: task.test[:128]})
    assert config.eval.k == 8
    assert 0.2 < found.mean.low < found.mean.mean < found.mean.high < 0.45
    assert found.mean.mean < 0.4
    assert found.truncated < 0.05
    assert found.by_level[1] > found.by_level[4]
