"""Optimiser steps of the trainer's own Updater on a GPU: with the head and the loss together, and apart.

    python benchmarks/training_step.py [--model 0.5b] [--profile]
    python benchmarks/training_step.py --device cpu         # tiny, to see that it runs

One optimiser step over responses of one length, then two over responses whose lengths lie between a fifth and seven
eighths of that: these have another size each time, as in a run. Random weights. --profile: which kernels take how long.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from rpg.bench.synthetic import Sizes, make_model, make_tokenizer, sizes_for, vocabulary
from rpg.bench.timing import finish, measure_ceilings
from rpg.bench.train import make_batch
from rpg.costs.operations import Operations
from rpg.kernels.fused import fuse
from rpg.kernels.merged import merge
from rpg.models.policy import Policy
from rpg.run.config import Config, OptimConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.training.optim import make_optimizer
from rpg.training.setup import method_of
from rpg.training.update import Updater

STEPS, WARMUP = 7, 2


def updater_of(policy: Policy, sizes: Sizes, minibatches: int) -> Updater:
    groups, samples, prompt, new = sizes.groups, sizes.samples, sizes.prompt_tokens, sizes.new_tokens
    how = {"prompts": groups, "samples": samples, "max_new_tokens": new, "max_prompt_tokens": prompt}
    optim = OptimConfig(lr=1e-9, warmup=0, schedule="constant", minibatches=minibatches, recompute=False)
    rollout = RolloutConfig(**how, overlong=False)  # type: ignore[arg-type]
    config = Config(steps=10**6, device=sizes.device, rollout=rollout, optim=optim)
    optimizer = make_optimizer(policy.parameters(), optim)
    return Updater(config, method_of(config), policy, optimizer, RunFolder(Path(tempfile.mkdtemp())))


def profiled(work: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    by: dict[str, list[float]] = defaultdict(list)
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by[event.name].append(event.device_time_total / 1000)
    for name, each in sorted(by.items(), key=lambda item: -sum(item[1]))[:20]:
        print(f"  {sum(each):8.1f} ms {len(each):6d} × {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    sizes = sizes_for(args.device, model=args.model)
    ceilings = measure_ceilings(replace(sizes, quick=True))
    model = make_model(sizes.model, sizes)
    fuse(model)  # as the engine of a run does
    merge(model)
    policy = Policy(model, make_tokenizer(vocabulary(model)))
    shape = sizes.groups, sizes.samples, sizes.prompt_tokens, sizes.new_tokens
    floor = ceilings.seconds(Operations.of(model, sizes.element).train_flops(*shape, shared=True))
    print(f"{sizes.model}, {sizes.groups} × {sizes.samples} responses of {sizes.new_tokens} tokens")
    print(f"{ceilings.flops / 1e12:.3g} TFLOP/s measured, the step of one length at least {floor:.3f} s\n")
    whole = make_batch(policy, sizes)
    for minibatches in (1, 2):
        for together in (True, False):
            updater, generator = updater_of(policy, sizes, minibatches), torch.Generator().manual_seed(0)
            updater.together = updater.together and together
            seconds, batch = [], whole
            for step in range(1, STEPS + 1):
                if minibatches > 1:
                    new = sizes.new_tokens
                    lengths = torch.randint(new // 5, new * 7 // 8, (len(whole),), generator=generator)
                    at = torch.arange(new, device=sizes.device)
                    batch = replace(whole, mask_BT=at < lengths.to(sizes.device)[:, None])
                finish(sizes.device)
                begin = perf_counter()
                updater.update(batch, step)
                finish(sizes.device)
                seconds.append(perf_counter() - begin)
            taken = median(seconds[WARMUP:])
            share = f", {floor / taken:.1%} of the rate" if minibatches == 1 else ""
            how = "together" if updater.together else "apart"
            print(f"{minibatches} optimiser steps, head and loss {how}: {taken:.3f} s{share}", flush=True)
            if args.profile and together:
                profiled(lambda updater=updater, batch=batch: updater.update(batch, STEPS + 1))  # type: ignore[misc]
            del updater


if __name__ == "__main__":
    main()
