"""One optimiser step on a batch of groups: seconds, and the share of the matrix rate that they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..costs.operations import Ceilings, Counts
from ..kernels.fused import fuse
from ..models.policy import Policy
from ..run.config import Config, OptimConfig, RolloutConfig
from ..training.batch import Batch
from ..training.optim import make_optimizer
from ..training.reference import batch_logp
from ..training.setup import method_of
from ..training.update import Updater
from .rows import Column, Row, Section, Target
from .shapes import make_model, make_tokenizer, random_prompts, vocabulary
from .sizes import Sizes
from .timing import guarded, peak_gib, timed

MICRO_TOKENS = 8192  # while the batch is made
SHARE = 35.0  # per cent of the measured matrix rate
COLUMNS = (
    Column("seconds", "forward, backward and AdamW over all responses", ".3f"),
    Column("tokens/s", "response tokens by those seconds", ",.0f"),
    Column("TFLOP", "of the model, counted, each prompt once", ".1f"),
    Column("TFLOP repeated", "the same with the prompt of every response computed anew", ".1f"),
    Column("% of rate", "TFLOP a second over the measured matrix rate", ".1f"),
    Column("% repeated", "the same of the repeated ones", ".1f"),
    Column("peak GiB", "of device memory: weights, gradients, AdamW's moments, activations", ".2f"),
    Column("floor s", "TFLOP over the measured rate", ".3f"),
    Column("× floor", "seconds over that", ".2f"),
)


def train_section(sizes: Sizes, ceilings: Ceilings, watch: Callable[[str], None]) -> Section:
    section = Section("train", "Training: one optimiser step", COLUMNS, _about(sizes))
    for recompute in (False, True):
        name = f"rpg {sizes.model}" + (", recompute" if recompute else "")
        watch(f"train: {name}")
        section.rows.append(guarded(name, sizes.device, partial(_measure, name, sizes, ceilings, recompute)))
    return section


def _about(sizes: Sizes) -> str:
    return (
        f"{sizes.groups * sizes.samples} responses of {sizes.new_tokens} tokens to prompts of {sizes.prompt_tokens}, "
        f"{sizes.samples} to each, {sizes.dtype}, through the trainer's own Updater: one optimiser step on them all. "
        "Operations are six for each weight of the layers and token, six for each weight of the head and response "
        "token, twelve for each channel of attention and pair; what recompute computes twice is counted once. Medians "
        f"of {sizes.repeats} after one to warm up."
    )


def _measure(name: str, sizes: Sizes, ceilings: Ceilings, recompute: bool) -> Row:
    found = train_numbers(make_model(sizes.model, sizes), sizes, ceilings, recompute)
    wanted = not recompute and sizes.device != "cpu"
    return Row(name, found, (Target(f"≥ {SHARE:.0f} %", found["% of rate"], least=SHARE),) if wanted else ())


def train_numbers(model: Any, sizes: Sizes, ceilings: Ceilings, recompute: bool = False) -> dict[str, float]:
    counts = Counts.of(model, sizes.element)
    seconds = _seconds(model, sizes, recompute)
    shape = sizes.groups, sizes.samples, sizes.prompt_tokens, sizes.new_tokens
    once, repeated = (counts.train_flops(*shape, shared=shared) for shared in (True, False))
    floor = ceilings.seconds(once)
    return {
        "seconds": seconds,
        "tokens/s": sizes.groups * sizes.samples * sizes.new_tokens / seconds,
        "TFLOP": once / 1e12,
        "TFLOP repeated": repeated / 1e12,
        "% of rate": 100 * floor / seconds,
        "% repeated": 100 * ceilings.seconds(repeated) / seconds,
        "peak GiB": peak_gib(sizes.device),
        "floor s": floor,
        "× floor": seconds / floor,
    }


def _seconds(model: Any, sizes: Sizes, recompute: bool) -> float:
    fuse(model)  # as the engine of a run does
    policy = Policy(model, make_tokenizer(vocabulary(model)))
    config = _config(sizes, recompute)
    method = method_of(config)
    optimizer = make_optimizer(policy.parameters(), config.optim)
    batch = make_batch(policy, sizes)
    with TemporaryDirectory(prefix="rpg-bench-") as folder:
        updater = Updater(config, method, policy, optimizer, Path(folder))
        steps = iter(range(1, 1000))

        def update() -> None:
            found = updater.update(batch, next(steps))
            if found["skipped"]:
                raise ValueError("the loss or the gradient was not finite")

        return timed(update, sizes.device, sizes.repeats)


def _config(sizes: Sizes, recompute: bool) -> Config:
    rollout = RolloutConfig(
        prompts=sizes.groups,
        samples=sizes.samples,
        max_new_tokens=sizes.new_tokens,
        max_prompt_tokens=sizes.prompt_tokens,
        overlong=False,
    )
    optim = OptimConfig(lr=1e-9, warmup=0, schedule="constant", minibatches=1, recompute=recompute)
    return Config(steps=10**6, device=sizes.device, rollout=rollout, optim=optim)


def make_batch(policy: Policy, sizes: Sizes) -> Batch:
    """Random responses with the policy's own log-probabilities, and an advantage of either sign."""
    device, vocab = sizes.device, vocabulary(policy.model)
    rows, groups = sizes.groups * sizes.samples, torch.arange(sizes.groups, device=device)
    prompt = torch.tensor(random_prompts(sizes.groups, sizes.prompt_tokens, vocab), device=device)
    response = torch.tensor(random_prompts(rows, sizes.new_tokens, vocab, seed=1), device=device)
    group_B = groups.repeat_interleave(sizes.samples)
    mask_BT = torch.ones(rows, sizes.new_tokens, dtype=torch.bool, device=device)
    batch = Batch(
        ids_BL=torch.cat([prompt[group_B], response], 1),
        start_B=torch.full((rows,), sizes.prompt_tokens, device=device),
        mask_BT=mask_BT,
        old_logp_BT=torch.zeros(mask_BT.shape, device=device),
        reward_B=(torch.arange(rows, device=device) % 2).float(),
        group_B=group_B,
        advantage=1.0 - 2.0 * (torch.arange(rows, device=device) % 2).float(),
    )
    with torch.no_grad():
        batch.old_logp_BT.copy_(batch_logp(policy, batch, MICRO_TOKENS))
    return batch
