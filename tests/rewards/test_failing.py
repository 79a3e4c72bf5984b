"""Functions that cannot be called as we call them, and functions that always fail: said in one line, and early."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpg.export.reward import reward_file
from rpg.models.policy import Policy
from rpg.plan.plan import plan
from rpg.rewards.failing import MAX_FAILING, FailureWatch, added
from rpg.rewards.scoring import Calls, RewardError, Scorer
from rpg.rewards.signature import WrongSignature, check_signature
from rpg.run.config import Config, EvalConfig, LogConfig, RolloutConfig, TaskConfig
from rpg.tasks import load_task
from rpg.training.evaluate import evaluate_model
from rpg.training.loop import MAX_STARVED, Failed, train

REWARDS = """
import functools, json, operator
def score(response): return 1.0
async def judge(completions, **kwargs): return 1.0
def more(response: str, answer: str, prompt: str, tokenizer, *, least=3) -> float: return 1.0
def named(*, response, answer, prompt): return 1.0
def turned(prompt, response, answer): return 1.0
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
class Marker:
    def __call__(self, response): return 1.0
class Fine:
    def __call__(self, response, answer, prompt): return 1.0
marker, fine = Marker(), Fine()
bound = functools.partial(more, tokenizer=None)
still_wrong = functools.partial(more, least=1)
adapted = functools.wraps(score)(lambda *texts: score(texts[0]))
def others(text, truth, question="", *more, **options): return 1.0
def named_star(*prompt, response=None): return 1.0
async def fine_async(completion, ground_truth, prompt): return 1.0

def broken(response, answer, prompt):
    return parse(response)
def parse(text):
    return json.loads("{" + text)["score"]
def sometimes(response, answer, prompt):
    return 0.0 if len(response) % 4 == 0 else parse(response)
def make():
    from rpg.tasks import Problem, Task
    return Task("mine", [Problem("1+1", "2")], [Problem("1+2", "3")], score)
"""
PLACE = f"(mine.py:{REWARDS[: REWARDS.index('json.loads')].count(chr(10)) + 1})"
WRONG = {
    "score": "takes (response), but is called with (response, answer, prompt); write def score(",
    "judge": "takes (completions, **kwargs), but is called with (response, answer, prompt); write async def judge(",
    "more": "takes (response, answer, prompt, tokenizer, *, least=…), but",
    "named": "takes (*, response, answer, prompt), but",
    "turned": "takes (prompt, response, answer), but is called with (response, answer, prompt), in this order; write",
    "verl": "takes (data_source, solution_str, ground_truth, extra_info=…), but is called with",
    "marker": "takes (response), but is called with (response, answer, prompt); write def __call__(self, response,",
    "Marker": "is a class: name a function, or a variable that holds an instance of it",
    "still_wrong": "takes (response, answer, prompt, tokenizer, *, least=…), but",
}
RIGHT = ["fine", "bound", "adapted", "others", "named_star", "fine_async"]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def tiny(folder: Path, **task: Any) -> Config:
    return Config(
        output=str(folder / "run"),
        steps=MAX_STARVED + 3,
        task=TaskConfig(**task),
        rollout=RolloutConfig(prompts=2, samples=4, max_new_tokens=24, max_rounds=1),
        eval=EvalConfig(every=0, problems=4, k=2),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )


# ---- before anything is sampled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_cannot_be_called(rewards: Path, name: str) -> None:
    spec = f"{rewards}:{name}"
    lines = []
    for trusted in (False, True):
        with pytest.raises(ValueError) as error, Scorer(spec, trusted=trusted, workers=1) as scorer:
            scorer.start()
        lines.append(str(error.value))
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"reward mine.py:{name} {WRONG[name]}")
    assert "\n" not in lines[0]


def test_functions_that_can_be_called(rewards: Path) -> None:
    from rpg.rewards.importing import load_function

    for name in RIGHT:
        check_signature(load_function(f"{rewards}:{name}"))
    for function in (max, print, functools.partial(subprocess.check_call)):
        check_signature(function)
    with pytest.raises(WrongSignature, match=r"reward .*<lambda> takes \(r\), .*; write def score\(response, answer"):
        check_signature(lambda r: 1.0)


class Loaded(Exception):
    pass


def test_plans_runs_and_evaluations_see_it_without_a_model(rewards: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def load(*_: object, **__: object) -> None:
        raise Loaded

    monkeypatch.setattr(Policy, "load", load)
    sum_of_two = tiny(tmp_path, rewards={"correct": 1.0, f"{rewards}:score": 0.5})
    for config in (tiny(tmp_path, reward=f"{rewards}:score"), sum_of_two):
        for refuse in (lambda c: plan(c, "cpu"), train, evaluate_model):
            with pytest.raises(ValueError, match=r"mine.py:score takes \(response\), but is called with"):
                refuse(config)
        with pytest.raises(ValueError, match=r"mine.py:score takes \(response\)"):
            reward_file(config, load_task("arithmetic"), "title")
    for use in (train, evaluate_model):
        with pytest.raises(ValueError, match=r"reward score takes \(response\), but is called with"):
            use(tiny(tmp_path, name=f"{rewards}:make"))
    with pytest.raises(Loaded):
        train(tiny(tmp_path, reward=f"{rewards}:fine"))


# ---- functions that always fail --------------------------------------------------------------------------------------


def test_a_first_batch_that_fails_ends_the_run(rewards: Path, tmp_path: Path) -> None:
    text = rf"^the reward function mine.py:broken failed in 8 of 8 calls: JSONDecodeError: .* {re.escape(PLACE)}$"
    config = tiny(tmp_path, reward=f"{rewards}:broken")
    with pytest.raises(Failed, match=text) as error:
        train(config)
    assert not error.value.setup
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()
    with pytest.raises(RewardError, match=text):
        evaluate_model(config)
    parts = replace(config, task=TaskConfig(rewards={"correct": 1.0, f"{rewards}:broken": 0.1}))
    with pytest.raises(RewardError, match=text):
        evaluate_model(parts)


def test_failures_are_not_called_too_hard_a_task(rewards: Path, tmp_path: Path) -> None:
    summary = train(tiny(tmp_path, reward=f"{rewards}:sometimes"))
    assert summary["step"] == MAX_STARVED
    assert "too hard" not in summary["message"]
    assert "In the last step the reward function mine.py:sometimes failed in" in summary["message"]
    assert PLACE in summary["message"]


def test_the_watch() -> None:
    def calls(made: int, failed: int, function: str = "f.py:f") -> dict[str, Calls]:
        return {function: Calls(function, made, failed, "KeyError: 'x' (f.py:3)" if failed else "")}

    text = "the reward function f.py:f failed in 7 of 8 calls: KeyError: 'x' (f.py:3)"
    assert added([calls(4, 0), calls(4, 2), calls(1, 1, "g")]) == calls(8, 2) | calls(1, 1, "g")
    watch = FailureWatch()
    watch.note(calls(0, 0))
    watch.note(calls(8, 7))
    assert watch.half_failed == f"In the last step {text}"
    for _ in range(3):  # an outage that ends in time
        for _ in range(MAX_FAILING - 1):
            watch.note(calls(8, 8))
        watch.note(calls(8, 3))
        assert not watch.half_failed
    for _ in range(MAX_FAILING - 1):
        watch.note(calls(8, 8))
    with pytest.raises(RewardError) as error:
        watch.note(calls(8, 8))
    assert "f.py:f failed in all calls of 5 steps; lately it failed in 8 of 8" in str(error.value)
    watch = FailureWatch()
    with pytest.raises(RewardError, match="reward function g failed in 4 of 4 calls"):
        watch.note(calls(8, 0) | calls(4, 4, "g"))
