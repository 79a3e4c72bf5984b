"""The lenient verifier is math-verify's, with rpg's limits of time; the setting that asks for it."""

import time

import pytest
import yaml
from test_verify_pairs import FOLDER

from rpg.export.reward import described, loaded
from rpg.rewards import worker
from rpg.run.config import Config
from rpg.run.settings import build
from rpg.tasks import Problem, Task, verify_reward
from rpg.tasks.reward import make_reward
from rpg.tasks.sources.mixture import RewardByPart
from rpg.training.setup import make_scorer
from rpg.verify import lenient_reward, verdict, verify


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(worker, "inside_worker", True)


def own(response, answer, prompt):
    return 1.0


def task(reward=verify_reward):
    problems = [Problem("70+2", "72")]
    return Task("t", problems, problems, reward)


def test_it_gives_math_verifys_verdict(here):
    import math_verify

    groups = yaml.safe_load((FOLDER / "answers.yaml").read_text(encoding="utf-8"))
    rows = [row for rows in groups.values() for row in rows][::30]
    pairs = [(f"\\boxed{{{given}}}", truth) for given, truth, *_ in rows]
    theirs = [math_verify.verify(math_verify.parse(f"${b}$"), math_verify.parse(a)) for a, b in pairs]
    assert [verify(*pair, lenient=True) for pair in pairs] == theirs
    assert {verify(*pair) for pair in pairs} == {True, False}


def test_where_the_two_differ(here):
    assert verdict("\\boxed{70+2}", "72", lenient=True) == (True, "equal for math-verify")
    assert verdict("\\boxed{70+2}", "72") == (False, "different")
    assert verify("It is 72.", "... #### 72", lenient=True)  # said in no form of a final answer
    assert not verify("It is 72.", "72")
    assert verdict("\\boxed{71}", "72", lenient=True) == (False, "different for math-verify")


@pytest.mark.parametrize(
    "response", ["9" * 100_000, "\\boxed{9^{9^{9^{9}}}}", "\\frac{" * 2000, "\\boxed{" * 50_000, ""]
)
def test_it_ends(response):
    start = time.monotonic()
    assert not verify(response, "\\sqrt{2}", lenient=True)
    assert time.monotonic() - start < 30  # a worker may have to be started again, twice


def test_the_setting():
    config = build(Config, flags={"task.verifier": "lenient", "task.workers": "1"})
    responses = [("\\boxed{70+2}", "72", "")]
    with make_scorer(config, task()) as scorer:
        assert scorer.score(responses).values == [1.0]
    assert build(Config).task.verifier == "strict"
    with pytest.raises(ValueError, match=r"task.verifier lenient: t has a score of its own"):
        make_reward(None, {}, task(own), None, "lenient")


def test_in_a_mixture_and_in_an_export(tmp_path):
    (part,) = make_reward(None, {}, task(RewardByPart([verify_reward, own])), None, "lenient")
    assert part.function.rewards == (lenient_reward, own)
    (part,) = make_reward(None, {"correct": 2.0}, task(), None, "lenient")
    assert (part.function, part.weight) == (lenient_reward, 2.0)
    assert loaded(described(part.function), tmp_path) is lenient_reward
