"""The KL's anchor: which rule, when it is renewed, what it holds."""

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rpg
import tiny
from rpg.distributed.context import QUIET
from rpg.models import adapters
from rpg.models.policy import Policy
from rpg.plan.plan import plan
from rpg.run.config import Config, OptimConfig, PeftConfig, ReferenceConfig
from rpg.run.folder import RunFolder
from rpg.run.settings import flat
from rpg.run.teacher import with_teacher
from rpg.training.batch import make_batch, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.reference import Reference, batch_logp, load_teacher
from rpg.training.setup import method_of
from rpg.training.state import check_settings
from rpg.training.update import Updater

WITHOUT_KL = {
    "reinforce", "ppo", "dr-grpo", "dapo", "rloo", "remax", "gpg", "gspo", "cispo", "atr-grpo", "capo", "topr", "sapo",
    "dppo-tv", "dppo-kl", "gmpo", "luspo", "vespo", "clip-cov", "high-entropy", "skywork-or1",
    "maxrl", "opo", "otb",
}  # fmt: skip
ANCHORED_AT_THE_START = {"grpo", "grpo-corrected", "reinforce++", "reinforce++-baseline", "distill"}


def make_policy(dtype=torch.float32):
    return Policy(tiny.make("llama-tied", dtype=dtype), tiny.tokenizer())


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def move(policy, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rpg.algorithms())
def test_auto_is_as_published(name):
    rule = rpg.algorithm(name).resolve().anchor
    assert rule == ("ema" if name == "warp" else "frozen" if name in ANCHORED_AT_THE_START else "old")


@pytest.mark.parametrize("update", ["old", "every", "kl", "ema", "frozen"])
@pytest.mark.parametrize("name", rpg.algorithms())
def test_a_rule_that_is_asked_for_holds_where_there_is_a_kl_term(name, update):
    rule = rpg.algorithm(name).resolve(update=update).anchor
    assert rule == ("old" if name in WITHOUT_KL else update)


def test_a_kl_term_of_strength_zero_needs_no_anchor():
    for name in ("grpo", "rpg-urkl", "reinforce++"):
        assert rpg.algorithm(name, beta=0.0).resolve(update="frozen").anchor == "old"


def test_old_holds_no_second_model():
    policy = make_policy()
    reference = Reference(policy, "old", ReferenceConfig())
    batch = make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    assert reference.policy is None
    assert reference.logp(batch, 100) is None
    assert reference.tensors() == {}
    assert reference.after_step(10, policy, 5.0) is False


@pytest.mark.parametrize("rule", ["every", "kl", "ema", "frozen"])
def test_the_copy_is_a_copy_without_gradients(rule):
    policy = make_policy()
    reference, start = Reference(policy, rule, ReferenceConfig()), weights(policy)
    batch = make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    before = batch_logp(policy, batch, 100)
    move(policy, 1)
    assert same(weights(reference.policy), start)
    assert torch.equal(reference.logp(batch, 100), before)
    assert not torch.allclose(batch_logp(policy, batch, 100), before, atol=0.1)
    assert not any(p.requires_grad for p in reference.policy.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())
    assert reference.policy.temperature == policy.temperature


# ---- renewals --------------------------------------------------------------------------------------------------------


def test_frozen_stays():
    policy = make_policy()
    reference, start = Reference(policy, "frozen", ReferenceConfig(every=1, kl=1e-9)), weights(policy)
    for step in range(1, 5):
        move(policy, step)
        assert reference.after_step(step, policy, 10.0) is False
    assert same(weights(reference.policy), start)


def test_every_third_step():
    policy = make_policy()
    reference, held = Reference(policy, "every", ReferenceConfig(every=3)), weights(policy)
    for step in range(1, 8):
        move(policy, step)
        renewed = reference.after_step(step, policy, None)
        assert renewed == (step in (3, 6))
        held = weights(policy) if renewed else held
        assert same(weights(reference.policy), held)
    assert reference.renewal.renewals == 2


def test_when_the_moving_average_of_the_kl_passes_the_target():
    policy = make_policy()
    config = ReferenceConfig(kl=0.05, smoothing=0.5)
    reference, held, average, seen = Reference(policy, "kl", config), weights(policy), 0.0, 0.0
    renewed_at = []
    for step, kl in enumerate([0.02, 0.06, 0.08, 0.02, 0.2, 0.01, None, 0.09, 0.08], start=1):
        move(policy, step)
        if kl is not None:  # a step that learnt nothing says nothing
            average, seen = 0.5 * average + 0.5 * kl, 0.5 * seen + 0.5
        renewed = reference.after_step(step, policy, kl)
        assert renewed == (seen > 0 and average / seen > 0.05)
        if renewed:
            renewed_at.append(step)
            held, average, seen = weights(policy), 0.0, 0.0
        assert reference.renewal.average_kl == pytest.approx(average / seen if seen else 0.0)
        assert same(weights(reference.policy), held)
    assert renewed_at == [3, 5, 8, 9]


def test_optimiser_steps_are_counted_where_the_settings_say_so():
    """Four to an iteration: the tenth is made in the third, the twentieth ends the fifth."""
    policy = make_policy()
    reference = Reference(policy, "every", ReferenceConfig(every=10, count="optimizer-steps"))
    steps = [4, 4, 4, 0, 4, 4]  # the fourth had nothing to learn from
    renewed = [reference.after_step(step, policy, None, made) for step, made in enumerate(steps, 1)]
    assert renewed == [False, False, True, False, False, True]
    again = Reference(policy, "every", ReferenceConfig(every=10, count="optimizer-steps"))
    again.load(reference.state(), reference.tensors())
    assert again.renewal.updates == 20


def test_the_moving_average_of_the_weights():
    """Of tied weights too, once and not twice."""
    policy = make_policy()
    reference = Reference(policy, "ema", ReferenceConfig(decay=0.9))
    expected = weights(policy)
    for step in range(1, 4):
        move(policy, step)
        assert reference.after_step(step, policy, None) is True
        now = weights(policy)
        expected = {name: 0.9 * expected[name] + 0.1 * now[name] for name in now}
    found = weights(reference.policy)
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-6), name
    model = reference.policy.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["every", "kl", "ema", "frozen"])
def test_state_comes_back(rule):
    policy = make_policy()
    config = ReferenceConfig(every=2, kl=0.03, smoothing=0.5)
    whole = Reference(policy, rule, config)
    for step in (1, 2, 3):
        move(policy, step)
        whole.after_step(step, policy, 0.04)
    state, tensors = copy.deepcopy((whole.state(), whole.tensors()))
    again = Reference(policy, rule, config)
    again.load(state, tensors)
    for step in (4, 5, 6):
        move(policy, step)
        assert again.after_step(step, policy, 0.04) == whole.after_step(step, policy, 0.04)
    assert same(weights(again.policy), weights(whole.policy))
    assert again.state() == whole.state()


# ---- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["old", "frozen"])
@pytest.mark.parametrize("name", sorted(set(rpg.algorithms()) - WITHOUT_KL - {"distill"}))  # it has nothing else
def test_presets_with_a_kl_term_train_with_either_reference(name, update, tmp_path):
    policy, method = make_policy(), rpg.algorithm(name).resolve(update=update)
    config = Config(reference=ReferenceConfig(update=update), optim=OptimConfig(lr=1e-2, warmup=0, schedule="constant"))
    reference = Reference(policy, method.anchor, config.reference)
    batch = make_batch(tiny.groups(policy, noise=0.0), 0, policy.device)
    batch = with_logp(batch, None, reference.logp(batch, 100), method.needs_reference)
    assert (batch.ref_logp_BT is None) == (update == "old" and not method.needs_reference)
    if batch.ref_logp_BT is not None:  # nothing has moved yet
        assert torch.allclose(batch.ref_logp_BT, batch.old_logp_BT, atol=1e-4)
    batch = with_advantages(batch, method.advantage, None)
    before = weights(policy)
    optimizer = make_optimizer(policy.parameters(), config.optim)
    metrics = Updater(config, method, policy, optimizer, RunFolder(tmp_path)).update(batch, 1)
    assert metrics["skipped"] == 0
    assert metrics["lr"] == 1e-2
    assert not same(weights(policy), before)


def test_a_moving_average_of_half_precision_moves():
    """A fiftieth of a change of five per cent is below what bfloat16 can tell."""
    policy = make_policy(torch.bfloat16)
    reference, start = Reference(policy, "ema", ReferenceConfig(decay=0.98)), weights(policy)
    assert {x.dtype for x in reference.averages.values()} == {torch.float32}
    assert reference.averages.keys() >= start.keys()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.05)
    for step in range(1, 41):
        reference.after_step(step, policy, None)
    found, now, past = weights(reference.policy), weights(policy), 0.98**40
    for name, value in found.items():
        expected = past * start[name].float() + (1 - past) * now[name].float()
        assert torch.allclose(value.float(), expected, rtol=2**-8, atol=0)
        assert torch.allclose(reference.averages[name], expected, rtol=1e-5, atol=1e-7)
    other = Reference(make_policy(torch.bfloat16), "ema", ReferenceConfig(decay=0.98))
    other.load(reference.state(), {name: x.clone() for name, x in reference.tensors().items()})
    for one in (reference, other):
        one.after_step(41, policy, None)
    assert same(reference.averages, other.averages)
    assert same(weights(reference.policy), weights(other.policy))
    assert not Reference(policy, "every", ReferenceConfig()).averages
    assert not Reference(make_policy(), "ema", ReferenceConfig()).averages


# ---- adapters --------------------------------------------------------------------------------------------------------

RULES = ["every", "kl", "ema", "frozen"]


def make_adapted(tmp_path, dtype=torch.float32, options=None):
    if not (tmp_path / "base").exists():
        make_policy().save(tmp_path / "base")
    return Policy.load(str(tmp_path / "base"), dtype=dtype, peft=PeftConfig("lora", {"r": 4, **(options or {})}))


def move_adapter(policy, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in policy.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=g))


def numbers(reference):
    return sum(x.numel() for x in reference.tensors().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_is_the_model_without_its_adapter_to_the_bit(dtype, tmp_path):
    policy = make_adapted(tmp_path, dtype)
    base = Policy.load(str(tmp_path / "base"), dtype=dtype)
    batch = make_batch(tiny.groups(base), 0, torch.device("cpu"))
    reference, expected = Reference(policy, "frozen", ReferenceConfig()), batch_logp(base, batch, 100)
    for step in range(3):
        assert torch.equal(reference.logp(batch, 100), expected)
        before = weights(policy)
        assert torch.equal(reference.logp(batch, 100), expected)
        assert same(before, weights(policy))
        move_adapter(policy, step)
        assert not torch.allclose(batch_logp(policy, batch, 100), expected, atol=0.1)
        assert reference.after_step(step, policy, 1.0) is False
    assert reference.policy is policy
    assert reference.tensors() == {}
    assert reference.state()["held"] is False
    assert all(("lora_" in name) == p.requires_grad for name, p in policy.model.named_parameters())


@pytest.mark.parametrize("rule", ["every", "kl", "ema"])
def test_of_an_adapter_only_its_weights_are_held(rule, tmp_path):
    policy, config = make_adapted(tmp_path), ReferenceConfig(every=2, kl=0.03, smoothing=0.5, decay=0.7)
    whole, batch = copy.deepcopy(policy), make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    whole.adapted = False  # the same, by a copy of all
    del vars(whole.model)[adapters.WRAPPER]
    for p in whole.model.parameters():
        p.requires_grad_(True)
    references = Reference(policy, rule, config), Reference(whole, rule, config)
    trained = sum(p.numel() for _, p in policy.parameters())
    for step in range(1, 5):
        move_adapter(policy, step)
        with torch.no_grad():
            for (_, p), (_, q) in zip(whole.model.named_parameters(), policy.model.named_parameters(), strict=True):
                p.copy_(q)
        assert references[0].after_step(step, policy, 0.04) == references[1].after_step(step, whole, 0.04)
        found, expected = (reference.logp(batch, 100) for reference in references)
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.allclose(found, batch_logp(policy, batch, 100), atol=1e-3) or rule != "ema"
    assert numbers(references[0]) == trained < numbers(references[1]) / 4
    assert references[0].policy.model is policy.model


@pytest.mark.parametrize("rule", RULES)
def test_the_state_of_an_adapters_reference_comes_back(rule, tmp_path):
    """The resumed process loads an adapter that is no longer nothing: what is off in it is the state's to say."""
    policy = make_adapted(tmp_path, torch.bfloat16)
    config = ReferenceConfig(every=2, kl=0.03, smoothing=0.5)
    first = Reference(policy, rule, config)
    for step in (1, 2, 3):
        move_adapter(policy, step)
        first.after_step(step, policy, 0.04)
    policy.save(tmp_path / "adapter")
    state, tensors = copy.deepcopy((first.state(), first.tensors()))
    resumed = Policy.load(str(tmp_path / "adapter"), dtype=torch.bfloat16, peft=PeftConfig("lora", {"r": 4}))
    again = Reference(resumed, rule, config)
    again.load(state, tensors)
    batch = make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    for step in (4, 5, 6):
        assert torch.equal(again.logp(batch, 100), first.logp(batch, 100))
        for one in (policy, resumed):
            move_adapter(one, step)
        assert again.after_step(step, resumed, 0.04) == first.after_step(step, policy, 0.04)
    assert same(again.tensors(), first.tensors())
    assert again.state() == first.state()


def test_frozen_is_where_the_run_began(tmp_path):
    """A run that goes on with an adapter is anchored at that adapter, not at the model below."""
    policy = make_adapted(tmp_path)
    move_adapter(policy, 1)
    policy.save(tmp_path / "adapter")
    later = Policy.load(str(tmp_path / "adapter"))
    batch = make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    reference, expected = Reference(later, "frozen", ReferenceConfig()), batch_logp(later, batch, 100)
    move_adapter(later, 2)
    assert torch.equal(reference.logp(batch, 100), expected)
    assert reference.state()["held"] is True
    pissa = make_adapted(tmp_path, options={"init_lora_weights": "pissa"})
    reference, expected = Reference(pissa, "frozen", ReferenceConfig()), batch_logp(pissa, batch, 100)
    move_adapter(pissa, 2)
    assert torch.equal(reference.logp(batch, 100), expected)


def test_a_checkpoint_of_fewer_settings_has_the_defaults_of_those_it_lacks():
    config = Config(steps=7)
    then = json.loads(json.dumps(flat(config)))
    for name in ("reference.count", "rollout.dynamic_by", "rollout.min_signal"):
        del then[name]
    saved = SimpleNamespace(state={"config": then, "threads": torch.get_num_threads()})
    check_settings(config, saved, QUIET)
    other = Config(reference=ReferenceConfig(count="optimizer-steps"))
    changes = r"reference\.count was iterations and is now optimizer-steps: leave it, or start another --output"
    with pytest.raises(ValueError, match=changes):
        check_settings(other, saved, QUIET)
    other = replace(other, seed=1, model="x", dtype="float32", rollout=replace(config.rollout, top_p=0.8))
    text = (
        r": dtype was auto and is now float32, model was builtin and is now x, reference\.count was .*, and 2 more dif"
    )
    with pytest.raises(ValueError, match=text + r"fer: leave them"):
        check_settings(other, saved, QUIET)


# ---- a teacher -------------------------------------------------------------------------------------------------------


def taught(tmp_path, **changes):
    return replace(Config(reference=ReferenceConfig(model=str(tmp_path / "teacher"))), **changes)


def make_teacher(tmp_path, kind="llama", name="teacher"):
    policy = Policy(tiny.make(kind), tiny.tokenizer())
    move(policy, 7)
    policy.save(tmp_path / name)
    return policy


@pytest.mark.parametrize("adapted", [False, True])
def test_a_teacher_is_scored_and_stays_outside_of_checkpoints(adapted, tmp_path):
    """Another architecture than the policy's; the policy's temperature."""
    teacher, policy = make_teacher(tmp_path), make_adapted(tmp_path) if adapted else make_policy()
    policy.temperature = teacher.temperature = 0.7
    config = taught(tmp_path)
    reference = Reference(policy, "frozen", config.reference, teacher=load_teacher(config, policy))
    batch = make_batch(tiny.groups(policy), 0, torch.device("cpu"))
    expected = batch_logp(teacher, batch, 100)
    move_adapter(policy, 1)
    assert torch.allclose(reference.logp(batch, 100), expected, atol=1e-6)
    assert reference.after_step(1, policy, 9.0) is False
    assert reference.tensors() == {}
    assert not any(p.requires_grad for p in reference.policy.model.parameters())
    state = reference.state()
    assert (state["held"], state["teacher"]) == (False, str(tmp_path / "teacher"))
    reference.load(state, {})


def test_a_teacher_may_be_an_adapter_or_a_run(tmp_path):
    policy = make_adapted(tmp_path)
    move_adapter(policy, 3)
    (tmp_path / "teacher").mkdir()
    for name in ("config.yaml", "run.id"):
        (tmp_path / "teacher" / name).touch()
    config, student = taught(tmp_path), make_policy()
    with pytest.raises(ValueError, match="teacher has no checkpoint yet"):
        load_teacher(config, student)
    for step in (1, 2):
        folder = tmp_path / "teacher" / "checkpoints" / f"step-00000{step}" / "model"
        (policy if step == 2 else make_policy()).save(folder)
    batch = make_batch(tiny.groups(student), 0, torch.device("cpu"))
    found = batch_logp(load_teacher(config, student), batch, 100)
    assert torch.allclose(found, batch_logp(policy, batch, 100), atol=1e-5)


def test_a_resumed_run_keeps_its_teacher_however_far_that_has_trained(tmp_path):
    """And may name it by its checkpoint; another is refused, and so is one that is gone."""
    run, checkpoints = tmp_path / "teacher", tmp_path / "teacher" / "checkpoints"
    first, second = (checkpoints / f"step-00000{step}" / "model" for step in (1, 2))
    first.mkdir(parents=True)
    (run / "config.yaml").touch()
    config = taught(tmp_path)
    assert with_teacher(config).reference.model == str(first)
    state = {"config": json.loads(json.dumps(flat(config))), "threads": torch.get_num_threads()}
    state["reference"] = {"teacher": str(first)}
    second.mkdir(parents=True)
    assert with_teacher(config).reference.model == str(second)
    for name in (run, first):
        named = Config(reference=ReferenceConfig(model=str(name)))
        check_settings(named, SimpleNamespace(state=state), QUIET)
        assert with_teacher(named, state).reference.model == str(first)
    other = Config(reference=ReferenceConfig(model=str(second)))
    with pytest.raises(ValueError, match=r"reference\.model was .*/teacher and is now .*2/model: leave it"):
        check_settings(other, SimpleNamespace(state=state), QUIET)
    first.rmdir()
    with pytest.raises(ValueError, match=r"reference\.model .*: this run's teacher, .*1/model, is gone: bring it back"):
        with_teacher(config, state)


def test_a_teacher_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/teacher", "./teacher", "/no/teacher"):
        config = Config(algorithm="distill", reference=ReferenceConfig(model=name))
        text = f"reference.model {name}: there is no such run or folder: train the teacher first, or name another"
        for ask in (with_teacher, lambda config: plan(config, "h200")):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                ask(config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^reference\.model empty is no model folder: there is no config\.json in it"):
        load_teacher(Config(reference=ReferenceConfig(model="empty")), make_policy())


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    config, policy = taught(tmp_path), make_policy()
    make_teacher(tmp_path)
    strange = copy.deepcopy(policy.tokenizer)
    strange.add_tokens(["<new>"])
    policy.tokenizer = strange
    with pytest.raises(
        ValueError, match=r"teacher has another vocabulary than builtin: '<new>' is token \d+ here and n"
    ):
        load_teacher(config, policy)
    other = {token: i ^ 1 for token, i in make_policy().tokenizer.get_vocab().items()}
    policy.tokenizer = SimpleNamespace(get_vocab=lambda: other)
    with pytest.raises(ValueError, match=r"has another vocabulary than builtin: .* is token \d+ here and \d+ there"):
        load_teacher(config, policy)
    policy = make_policy()
    policy.model.resize_token_embeddings(policy.model.config.vocab_size + 8)
    with pytest.raises(ValueError, match=r"has \d+ embeddings and builtin has \d+: it cannot score"):
        load_teacher(config, policy)


def test_the_policy_moves_to_the_teacher_in_every_token(tmp_path):
    """One step over its own responses: what it likes more than the teacher becomes less probable, and the reverse."""
    teacher, policy = make_teacher(tmp_path), make_policy()
    config = taught(tmp_path, algorithm="distill", optim=OptimConfig(lr=3e-3, warmup=0, minibatches=1))
    method = method_of(config)
    reference = Reference(policy, method.anchor, config.reference, teacher=load_teacher(config, policy))
    batch = make_batch(tiny.groups(policy, noise=0.0), 0, policy.device)
    batch = with_logp(batch, batch_logp(policy, batch, 100), reference.logp(batch, 100), method.needs_reference)
    batch = with_advantages(batch, method.advantage, None)
    assert torch.equal(batch.advantage, torch.zeros(len(batch)))
    log_u = (batch.old_logp_BT - batch_logp(teacher, batch, 100))[batch.mask_BT]
    optimizer = make_optimizer(policy.parameters(), config.optim)
    assert Updater(config, method, policy, optimizer, RunFolder(tmp_path)).update(batch, 1)["skipped"] == 0
    later = (batch_logp(policy, batch, 100) - batch.ref_logp_BT)[batch.mask_BT]
    assert (later - log_u)[log_u > 0].mean() < 0 < (later - log_u)[log_u < 0].mean()
