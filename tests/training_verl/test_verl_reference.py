"""When verl's reference is renewed, what is refused, and shards copied between models on two gloo ranks."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import tiny
from rpg.integrations.verl import metrics, reference
from rpg.integrations.verl.settings import settings
from rpg.loss.anchor import Renewal
from rpg.models.policy import Policy
from rpg.run.config import ReferenceConfig
from rpg.training.reference import Reference

KLS = [0.0, 0.3, 0.01, None, 0.2, 0.2, 0.0, 0.5, 0.01, 0.02, 0.4, 0.4]


def after(renewal, kl):
    """As the worker does after each of its updates."""
    due = renewal.due(None, kl)
    if due:
        renewal.renewed()
    return due


@pytest.mark.parametrize(
    "config", [ReferenceConfig("every", every=3), ReferenceConfig("kl", kl=0.05, smoothing=0.8)], ids=lambda c: c.update
)
def test_renewals_come_when_those_of_rpg_train_do(config):
    policy = Policy(tiny.make(), tiny.tokenizer(), 1.0)
    own, theirs = Renewal(config.update, config), Reference(policy, config.update, config)
    due = [after(own, kl) for kl in KLS]
    assert due == [theirs.after_step(step, policy, kl) for step, kl in enumerate(KLS, 1)]
    assert 1 < sum(due) < len(due)
    assert own.renewals == theirs.renewal.renewals == sum(due)


def test_a_renewal_goes_on_after_a_resume():
    config = ReferenceConfig("kl", kl=0.05, smoothing=0.8)
    whole, first, second = (Renewal("kl", config) for _ in range(3))
    due = [after(whole, kl) for kl in KLS]
    before = [after(first, kl) for kl in KLS[:5]]
    second.load(first.state())
    assert before + [after(second, kl) for kl in KLS[5:]] == due


@pytest.mark.parametrize(("count", "renewed"), [("iterations", [3, 6]), ("optimizer-steps", [1, 2, 3, 4, 5, 6])])
def test_mini_batches_are_counted_where_the_settings_say_so(monkeypatch, count, renewed):
    """Each update of verl's actor has 4 mini-batches, and K is 3."""
    asked = {"update": "every", "every": 3, "count": count}
    monkeypatch.setattr(reference, "settings_of", lambda actor: settings("grpo", {"reference": asked}))
    monkeypatch.setattr(reference, "_agreed", lambda measured: measured)
    monkeypatch.setattr(reference, "copy_shards", lambda *_: None)
    engine = SimpleNamespace(engine=SimpleNamespace(module=None))
    worker = SimpleNamespace(config=SimpleNamespace(actor=None), actor=engine, ref=engine, rank=1)
    renewal = Renewal("every", ReferenceConfig(**asked))
    output = {"metrics": {metrics.KEPT: [1.0] * 4, reference.KL: [0.1] * 4}}
    found = [reference._after_update(worker, renewal, output)["metrics"][reference.UPDATED] for _ in range(6)]
    assert [i for i, (due,) in enumerate(found, 1) if due] == renewed


def run(strategy="fsdp2", **model):
    """verl's actor_rollout_ref as far as it matters."""
    return SimpleNamespace(model=model, actor=SimpleNamespace(strategy=strategy))


@pytest.mark.parametrize("model", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "x"}])
def test_an_adapters_reference_is_refused(model):
    reference.check(run(lora_rank=0, lora={"rank": 0}, lora_adapter_path=None))
    with pytest.raises(ValueError, match=r"reference\.update: with LoRA .* cannot be renewed: set it to frozen"):
        reference.check(run(**model))


def test_engines_without_shards_of_that_kind_are_refused():
    with pytest.raises(ValueError, match=r"strategy=fsdp or fsdp2; got megatron"):
        reference.check(run("megatron"))


def test_a_reference_in_another_worker_is_refused():
    worker = SimpleNamespace(config=run(), ref=None)
    with pytest.raises(ValueError, match="actor and reference in one worker"):
        reference._check_worker(worker)


def test_nothing_of_verls_is_touched_unless_the_settings_ask_for_it(monkeypatch):
    class Worker:
        def update_actor(self, data):
            return data

        save_checkpoint = load_checkpoint = update_actor

    before = dict(vars(Worker))
    monkeypatch.setitem(sys.modules, metrics.WORKERS, SimpleNamespace(ActorRolloutRefWorker=Worker))
    for asked in ("old", "frozen"):
        reference.install(settings("rpg-reinforce-urkl", {"reference": {"update": asked}}))
    assert dict(vars(Worker)) == before
    for _ in range(2):
        reference.install(settings("grpo-corrected", {"reference": {"update": "every"}}))
    assert all(vars(Worker)[name].__wrapped__ is before[name] for name in reference.AFTER), "wrapped once"


RANKS = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from rpg.integrations.verl.reference import _put, copy_shards, shards

x = torch.arange(10.0).reshape(2, 5) / 10
whole = dist.all_gather_into_tensor
gathered = []
dist.all_gather_into_tensor = lambda *a, **k: (gathered.append(1), whole(*a, **k))[1]
dist.init_process_group("gloo")

def make(kind, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    model.register_buffer("scale", torch.full((2,), float(seed)))
    if kind == "fsdp":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    fully_shard(model[0])
    return fully_shard(model)

for kind in ("fsdp2", "fsdp"):
    actor, other = make(kind, 0), make(kind, 1)
    fresh = make(kind, 2)
    copy_shards(actor, fresh)                       # before any forward pass, as after a resume
    assert torch.equal(actor(x), fresh(x))
    actor(x)                                        # leaves whole weights behind
    before = other(x).detach().clone()
    gathered.clear()
    kept = {name: part.clone() for name, part in shards(other).items()}
    copy_shards(actor, other)
    assert not gathered, "nothing is gathered"
    sizes = [part.numel() for name, part in shards(other).items() if "scale" not in name]
    assert sum(sizes) < 5 * 7 + 7 + 7 * 3 + 3, "a rank has only its part"
    assert torch.equal(actor(x), other(x)) and not torch.equal(before, other(x))
    assert all((part == 0).all() for name, part in shards(other).items() if "scale" in name)
    for part in shards(actor).values():
        part.add_(1)                                # and the copy is one
    assert not torch.equal(actor(x), other(x))
    _put(kept, other)
    assert torch.equal(before, other(x))

try:
    copy_shards(make("fsdp2", 0), make("fsdp", 0))
except ValueError as error:
    assert "sharded differently" in str(error)
else:
    raise AssertionError("not refused")
dist.destroy_process_group()
print("done")
"""


def test_shards_are_copied_on_two_ranks_without_gathering(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2
