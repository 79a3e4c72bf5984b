"""A batch that RPGTrainer records, replayed: the gradient, loss and metrics of that optimiser step."""

import pytest

pytest.importorskip("trl")

from integrations.equivalence import Case, difference
from integrations.trl_fixed import config, through_trl
from integrations.trl_small import trainer, weights
from rpg.models.policy import Policy
from rpg.recorded.layout import read
from rpg.replay import model_of, replay


def replayed(path, *methods):
    recorded = read(path)
    return recorded, replay(recorded, Policy.load(model_of(recorded, path)), methods or ("rloo",))


CASES = [
    (Case("rpg-reinforce-urkl", reference="frozen"), 4),
    (Case("grpo"), 1),
    (Case("gspo", {"mismatch": "mis"}), 4),
    (Case("dr-grpo"), 4),
    (Case("reinforce++"), 4),
    (Case("dapo"), 4),
]


@pytest.mark.parametrize(("case", "accumulation"), CASES, ids=lambda x: getattr(x, "name", x))
def test_a_replay_has_what_trl_measured(case, accumulation, tmp_path):
    path, metrics = tmp_path / "batch.safetensors", {}
    loss, gradients = through_trl(case, accumulation, record=str(path), metrics=metrics)
    recorded, done = replayed(path)
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    assert done.ran.name == case.name
    assert recorded.measured["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert done.ran.grad_norm == pytest.approx(norm, rel=1e-5)
    assert done.ran.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for name in ("ess", "kl/old", "entropy", "ratio/max"):
        if accumulation == 1 or name != "ess":  # which is not a mean over micro-batches
            assert done.ran.metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name
    assert recorded.about["trainer"] == "TRL"
    assert recorded.groups == 4


def test_one_step_of_a_training_is_recorded_and_not_changed_by_it(tmp_path):
    path = tmp_path / "batch.safetensors"
    with_it = trainer(tmp_path / "a", algorithm="dapo", num_iterations=2, record=str(path), record_step=2, max_steps=3)
    with_it.train()
    without = trainer(tmp_path / "b", algorithm="dapo", num_iterations=2, max_steps=3)
    without.train()
    assert difference(weights(with_it.model), weights(without.model)) == 0
    recorded, done = replayed(path)
    row = with_it.state.log_history[1]
    assert recorded.about["step"] == 2
    assert done.ran.metrics["kl/old"] > 1e-6  # the second step on a generation
    assert done.ran.grad_norm == pytest.approx(row["grad_norm"], rel=1e-5)


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with pytest.raises(ValueError, match="record_step must be positive"):
        config(str(tmp_path), record="x", record_step=0)
