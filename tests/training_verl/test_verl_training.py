"""verl's own command, start to end, with rpg's losses: Ray, FSDP2 on gloo, vLLM on a CPU. Run by `make test-verl`.

Every step is computed once more here, from the rollouts that verl wrote down: the losses, KLs and norms of gradients
that verl logged, and the weights that it saved, are those of rpg's loss and torch's AdamW on that batch.
"""

import importlib.util
import json
import re

import pytest
import torch

if not all(importlib.util.find_spec(name) for name in ("verl", "vllm")):
    pytest.skip("verl with vLLM has an environment of its own: make test-verl", allow_module_level=True)

import transformers
import verl_run
from safetensors.torch import load_file
from verl_run import EOS, LENGTH, PROMPTS, RATE, RESPONSES

from rpg import algorithm

ACTOR = "actor_rollout_ref.actor"
ANCHORED, MOVING = "rpg-reinforce-urkl", "grpo-corrected"
BETA = {ANCHORED: 0.02, MOVING: 0.1}
EPOCHS = 2
MOVES_EVERY, STOP, STEPS = 2, 3, 5


def preset(name):
    return [
        f"{ACTOR}.policy_loss.loss_mode={name}",
        f"algorithm.adv_estimator=rpg:{name}",
        f"+{ACTOR}.policy_loss.rpg.beta={BETA[name]}",
    ]


@pytest.fixture(scope="module")
def anchored(tmp_path_factory):
    """A run whose KL is anchored at the sampling policy: no reference is held. Two epochs over every batch."""
    folder = tmp_path_factory.mktemp("anchored")
    verl_run.prepare(folder)
    log = verl_run.train(folder, 3, *preset(ANCHORED), f"{ACTOR}.ppo_epochs={EPOCHS}")
    return folder, log


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    """A run with a reference that is renewed every 2 steps, ended after 3 and resumed."""
    folder = tmp_path_factory.mktemp("moving")
    verl_run.prepare(folder)
    extra = [
        *preset(MOVING),
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0",
        f"+{ACTOR}.policy_loss.rpg.reference.update=every",
        f"+{ACTOR}.policy_loss.rpg.reference.every={MOVES_EVERY}",
    ]
    first = verl_run.train(folder, STOP, *extra, log="first")
    return folder, first, verl_run.train(folder, STEPS, *extra, log="second")


def saved(folder, step):
    """Folder of the model after that step; step 0: the one that the run began with."""
    return folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface" if step else folder / "model"


def weights(folder, step):
    return load_file(saved(folder, step) / "model.safetensors")


def same(model, other):
    """Whether all weights of a saved model are another's; buffers, which it does not save, may be there too."""
    return all(torch.equal(model[name], other[name]) for name in model)


def batch(folder, step):
    """What verl sampled: ids_BL with the prompt first, mask_BT, rewards_B, group_B."""
    rows = [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
    prompts = [[int(word[1:]) for word in row["input"].split()] for row in rows]
    responses = [[int(word[1:]) for word in row["output"].split()] for row in rows]
    ended = [r + [EOS] * (len(r) < LENGTH) for r in responses]
    ids_BL = torch.tensor([p + r + [EOS] * (LENGTH - len(r)) for p, r in zip(prompts, ended, strict=True)])
    mask_BT = torch.tensor([[t < len(r) for t in range(LENGTH)] for r in ended])
    group_B = torch.tensor([sorted({tuple(p) for p in prompts}).index(tuple(p)) for p in prompts])
    return ids_BL, mask_BT, torch.tensor([row["score"] for row in rows]), group_B


def logp(model, ids_BL):
    logits_BTV = model(ids_BL).logits[:, -LENGTH - 1 : -1]
    return logits_BTV.log_softmax(-1).gather(-1, ids_BL[:, -LENGTH:, None]).squeeze(-1)


def load(folder, step):
    return transformers.AutoModelForCausalLM.from_pretrained(saved(folder, step), dtype=torch.float32)


def loss_of(model, folder, step, name, old_logp_BT=None, ref_logp_BT=None):
    """rpg's loss of a step's rollouts, with the model's own log-probabilities for the old ones where none are given."""
    ids_BL, mask_BT, rewards_B, group_B = batch(folder, step)
    method, logp_BT = algorithm(name, beta=BETA[name]), logp(model, ids_BL)
    old_logp_BT = logp_BT.detach() if old_logp_BT is None else old_logp_BT
    return method.loss(logp_BT, old_logp_BT, method.advantage(rewards_B, group_B), mask_BT, ref_logp=ref_logp_BT)


def close(value):
    return pytest.approx(value, rel=1e-3, abs=2e-6)


def test_the_plugin_says_that_it_is_loaded(anchored):
    _, log = anchored
    said = r"rpg \S+ is loaded into verl 0\.9\.1"
    assert re.search(rf"^INFO.*{said}", log, re.M), "the driver's line"
    workers = set(re.findall(r"WorkerDict pid=(\d+)", log))
    assert len(workers) == 1
    assert re.search(rf"pid={workers.pop()}\).*{said}", log), "the worker's line"


def test_the_run_is_the_presets_step_by_step(anchored):
    """The whole training once more, by torch alone: two epochs over a batch, so that half of it is off-policy."""
    folder, _ = anchored
    model = load(folder, 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    for step in range(1, 4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            old_logp_BT = logp(model, batch(folder, step)[0])
        outs, norms = [], []
        for _ in range(EPOCHS):
            outs.append(loss_of(model, folder, step, ANCHORED, old_logp_BT))
            optimiser.zero_grad()
            outs[-1].loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimiser.step()
        found = verl_run.metrics(folder)[step]
        assert batch(folder, step)[0].shape[0] == PROMPTS * RESPONSES
        assert found["actor/loss"] == close(sum(float(out.loss.detach()) for out in outs) / EPOCHS)
        assert found["actor/grad_norm"] == close(sum(norms) / EPOCHS)
        assert found["actor/rpg/kl/old"] == close(sum(float(out.metrics["kl/old"]) for out in outs) / EPOCHS)
        assert found["actor/rpg/kl/old"] > 1e-5, "off-policy"
        theirs = weights(folder, step)
        moved = sum((theirs[name] - x).square().sum() for name, x in before.items()).sqrt()
        apart = sum((theirs[name] - p.detach()).square().sum() for name, p in model.named_parameters()).sqrt()
        assert moved > 0.1
        assert apart < 0.01 * moved


def test_without_a_reference_none_is_held(anchored):
    folder, log = anchored
    assert "reference renewed" not in log
    assert not list(folder.glob("checkpoints/**/rpg_reference*"))
    assert all("timing_s/ref" not in row for row in verl_run.metrics(folder).values())


def test_the_reference_is_renewed_at_its_steps_and_no_others(moving):
    folder, *_ = moving
    updated = [verl_run.metrics(folder)[step]["actor/rpg/reference_updated"] for step in range(1, STEPS + 1)]
    assert updated == [0, 1, 0, 1, 0]


def test_the_reference_is_the_actor_of_its_renewal(moving):
    folder, *_ = moving
    for step, renewed in {1: 0, 2: 2, 3: 2, 4: 4, 5: 4}.items():
        (path,) = (folder / "checkpoints" / f"global_step_{step}" / "actor").glob("rpg_reference_*")
        kept = torch.load(path, weights_only=True)
        assert kept["state"]["updates"] == step
        assert kept["state"]["renewals"] == renewed // 2
        if renewed:
            assert same(weights(folder, renewed), kept["weights"])
            assert step == renewed or not same(weights(folder, step), kept["weights"])
        else:
            assert not kept["weights"]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_loss_and_kl_are_those_to_the_renewed_reference(moving, step):
    """Steps 4 and 5 are of the resumed run: step 4's anchor is the actor after step 2, from the checkpoint."""
    folder, *_ = moving
    found = verl_run.metrics(folder)[step]
    anchor = (step - 1) // MOVES_EVERY * MOVES_EVERY
    model = load(folder, step - 1)
    with torch.no_grad():
        ref_logp_BT = logp(load(folder, anchor), batch(folder, step)[0])
    out = loss_of(model, folder, step, MOVING, ref_logp_BT=ref_logp_BT)
    out.loss.backward()
    kl = float(out.metrics["kl/ref"])
    assert found["actor/loss"] == close(float(out.loss.detach()))
    assert found["actor/grad_norm"] == close(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
    assert found["actor/rpg/kl/ref"] == close(kl)
    assert (kl > 1e-4) == (anchor != step - 1), "a reference that is the actor has no KL to it"


def test_the_workers_log_tells_of_the_reference(moving):
    _, first, second = moving
    renewed = r"WorkerDict pid=.*rpg: reference renewed after update (\d+)"
    assert re.findall(renewed, first) == ["2"]
    assert re.findall(renewed, second) == ["4"]
    assert "rpg: reference restored" not in first
    assert re.search(r"WorkerDict pid=.*rpg: reference restored: renewal 1, after update 3", second)
