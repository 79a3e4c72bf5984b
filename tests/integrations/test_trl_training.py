"""Real trainings with RPGTrainer on a CPU: they learn, they hold no model in vain."""

import gc

import pytest
import torch
from datasets import Dataset

pytest.importorskip("trl")

import transformers
from transformers import TrainerCallback

from integrations.trl_small import history, lora, low_words, trainer, weights
from rpg import PolicyLoss, clip


@pytest.mark.parametrize("adapted", [False, True])
def test_it_learns(tmp_path, adapted):
    model = lora(8) if adapted else None
    made = trainer(tmp_path, model, max_steps=16, learning_rate=3e-2 if adapted else 1e-2)
    made.train()
    rewards = history(made, "reward")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    row = made.state.log_history[0]
    names = {"kl/old", "clip/low", "clip/high", "ratio/max", "ess", "entropy", "groups/kept", "reward/overlong"}
    assert names <= row.keys()
    assert row["kl/old"] == pytest.approx(0, abs=1e-6)  # on-policy


def test_a_loss_of_ones_own_and_an_evaluation(tmp_path):
    rule = PolicyLoss("urkl", 0.05, "reinforce", clip.RPGClip(), reduction="seq-mean-token-mean")
    prompts = Dataset.from_dict({"prompt": ["w3 w4", "w8"]})
    made = trainer(
        tmp_path,
        algorithm=rule,
        max_steps=2,
        more={"eval_dataset": prompts},
        per_device_eval_batch_size=8,
        reference_update="ema",
    )
    made.train()
    found = made.evaluate()
    assert found["eval_loss"] == pytest.approx(0, abs=1)
    assert 0 <= found["eval_reward"] <= 1
    assert found["eval_kl/ref"] > 0


def test_old_as_the_reference_loads_no_model(tmp_path, monkeypatch):
    """Neither a copy nor a load: of models of this kind there is the one that is trained. GRPO's anchor is a second."""

    def models():
        gc.collect()
        return sum(isinstance(x, transformers.LlamaForCausalLM) for x in gc.get_objects())

    before = models()
    made = trainer(tmp_path, algorithm="rpg-urkl", max_steps=1)
    made.train()
    assert made.ref_model is None
    assert made.reference is None
    assert models() == before + 1
    second = trainer(tmp_path, algorithm="grpo", max_steps=1)  # in memory, where TRL would want a path
    assert models() == before + 3
    second.train()
    assert history(second, "kl/ref") == [pytest.approx(0, abs=1e-6)]


def test_the_reference_is_renewed_every_k_steps(tmp_path):
    seen = []

    class See(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            pairs = zip(made.reference.copy.parameters(), made.model.parameters(), strict=True)
            seen.append(all(torch.equal(a, b) for a, b in pairs))

    made = trainer(tmp_path, algorithm="grpo", reference_update="every", reference_every=2)
    made.add_callback(See())
    made.train()
    assert seen == [False, True] * 3
    assert history(made, "reference/updated") == [0, 1] * 3
    kl = history(made, "kl/ref")
    assert kl[0] < 1e-6 < kl[1]
    assert kl[2] < 1e-6 < kl[3]


def test_the_reference_is_renewed_on_a_kl_target(tmp_path):
    made = trainer(
        tmp_path, algorithm="grpo", reference_update="kl", reference_kl=1e-4, reference_smoothing=0.5, max_steps=8
    )
    made.train()
    average, seen, expected = 0.0, 0.0, []
    for kl in history(made, "kl/ref"):
        average, seen = 0.5 * average + 0.5 * kl, 0.5 * seen + 0.5
        expected.append(float(average / seen > 1e-4))
        average, seen = (0.0, 0.0) if average / seen > 1e-4 else (average, seen)
    assert history(made, "reference/updated") == expected
    assert 0 < sum(expected) < 8


@pytest.mark.parametrize(("every", "count"), [(1, "optimizer-steps"), (3, "optimizer-steps"), (1, "iterations")])
def test_several_optimiser_steps_on_a_generation_have_one_reference(tmp_path, every, count):
    """Renewed when the next generation comes, also if it was due before: each is used for 2 parts, twice."""
    made = trainer(
        tmp_path,
        algorithm="grpo",
        reference_update="every",
        reference_every=every,
        reference_count=count,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
    )
    made.train()
    assert history(made, "reference/updated") == [0, 0, 0, 1] * 2
    old, ref = history(made, "kl/old"), history(made, "kl/ref")
    assert old == pytest.approx(ref, abs=1e-6)  # both are the policy of the last generation
    assert [x > 1e-6 for x in old] == [False, True, True, True] * 2


def test_the_anchor_of_an_adapter(tmp_path):
    """A new adapter's is the model without it; of one that has learnt already it is a copy of its weights."""
    fresh = trainer(tmp_path, lora(), algorithm="grpo", max_steps=2)
    assert fresh.reference.copy is None
    assert not fresh.reference.weights()
    fresh.train()
    assert history(fresh, "kl/ref")[0] < 1e-6 < history(fresh, "kl/ref")[1]
    model = lora()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.5)
    learnt = trainer(tmp_path, model, algorithm="grpo", max_steps=2)
    assert learnt.reference.weights()
    learnt.train()
    assert history(learnt, "kl/ref")[0] < 1e-6 < history(learnt, "kl/ref")[1]


def test_rewards_that_are_none_have_no_part(tmp_path):
    def partly(completion_ids, **_):
        return [None if i % 4 == 0 else float(len(ids)) for i, ids in enumerate(completion_ids)]

    made = trainer(tmp_path, algorithm="rloo", reward=[partly, low_words], reward_weights=[0.0, 1.0], max_steps=1)
    made.train()
    made = trainer(tmp_path, algorithm="rloo", reward=partly, max_steps=1)
    made.train()
    batch = made._buffered_inputs[0]
    assert int(batch["rpg_keep"].sum()) == 12
    assert not batch["advantages"][~batch["rpg_keep"]].any()


def test_nothing_is_learnt_from_nothing(tmp_path, caplog):
    """From the second step on no group has signal: neither momentum nor weight decay moves the weights."""
    seen = []

    def once(completion_ids, **_):
        seen.append(weights(made.model))
        return [float(i % 2) if len(seen) == 1 else 1.0 for i in range(len(completion_ids))]

    made = trainer(tmp_path, algorithm="dapo", reward=once, max_steps=3, weight_decay=0.1)
    made.train()
    first, second, third = seen
    assert not all(torch.equal(first[name], x) for name, x in second.items())
    assert all(torch.equal(second[name], x) for name, x in third.items())
    assert "step 2: no group had unequal rewards; nothing learnt" in caplog.text
    assert history(made, "groups/kept") == [4, 0, 0]
