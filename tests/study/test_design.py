"""What a study's file can say, what it is told about a mistake in it, and which runs it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpg.run.settings import flat
from rpg.study.design import check_runs, read_study
from rpg.training.setup import held_out, task_of

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))
GOOD = "compare: [dapo, grpo]\nbudget: {steps: 20}\n"


@pytest.fixture
def read(tmp_path):
    def go(text):
        file = tmp_path / "s.yaml"
        file.write_text(text)
        return read_study(file)

    return go


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compare: [dapo]\n", "budget must have one of steps, tokens and minutes"),
        ("compare: [dapo]\nbudget: {steps: 2, tokens: 5}\n", "budget must have one of"),
        ("budget: {steps: 20}\n", "compare must name what is compared"),
        (
            "compare: [dap]\nbudget: {steps: 2}\n",
            "compare.dap sets nothing, and no method has this name; did you mean 'dapo'",
        ),
        (GOOD + "sedes: 3\n", "did you mean 'seeds'"),
        (GOOD + "seeds: 0\n", "seeds must be from 1 to 100"),
        (GOOD + "against: gpro\n", "against must be one of compare; got 'gpro'; did you mean 'grpo'"),
        (GOOD + "set: {seed: 3}\n", "set must not set seed: seeds says it"),
        (GOOD + "set: {steps: 3}\n", "set must not set steps: budget.steps says it"),
        (GOOD + "set: {task.aside: 3}\n", "the study itself says it"),
        (GOOD + "set: {optim.lrr: 3}\n", "did you mean"),
        (GOOD + "grid: {optim.lr: 3}\n", "grid.optim.lr must be a list of values"),
        (GOOD + "grid: {eval.k: [1, 2]}\n", "runs are compared on the same problems"),
        (GOOD + "grid: {a: {x: {optim.lr: 1.0}}, b: {y: {optim.lr: 2.0}}}\n", "which another part of grid sets too"),
        (GOOD + "tune: {optim.lr: 3}\n", "tune.optim.lr must be a list of values"),
        (GOOD + "tune: {algorithm: [x2]}\n", "is a multiple, and this setting is no number"),
        ("compare: [dapo]\nbudget: {minutes: 5}\n", "optim.schedule: constant"),
        (GOOD + "set: {model: gpt2, optim.lr: 0.1}\n", "ruins it"),
        (GOOD + "set: {model: gpt2}\ntune: {optim.lr: [1.0e-6, 0.1]}\n", "ruins it"),
        (GOOD + "set: {rollout.samples: 1}\n", "rollout.samples must be at least 2"),
        ("compare: {dapo: {loss.betaa: 1}}\nbudget: {steps: 2}\n", "dapo"),
        ("compare: {a b: {algorithm: dapo}, a-b: {algorithm: grpo}}\nbudget: {steps: 2}\n", "give one another name"),
        (GOOD + "set: {model_options.token: hf_abcdefghijklmnopqrstuvwxyz0123456789}\n", "secret"),
        (GOOD + "base: nowhere.yaml\n", "nowhere.yaml"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_runs(read, tmp_path, text, said):
    with pytest.raises(ValueError) as error:
        read(text)
    assert said in str(error.value)
    assert str(tmp_path / "s.yaml") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("set: {task.name: nothing.jsonl}\n", "no such file: nothing.jsonl"),
        ("set: {model: /nowhere/at/all}\n", "/nowhere/at/all"),
        ("set: {task.rewards: {nothing.py:score: 1}}\n", "nothing.py"),
        ("test_set: aime\n", "test_set must be one of arithmetic; got 'aime'"),
    ],
)
def test_what_runs_would_refuse_is_refused_before_them(read, more, said):
    study = read(GOOD + more)
    with pytest.raises(ValueError, match=said):
        check_runs(study)


def test_the_order_of_runs_is_what_they_decide(read):
    study = read(GOOD + "seeds: 2\ntune: {optim.lr: [x0.5, x2]}\n")
    tuned = [(run.arm.name, run.tried["optim.lr"]) for run in study.tuning]
    assert tuned == [("dapo", 2.5e-4), ("grpo", 2.5e-4), ("dapo", 1e-3), ("grpo", 1e-3)]
    assert [(run.arm.name, run.seed) for run in study.compared()] == [
        ("dapo", 0),
        ("grpo", 0),
        ("dapo", 1),
        ("grpo", 1),
    ]
    assert study.planned == 8


def test_tuning_and_comparing_share_the_budget_and_nothing_else(read):
    study = read(GOOD + "seeds: 3\ntune: {optim.lr: [x0.5, x2]}\ntune_problems: 32\n")
    compared = list(study.compared({"dapo": {"optim.lr": 1e-3}}))
    for run in study.tuning:
        assert flat(run.config)["task.aside"] == 32, "problems that are taken out of the training set"
        assert run.config.steps == 20
        assert run.seed not in {other.seed for other in compared}
    for run in compared:
        assert flat(run.config)["task.aside"] == 0
        assert run.config.optim.lr == (1e-3 if run.arm.name == "dapo" else 2.5e-4), (
            "its own choice, or the file's first"
        )


def test_the_problems_set_aside_are_neither_trained_on_nor_tested(read):
    task = task_of(read(GOOD + "tune: {optim.lr: [x1]}\n").tuning[0].config)
    aside = {p.prompt for p in task.tests["aside"]}
    assert len(aside) == 128
    plain = next(iter(read(GOOD).compared())).config
    assert not aside & {p.prompt for p in held_out(task_of(plain), plain)["arithmetic"]}
    assert not aside & {task.train[i].prompt for i in range(2000)}


@pytest.mark.parametrize("budget", ["tokens", "minutes"])
def test_every_run_has_the_budget(read, budget):
    study = read(f"compare: [dapo, grpo]\nbudget: {{{budget}: 5}}\nset: {{optim.schedule: constant}}\n")
    assert {getattr(run.config, budget) for run in study.compared()} == {5}


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_the_studies_that_come_with_it_are_sound(file):
    study = read_study(file)
    assert study.planned >= 10
    text = file.read_text()
    assert f"rpg study studies/{file.name}" in text.partition("\n\n")[0], "its command stands at the top"
