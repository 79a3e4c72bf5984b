"""Run by several ranks: the gradient of a sharded policy is that of the whole one, for many architectures; and so are
the optimiser steps of every preset."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rpg
import tiny
from rpg.distributed.context import RunContext
from rpg.distributed.ranks import ALONE, World, joined
from rpg.distributed.shards import ShardedPolicy, gathered, local
from rpg.loss.methods import Algorithm
from rpg.models import adapters
from rpg.models.policy import Policy
from rpg.run.config import Config, OptimConfig, ReferenceConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.training.batch import make_batch, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.reference import Reference, batch_logp
from rpg.training.update import Updater

RECOMPUTED = ("llama-tied", "gemma2-final-cap", "gpt2")


def gradients(policy: Policy, rank: int, recompute: bool) -> torch.Tensor:
    """Of this rank's two responses; gives their log-probabilities."""
    generator = torch.Generator().manual_seed(rank)
    ids_BL = torch.randint(2, tiny.VOCABULARY, (2, 9), generator=generator)
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    found = policy.score(ids_BL, torch.tensor([3, 5]), mask_BT, recompute=recompute)
    (found.logp_BT.square().sum() * (rank + 1)).backward()  # type: ignore[no-untyped-call]
    return found.logp_BT.detach()


def check(name: str, world: World, recompute: bool, method: str | None) -> None:
    model = tiny.make(name.partition(" ")[0])
    if method is not None:
        model = adapters.attach(model, method, {"init_lora_weights": False}, "")
    policy = Policy(model, tiny.tokenizer())
    sharded = ShardedPolicy(policy, world)
    logp = gradients(sharded, world.rank, recompute)
    found = gathered({n: p.grad for n, p in sharded.parameters() if p.grad is not None}, keep=True)
    for rank in range(world.size):
        whole = gradients(policy, rank, recompute)
        assert rank != world.rank or torch.allclose(whole, logp, atol=1e-6), name
    expected = {n: p.grad for n, p in policy.parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), name
    for n, grad in expected.items():
        far = (found[n] - grad).norm() / grad.norm().clamp(min=1e-12)
        assert far < 1e-5, (name, n, float(far))
    for p in policy.model.parameters():
        p.data.zero_()
    sharded.copy_into(policy)
    for n, p in policy.parameters():
        assert p.any(), (name, n, "was not filled")


def check_steps(algorithm: Algorithm, world: World) -> None:
    """Two optimiser steps on a batch; their metrics."""
    policy = Policy(tiny.make("llama-tied"), tiny.tokenizer())
    batch = with_logp(make_batch(tiny.groups(policy), 0, policy.device), None, None, needs_reference=True)
    score_sq = batch.old_logp_BT.exp().square() if algorithm.advantage.needs_score_sq else None
    batch = with_advantages(batch, algorithm.advantage, [0.0] * 3, score_sq)
    sizes, optim = RolloutConfig(prompts=3, samples=4), OptimConfig(lr=1e-4, minibatches=2, micro_tokens=25, warmup=0)
    config, found = Config(rollout=sizes, optim=optim), []
    sharded = ShardedPolicy(policy, world)
    for trained, where in ((sharded, world), (policy, ALONE)):
        optimizer = make_optimizer(trained.parameters(), optim)
        updater = Updater(config, algorithm.resolve(), trained, optimizer, RunFolder(Path()), context=RunContext(where))
        found.append(updater.update(batch, 1))
    assert found[0].keys() == found[1].keys()
    # a gate compares tokens: the last bits of two that are nearly equal decide which one is left out
    near, still = (0.1, 0.05) if algorithm.loss.gate is not None else (1e-3, 1e-6)
    for name, value in found[1].items():
        assert math.isclose(found[0][name], value, rel_tol=near, abs_tol=still) or name == "mismatch/max_log_ratio", (
            algorithm.name,
            name,
            value,
            found[0][name],
        )
    assert found[1]["skipped"] == 0


@torch.no_grad()
def check_reference(world: World) -> None:
    """An adapter that has moved away from the weights that are its reference; then these are renewed."""
    model = adapters.attach(tiny.make("llama"), "lora", {"init_lora_weights": False}, "")
    policy = Policy(model, tiny.tokenizer())
    batch = make_batch(tiny.groups(policy), 0, policy.device)
    sharded, found = ShardedPolicy(policy, world), []
    for trained, where in ((sharded, world), (policy, ALONE)):
        reference = Reference(trained, "every", ReferenceConfig(every=2), where, policy)
        for _, p in trained.parameters():
            local(p).mul_(1.5)
        held_BT, moved_BT = reference.logp(batch, 25), batch_logp(trained, batch, 25, where)
        assert held_BT is not None
        assert reference.after_step(2, trained, None)
        renewed_BT = reference.logp(batch, 25)
        assert renewed_BT is not None
        assert torch.equal(renewed_BT, moved_BT)
        assert (held_BT - moved_BT).abs().max() > 0.1
        found.append((held_BT, moved_BT))
    for mine_BT, whole_BT in zip(*found, strict=True):
        assert torch.allclose(mine_BT, whole_BT, atol=1e-5)


with joined("cpu") as world:
    check_reference(world)
    for preset in rpg.algorithms():
        check_steps(rpg.algorithm(preset), world)
    check_steps(rpg.algorithm("rpg-reinforce-urkl", clip=rpg.clip.Adaptive(target_ess=0.97)), world)
    for name in tiny.ARCHITECTURES:
        check(name, world, recompute=name in RECOMPUTED, method=None)
    check("llama with an adapter", world, recompute=True, method="lora")
    print("the same", len(tiny.ARCHITECTURES))
