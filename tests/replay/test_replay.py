"""A replay has what the step measured, and for every method what autograd makes of its loss on the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rpg
from integrations.equivalence import Case, preset_case
from rpg.models.policy import Policy
from rpg.recorded.layout import read
from rpg.replay import gradients as gradients_module
from rpg.replay import replay
from rpg.replay.methods import betas, compared, exact
from rpg.run.config import LogConfig
from rpg.run.folder import RunFolder
from rpg.training.optim import make_optimizer
from rpg.training.update import Updater

CLOSE = {"rel": 1e-5, "abs": 1e-7}


class Recorded:
    """The last optimiser step of an update on a case's batch, as `rpg train` records it."""

    def __init__(self, case: Case, folder: Path, minibatches: int = 1, micro_tokens: int = 40, **loss: object):
        optim = replace(case.config.optim, minibatches=minibatches, micro_tokens=micro_tokens, lr=1e-3, warmup=0)
        config = replace(case.config, optim=optim, log=LogConfig(record="1"))
        policy = case.policy(case.theta)
        method = replace(case.method, loss=case.method.loss.replace(**loss))
        self.updater = Updater(config, method, policy, make_optimizer(policy.parameters(), optim), RunFolder(folder))
        self.updater.progress.entropy_low = True
        self.row = self.updater.update(case.batch, step=1)
        self.path = folder / "recorded" / "step-000001.safetensors"
        self.batch = read(self.path)

    def replayed(self, *methods: str, **options: object):
        policy = Policy.load(str(self.path.with_suffix("")))
        return replay(self.batch, policy, methods or ("reinforce",), **options)


RAN = [
    (Case("rpg-reinforce-urkl"), {}),
    (Case("rpg-ufkl", {"beta": 0.1}, reference="frozen"), {}),
    (Case("grpo"), {}),
    (Case("grpo-corrected", {"level": "sequence"}), {}),
    (Case("gspo"), {}),
    (Case("rloo"), {}),
    (Case("dapo", {"mismatch": "tis"}), {}),
    (Case("gspo", {"mismatch": "mis"}), {}),
    (Case("topr"), {}),
    (Case("reinforce++", {"beta": 0.3}), {}),
    (Case("rpg-urkl", {"beta": 0.1, "kl_to_go": True}, reference="frozen"), {}),
    (Case("high-entropy"), {}),
    (Case("kl-cov"), {}),
    (Case("skywork-or1"), {"entropy_bonus": 0.01, "entropy_target": None}),
    (Case("rpg-reinforce-urkl"), {"clip": rpg.clip.Adaptive(target_ess=0.95)}),
    (Case("rpg-reinforce-urkl"), {"control_variate": True}),
]


@pytest.mark.parametrize(("case", "loss"), RAN, ids=lambda x: x.name if isinstance(x, Case) else ",".join(x))
def test_a_replay_has_what_the_optimiser_step_measured(case, loss, tmp_path):
    recorded = Recorded(case, tmp_path, minibatches=2, **loss)
    done = recorded.replayed()
    ran, measured = done.ran, recorded.batch.measured
    assert ran.name == case.name
    assert ran.grad_norm == pytest.approx(measured["grad_norm"], **CLOSE)
    assert ran.loss == pytest.approx(measured["loss"], **CLOSE)
    names = measured.keys() & ran.metrics.keys()
    assert names >= {"ess", "kl/old", "ratio/max", "entropy"}
    for name in names:
        assert ran.metrics[name] == pytest.approx(measured[name], **CLOSE), name
    assert not [note for note in done.notes if "differs" in note]
    assert measured["grad_norm"] != pytest.approx(recorded.row["grad_norm"], rel=1e-3)  # of this step, not of both


def test_another_model_is_told(tmp_path):
    recorded = Recorded(Case("dapo"), tmp_path)
    policy = Case("dapo").policy(Case("dapo").theta0)
    (note,) = [text for text in replay(recorded.batch, policy, ["rloo"]).notes if "differs" in text]
    assert "from what the trainer measured" in note


# ---- every method, beside autograd -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return Recorded(Case("grpo", {"beta": 0.2}), tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def done(recorded):
    return recorded.replayed("all")


def direct(recorded, one, rows=slice(None)):
    """By autograd through the padded model, the gradient of a method's loss on the batch: the part of ``rows``."""
    batch, policy = recorded.batch, Policy.load(str(recorded.path.with_suffix("")))
    logits = policy.model(batch.ids_BL).logits.float() / batch.about["temperature"]
    places = (batch.prompt_length_B[:, None] - 1 + torch.arange(batch.mask_BT.shape[1])).clamp(max=len(logits[0]) - 2)
    all_logp = logits.log_softmax(-1)
    logp_BT = all_logp[:, :-1].gather(-1, batch.ids_BL[:, 1:, None])[..., 0].gather(1, places)
    entropy_BT = -(all_logp.exp() * all_logp).sum(-1).gather(1, places)
    kept = torch.zeros(len(logp_BT), 1, dtype=torch.bool)
    kept[rows] = True
    mixed = (torch.where(kept, x, x.detach()) * batch.mask_BT for x in (logp_BT, entropy_BT))
    logp_BT, entropy_BT = mixed
    known = {"ref_logp": one.ref_logp_BT, "rollout_logp": one.rollout_logp_BT, "denominator": one.denominator}
    known |= {"entropy": entropy_BT, "groups": batch.group_B}
    loss = one.loss(logp_BT, batch.old_logp_BT, one.advantage, batch.mask_BT, **known).loss
    gradients = torch.autograd.grad(loss, list(policy.model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients]).double()


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def test_every_preset_has_a_row_or_a_reason(done):
    names = {entry.name.removesuffix(" as published") for entry in done.entries}
    assert names | done.left_out.keys() == set(rpg.algorithms())
    assert done.left_out.keys() == {"remax", "capo", "otb", "distill", "maxrl"}  # rewards below 0 are not for maxrl
    assert "greedy response" in done.left_out["remax"]
    assert "moments" in done.left_out["capo"]


def test_gradients_are_those_of_autograd(recorded, done):
    chosen, _ = compared(recorded.batch, ["all"])
    assert [entry.name for entry in done.entries] == [one.name for one in chosen]
    places = [i for i, one in enumerate(chosen) if one.name != "clip-cov"]  # its random few depend on the last bits
    found = [direct(recorded, chosen[i]) for i in places]
    for entry, g, cosines in zip(
        (done.entries[i] for i in places), found, (done.cosines[i] for i in places), strict=True
    ):
        row = [cosines[i] for i in places]
        assert entry.grad_norm == pytest.approx(float(g.norm()), rel=1e-5), entry.name
        for other, value in zip(found, row, strict=True):
            assert value == pytest.approx(cosine(g, other), abs=1e-5), entry.name
        assert entry.cosine_ran == (None if entry.ran else pytest.approx(cosine(g, found[0]), abs=1e-5))


@pytest.mark.parametrize("name", ["grpo", "gspo", "rpg-reinforce-urkl", "rloo"])
def test_exact_weights_and_settings_are_those_of_autograd(recorded, done, name):
    chosen = {one.name: one for one in compared(recorded.batch, ["all"])[0]}
    one, entry = chosen[name], next(e for e in done.entries if e.name == name)
    g = direct(recorded, one)
    right = exact(one)
    assert right.loss.clip is None
    assert entry.cosine_exact == pytest.approx(cosine(g, direct(recorded, right)), abs=1e-5)
    for factor, other in betas(one).items():
        changed = direct(recorded, other)
        assert entry.betas[factor].norm == pytest.approx(float(changed.norm() / g.norm()), rel=1e-5)
        assert entry.betas[factor].cosine == pytest.approx(cosine(changed, g), abs=1e-5)
    if name == "grpo":
        less = direct(recorded, betas(one)[0.0])
        of_kl = g - less
        assert entry.kl_share == pytest.approx(float(of_kl.norm() / (of_kl.norm() + less.norm())), rel=1e-4)
        wider = direct(recorded, one.with_loss(clip=rpg.clip.Box(0.4, 0.4)))
        assert entry.bounds[2.0].norm == pytest.approx(float(wider.norm() / g.norm()), rel=1e-5)
        assert abs(entry.bounds[2.0].norm - 1) > 1e-3  # the clip does act here


def test_what_is_called_exact_is_right_without_a_clip(tmp_path):
    """A method that is exact as it stands has cosine 1; GRPO's penalty, which lost its weight, has not."""
    done = Recorded(Case("rpg-reinforce-urkl", {"beta": 0.3, "mismatch": "exact"}), tmp_path, clip=None).replayed(
        "grpo"
    )
    assert done.ran.cosine_exact == pytest.approx(1, abs=1e-6)
    assert done.entries[1].cosine_exact < 0.99


def test_variance_is_the_jackknife_over_groups(recorded, done):
    one, entry = compared(recorded.batch, [])[0][0], done.ran
    parts = [direct(recorded, one, recorded.batch.group_B == g) for g in range(4)]
    whole = sum(parts)
    # each group left out in turn: the estimate G/(G−1)·(g − g_i), and the jackknife's variance of these
    left = [4 / 3 * (whole - part) for part in parts]
    mean = sum(left) / 4
    variance = 3 / 4 * sum(float((x - mean).square().sum()) for x in left)
    assert entry.sd == pytest.approx(math.sqrt(variance), rel=1e-5)
    norm_sq = float(whole.square().sum())
    assert entry.snr == pytest.approx(max(0, norm_sq - variance) / variance, rel=1e-4, abs=1e-6)


def test_how_the_work_is_cut_changes_nothing(recorded, done, monkeypatch):
    monkeypatch.setattr(gradients_module, "_free", lambda device: 3 * 8 * done.parameters)  # one vector at a time
    cut, whole = recorded.replayed("rloo", "gspo", "skywork-or1", tokens=20), {e.name: e for e in done.entries}
    assert len(cut.entries) == 4
    for entry in cut.entries:
        same = whole[entry.name]
        assert (entry.grad_norm, entry.sd) == (
            pytest.approx(same.grad_norm, rel=1e-5),
            pytest.approx(same.sd, rel=1e-5),
        )


def test_sketches_keep_cosines(recorded, done, monkeypatch):
    monkeypatch.setattr(gradients_module, "SKETCH", 5003)  # of 20 thousand parameters
    sketched = recorded.replayed(host_bytes=0)
    assert sketched.sketched
    assert any("sketches" in note for note in sketched.notes)
    whole = {entry.name: entry for entry in done.entries}
    for entry in sketched.entries:
        same = whole[entry.name]
        assert entry.grad_norm == pytest.approx(same.grad_norm, rel=1e-9)
        assert entry.cosine_exact == pytest.approx(same.cosine_exact, abs=5 / math.sqrt(5003))
    assert any(entry.cosine_exact != whole[entry.name].cosine_exact for entry in sketched.entries)


def test_multiples_cost_no_backward_pass(tmp_path):
    once = Recorded(Case("grpo"), tmp_path)
    assert once.replayed("grpo").vectors == 5  # its own, exact weights, the KL at any β, bounds nearer and further
    both = once.replayed("grpo", "rpg-urkl", "rpg-reinforce-urkl")
    assert once.replayed("grpo", "rpg-urkl").vectors == both.vectors
    assert both.cosines[1][2] == 1


def test_a_method_of_ones_own_rule_is_refused(tmp_path):
    class Own(rpg.clip.Box):
        pass

    with pytest.raises(ValueError, match="a rule of your own"):
        Recorded(preset_case("dapo"), tmp_path, clip=Own())


def test_no_gradient_flows_where_tokens_are_left_out(tmp_path):
    """A mask with holes, as tools leave: their tokens are context, and not trained on."""
    recorded = Recorded(Case("dapo"), tmp_path)
    mask_BT = recorded.batch.mask_BT.clone()
    mask_BT[:, 1] = False
    recorded.batch = replace(recorded.batch, mask_BT=mask_BT, about={**recorded.batch.about, "denominator": None})
    (entry,) = recorded.replayed("dapo").entries
    (one,) = compared(recorded.batch, ["dapo"])[0]
    assert entry.grad_norm == pytest.approx(float(direct(recorded, one).norm()), rel=1e-5)


def test_rewards_are_all_that_a_file_needs(tmp_path):
    """Without a method, advantages or measurements: every preset from the rewards."""
    recorded = Recorded(Case("dapo"), tmp_path)
    recorded.batch = replace(recorded.batch, advantage=None, about={"temperature": 0.8})
    done = recorded.replayed("dapo")
    assert done.ran is None
    assert done.entries[0].grad_norm == pytest.approx(recorded.row["grad_norm"], rel=1e-5)
