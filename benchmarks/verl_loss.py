"""A preset inside verl beside verl's own loss: forward and backward of verl's policy-loss functions, by turns.

.venv-verl/bin/python benchmarks/verl_loss.py [--rows 512] [--tokens 1024] [--repeats 40]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

PAIRS = {"vanilla": ("rpg-urkl", "rpg-reinforce-urkl", "rpg:dapo"), "gspo": ("rpg:gspo",), "cispo": ("rpg:cispo",)}


def config_of(mode: str) -> ActorConfig:
    chosen = PolicyLossConfig(loss_mode=mode)
    return ActorConfig(strategy="fsdp2", rollout_n=8, use_dynamic_bsz=True, policy_loss=chosen)


def seconds(mode: str, batch: dict[str, torch.Tensor]) -> float:
    logp_BT = batch["logp_BT"].detach().requires_grad_()
    config = config_of(mode)
    start = time.perf_counter()
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=batch["old_BT"],
        log_prob=logp_BT,
        advantages=batch["advantage_BT"],
        response_mask=batch["mask_BT"],
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.tokens)
    old_BT = -torch.rand(shape, generator=generator)
    batch = {
        "old_BT": old_BT,
        "logp_BT": old_BT + 0.1 * torch.randn(shape, generator=generator),
        "advantage_BT": torch.randn(args.rows, 1, generator=generator).expand(shape).contiguous(),
        "mask_BT": torch.ones(shape),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {list(shape)}, metrics included, medians")
    for theirs, ours in PAIRS.items():
        for mode in ours:
            pairs = [(seconds(theirs, batch), seconds(mode, batch)) for _ in range(args.repeats + 3)][3:]
            own, other = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(f"verl {theirs:10} {own:7.2f} ms   {mode:20} {other:7.2f} ms   ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
