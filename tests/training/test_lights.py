"""Warning lights: recorded runs that fell apart and runs that did not, and real short ones."""

import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import rpg
import tiny
from rpg.models.policy import Policy
from rpg.run.auto import settled
from rpg.run.config import Config, OptimConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.training.batch import make_batch, with_advantages
from rpg.training.health.lights import CALM, LIGHTS, Lights
from rpg.training.health.vitals import Vitals
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.reference import batch_logp
from rpg.training.update import Updater
from running import metrics, summary

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "warning_lights.py"
spec = importlib.util.spec_from_file_location("warning_lights", SCRIPT)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
RECORD = bench.recorded()


# ---- recorded runs ---------------------------------------------------------------------------------------------------


FALLING = [name for name, rows in RECORD["failing"].items() if bench.fall(rows)]
WRONG_REWARD = [name for name in FALLING if "task.rewards" in bench.FAILING[name]]


@pytest.mark.parametrize("name", [name for name in FALLING if name not in WRONG_REWARD])
def test_a_run_whose_steps_are_too_large_has_lit_before_it_falls(name):
    rows = RECORD["failing"][name]
    warned = [step for light, step in bench.lit(rows).items() if light != "fallen"]
    assert min(warned) <= bench.fall(rows)


@pytest.mark.parametrize("name", WRONG_REWARD)
def test_a_run_that_is_paid_for_the_wrong_thing_is_told_while_it_falls(name):
    assert min(bench.lit(RECORD["failing"][name]).values()) <= bench.fall(RECORD["failing"][name]) + 3


def test_the_record_has_runs_that_fall_and_runs_that_do_not():
    assert len(FALLING) - len(WRONG_REWARD) >= 6
    assert WRONG_REWARD
    assert len(RECORD["healthy"]) >= 6
    for rows in RECORD["healthy"].values():
        assert rows[-1]["accuracy"] > rows[0]["accuracy"]


@pytest.mark.parametrize("name", RECORD["healthy"])
def test_a_healthy_run_stays_dark(name):
    assert bench.lit(RECORD["healthy"][name]) == {}


@pytest.mark.parametrize("name", RECORD["failing"])
def test_a_run_that_is_cut_and_goes_on_has_the_same_lights(name):
    rows = RECORD["failing"][name][1:]
    whole, cut = Lights(), Lights()
    for row in rows:
        one, other = dict(row), dict(row)
        cut = Lights(**json.loads(json.dumps(asdict(cut))))
        assert whole.see(int(row["step"]), one) == cut.see(int(row["step"]), other)
        assert one == other
    assert asdict(whole) == asdict(cut)


# ---- one light -------------------------------------------------------------------------------------------------------


def test_a_light_is_told_once_goes_out_and_is_told_again():
    lights, told, values = Lights(), [], []
    shifts = [-0.1, -0.1, -0.2] + [0.01] * (CALM + 1) + [-0.3]
    for step, shift in enumerate(shifts, start=1):
        row = {"shift/good": shift}
        told += lights.see(step, row)
        values.append(row["light/backwards"])
    assert [text.split(":")[0] for text in told] == ["step 1", "step 10"]
    # 0.01 after -0.2 is still a reason: the mean of the two counts
    assert values == [1, 1, 1, 1, 1, 1, 1, 1, 0, 1]
    assert [(event["step"], event["until"]) for event in lights.events] == [(1, 9), (10, None)]
    assert "0.3 nats a token" in told[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_step_without_a_number_leaves_a_light_as_it_is(value):
    lights = Lights()
    assert lights.see(1, {"shift/good": -1.0})
    for step in range(2, 20):
        row = {} if value is None else {"shift/good": value}
        assert lights.see(step, row) == []
        assert row["light/backwards"] == 1


def test_what_no_row_has_lights_nothing():
    row = {"reward/mean": 1.0}
    assert Lights().see(1, row) == []
    assert row == {"reward/mean": 1.0}
    assert len({light.name for light in LIGHTS}) == len(LIGHTS)


# ---- what is measured ------------------------------------------------------------------------------------------------


def updater(tmp_path, **optim):
    policy = Policy(tiny.make("llama-tied"), tiny.tokenizer())
    config = settled(Config(steps=4, rollout=RolloutConfig(prompts=3, samples=4), optim=OptimConfig(**optim)))
    made = Updater(
        config,
        rpg.algorithm("reinforce"),
        policy,
        make_optimizer(policy.parameters(), config.optim),
        RunFolder(tmp_path),
    )
    batch = with_logp(make_batch(tiny.groups(policy, noise=0.0), 0, policy.device), None, None, needs_reference=False)
    return made, with_advantages(batch, rpg.algorithm("reinforce").advantage, None)


def test_drift_and_the_better_responses_are_those_of_the_minibatches(tmp_path):
    """Against the definitions, on log-probabilities that are given."""
    _, batch = updater(tmp_path)
    generator, vitals = torch.Generator().manual_seed(1), Vitals()
    later = []
    for number in range(3):
        logp_BT = batch.old_logp_BT + number * 0.1 * torch.randn(batch.mask_BT.shape, generator=generator)
        vitals.see(batch, logp_BT)
        later += [(logp_BT - batch.old_logp_BT)[batch.mask_BT].double()] if number else []
    good = (batch.advantage[:, None] > 0).expand_as(batch.mask_BT)[batch.mask_BT]
    found, last = vitals.metrics(), later[-1]
    assert found["shift/good"] == pytest.approx(float(torch.cat([shift[good] for shift in later]).mean()), rel=1e-5)
    assert found["kl/old_last"] == pytest.approx(float((last.exp() * (last + (-last).exp() - 1)).mean()), rel=1e-4)
    certain = torch.stack([batch.old_logp_BT[batch.mask_BT]] * 3) > math.log(0.99)
    assert found["certain"] == pytest.approx(float(certain.float().mean()), abs=0.05)


def test_one_optimiser_step_a_batch_has_no_drift_to_show(tmp_path):
    run, batch = updater(tmp_path, minibatches=1)
    row = run.update(batch, 1)
    assert "kl/old_last" not in row
    assert "shift/good" not in row
    assert "kl/start" in row


def test_the_start_is_the_policy_before_its_first_step(tmp_path):
    run, batch = updater(tmp_path, minibatches=2, lr=1e-2, warmup=0)
    before = batch_logp(run.policy, batch, 1000)
    row = run.update(batch, 1)
    kept = run.probe.batch
    assert len(kept) == 8  # of 12
    rows = [(batch.ids_BL[:, : kept.ids_BL.shape[1]] == ids).all(1).nonzero()[0, 0] for ids in kept.ids_BL]
    torch.testing.assert_close(kept.old_logp_BT, before[torch.stack(rows)][:, : kept.mask_BT.shape[1]] * kept.mask_BT)
    shift = (batch_logp(run.policy, kept, 1000) - kept.old_logp_BT)[kept.mask_BT]
    assert row["kl/start"] == pytest.approx(float((shift.exp() - 1 - shift).mean()), rel=1e-4)
    assert row["kl/start"] > 1e-3
    run.update(batch, 2)
    assert run.probe.batch is kept


# ---- real runs -------------------------------------------------------------------------------------------------------

SHORT = {
    "rollout.prompts": 6,
    "eval.problems": 4,
    "eval.k": 2,
    "checkpoint.every": 0,
    "log.tensorboard": False,
    "log.view": "plain",
    "rollout.max_rounds": 1,
    "rollout.max_new_tokens": 40,
}


def test_an_absurd_learning_rate_lights(tmp_path, capsys):
    run = rpg.train(steps=3, output=str(tmp_path / "run"), **SHORT, **{"optim.lr": 2e-2, "optim.warmup": 0})
    rows = metrics(tmp_path / "run")
    assert rows[1]["light/backwards"] == 1
    assert run.summary["status"] == "finished"  # it is told, not stopped
    events = summary(tmp_path / "run")["lights"]
    assert (events[0]["light"], events[0]["step"]) == ("backwards", 1)
    out = capsys.readouterr().out
    assert out.count("warning: step 1: backwards: ") == 1
    assert "optim.lr" in events[0]["text"]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Warning light at step 1: backwards: " in page


def test_a_plain_run_stays_dark(tmp_path):
    rpg.train(steps=3, output=str(tmp_path / "run"), **SHORT | {"rollout.prompts": 16, "log.report": False})
    rows = metrics(tmp_path / "run")
    lights = {name: value for row in rows for name, value in row.items() if name.startswith("light/")}
    assert len(lights) == len(LIGHTS)
    assert not any(lights.values())
    assert summary(tmp_path / "run")["lights"] == []
