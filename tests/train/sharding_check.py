"""Run by several ranks: the gradient of a sharded policy is that of the whole one, for many architectures."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
from rpg.models import adapters
from rpg.policy import Policy
from rpg.train.ranks import World, joined
from rpg.train.shards import ShardedPolicy, gathered

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
    sharded.pour(policy)
    for n, p in policy.parameters():
        assert p.any(), (name, n, "was not filled")


with joined("cpu") as world:
    for name in tiny.ARCHITECTURES:
        check(name, world, recompute=name in RECOMPUTED, method=None)
    check("llama with an adapter", world, recompute=True, method="lora")
    print("the same", len(tiny.ARCHITECTURES))
