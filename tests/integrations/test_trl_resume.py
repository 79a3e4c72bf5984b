"""A training that was interrupted ends in the bits of one that was not; what cannot be gone on with is said."""

import pytest
import torch

pytest.importorskip("trl")

from integrations.trl_small import Stop, history, lora, prompts, trainer, weights


def resumed(made, folder, step):
    made.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return made


def same_weights(one, other):
    return all(torch.equal(x, other.model.get_parameter(name)) for name, x in weights(one.model).items())


@pytest.mark.parametrize(
    ("rule", "model"), [("every", None), ("kl", None), ("ema", None), ("every", lora), ("frozen", lora)]
)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, rule, model):
    """To the bit, the reference with its counters included; the checkpoint is in the middle of a generation's use."""

    def make(name, **more):
        return trainer(
            tmp_path / name,
            None if model is None else model(),
            algorithm="grpo-corrected",
            reference_update=rule,
            reference_every=2,
            reference_kl=1e-3,
            reference_smoothing=0.5,
            per_device_train_batch_size=8,
            steps_per_generation=2,
            save_strategy="steps",
            save_steps=3,
            more=more,
        )

    whole = make("whole")
    whole.train()
    first = make("cut", callbacks=[Stop(3)])
    first.train()
    assert first.state.global_step == 3
    again = resumed(make("cut"), tmp_path / "cut", 3)
    assert same_weights(whole, again)
    ours, theirs = whole.reference, again.reference
    assert (ours.renewal.state(), ours.due) == (theirs.renewal.state(), theirs.due)
    assert ours.weights().keys() == theirs.weights().keys()
    for name, x in ours.weights().items():
        assert torch.equal(x, theirs.weights()[name]), name
    if rule in ("every", "kl"):
        assert ours.renewal.renewals > 0
    assert history(whole, "reward")[3:] == history(again, "reward")[3:]


@pytest.mark.parametrize("step", [3, 4])
def test_shuffled_and_stopped_in_a_later_epoch(tmp_path, step):
    """2 optimiser steps an epoch; TRL shuffles all epochs with one generator."""

    def make(name, **more):
        return trainer(
            tmp_path / name, algorithm="rpg-urkl", shuffle_dataset=True, dataset=prompts(8), save_strategy="steps",
            save_steps=1, more=more,
        )  # fmt: skip

    whole = make("whole")
    whole.train()
    make("cut", callbacks=[Stop(step)]).train()
    assert same_weights(whole, resumed(make("cut"), tmp_path / "cut", step))


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        (
            {"per_device_train_batch_size": 16, "num_iterations": 2},
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_iterations": 2},
            "per_device_train_batch_size was 16 and is 8, steps_per_generation was 1 and is 2",
        ),
        ({"num_iterations": 2}, {}, "num_iterations was 2 and is 1"),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 4},
            {"per_device_train_batch_size": 4, "steps_per_generation": 2},
            "steps_per_generation was 4 and is 2",
        ),
    ],
)
def test_another_cut_samples_anew(tmp_path, caplog, then, now, changed):
    usual = {"algorithm": "rpg-urkl", "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer(tmp_path, **usual, **then, more={"callbacks": [Stop(1)]}).train()
    again = resumed(trainer(tmp_path, **usual, **now), tmp_path, 1)
    assert (
        f"{changed}: the responses in {tmp_path}/checkpoint-1 are not trained on, new ones are sampled" in caplog.text
    )
    assert again.state.global_step == 4
    steps = again.args.steps_per_generation * again.num_iterations // again.args.gradient_accumulation_steps
    on_policy = [x < 1e-6 for x in history(again, "kl/old")[-3:]]
    assert on_policy == [i % steps == 0 for i in range(3)]  # it began with a generation
    caplog.clear()
    again = resumed(trainer(tmp_path, **(usual | {"max_steps": 5}), **now), tmp_path, 3)  # the new cut goes on
    assert "are not trained on" not in caplog.text


def test_a_checkpoint_without_the_reference_is_refused(tmp_path):
    trainer(tmp_path, algorithm="rpg-urkl", max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"rpg_reference.json: it is not a whole checkpoint"):
        resumed(trainer(tmp_path, algorithm="grpo", max_steps=2), tmp_path, 1)


def test_another_rule_is_refused(tmp_path):
    trainer(tmp_path, algorithm="grpo", max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"reference_update=frozen, this run has every: set reference_update=frozen t"):
        resumed(trainer(tmp_path, algorithm="grpo", reference_update="every", max_steps=2), tmp_path, 1)
