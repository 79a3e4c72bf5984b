"""One optimiser step on a batch of groups: seconds, and the share of the matrix rate that they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..costs.operations import Ceilings, Operations
from ..kernels.fused import fuse
from ..kernels.merged import merge
from ..models.policy import Policy
from ..run.config import Config, OptimConfig, RolloutConfig
from ..run.folder import RunFolder
from ..training.batch import Batch
from ..training.optim import make_optimizer
from ..training.reference import batch_logp
from ..training.setup import method_of
from ..training.update import Updater
from .synthetic import Sizes, make_model, make_tokenizer, random_prompts, vocabulary
from .table import Quantity, Section, Target
from .timing import Numbers, Watch, peak_gib, recorder, timed

MICRO_TOKENS = 8192  # while the batch is made
SHARE = 35.0  # per cent of the measured matrix rate
COLUMNS = (
    Quantity("seconds", "forward, backward and AdamW over all responses", ".3f"),
    Quantity("tokens/s", "response tokens by those seconds", ",.0f"),
    Quantity("TFLOP", "of the model, counted, each prompt once", ".1f"),
    Quantity("TFLOP repeated", "the same with the prompt of every response computed again", ".1f"),
    Quantity("% of rate", "TFLOP a second over the measured matrix rate", ".1f"),
    Quantity("% repeated", "the same of the repeated ones", ".1f"),
    Quantity("peak GiB", "of device memory: weights, gradients, AdamW's moments, activations", ".2f"),
    Quantity("floor s", "TFLOP over the measured rate", ".3f"),
    Quantity("× floor", "seconds over that", ".2f"),
)


def train_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    about = (
        f"{sizes.groups * sizes.samples} responses of {sizes.new_tokens} tokens to prompts of {sizes.prompt_tokens}, "
        f"{sizes.samples} to each, {sizes.dtype}, through the trainer's own Updater: one optimiser step on them all. "
        "Operations are six for each weight of the layers and token, six for each weight of the head and response "
        "token, twelve for each channel of attention and pair; what recompute computes twice is counted once. Medians "
        f"of {sizes.repeats} after one to warm up."
    )
    section = Section("train", "Training: one optimiser step", COLUMNS, about)
    record, name = recorder(section, sizes, watch), f"rpg {sizes.model}"
    record(name, partial(train_numbers, sizes.model, sizes, ceilings))
    record(f"{name}, recompute", partial(train_numbers, sizes.model, sizes, ceilings, recompute=True))
    if sizes.device != "cpu":
        section.require(name, Target(f"≥ {SHARE:.0f} %", section.value(name, "% of rate"), least=SHARE))
    return section


def train_numbers(name: str, sizes: Sizes, ceilings: Ceilings, recompute: bool = False) -> Numbers:
    model = make_model(name, sizes)
    operations = Operations.of(model, sizes.element)
    seconds = _seconds(model, sizes, recompute)
    shape = sizes.groups, sizes.samples, sizes.prompt_tokens, sizes.new_tokens
    once, repeated = (operations.train_flops(*shape, shared=shared) for shared in (True, False))
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
    rollout = RolloutConfig(
        prompts=sizes.groups,
        samples=sizes.samples,
        max_new_tokens=sizes.new_tokens,
        max_prompt_tokens=sizes.prompt_tokens,
        overlong=False,
    )
    optim = OptimConfig(lr=1e-9, warmup=0, schedule="constant", minibatches=1, recompute=recompute)
    config = Config(steps=10**6, device=sizes.device, rollout=rollout, optim=optim)
    fuse(model)  # as the engine of a run does
    merge(model)
    policy = Policy(model, make_tokenizer(vocabulary(model)))
    optimizer = make_optimizer(policy.parameters(), optim)
    batch = make_batch(policy, sizes)
    with TemporaryDirectory(prefix="rpg-bench-") as folder:
        updater = Updater(config, method_of(config), policy, optimizer, RunFolder(Path(folder)))
        steps = iter(range(1, 1000))

        def update() -> None:
            if updater.update(batch, next(steps))["skipped"]:
                raise ValueError("the loss or the gradient was not finite")

        return timed(update, sizes.device, sizes.repeats)


def make_batch(policy: Policy, sizes: Sizes) -> Batch:
    """Random responses with the policy's own log-probabilities, and an advantage of either sign."""
    device, vocab = sizes.device, vocabulary(policy.model)
    rows, groups = sizes.groups * sizes.samples, torch.arange(sizes.groups, device=device)
    prompt = torch.tensor(random_prompts(sizes.groups, sizes.prompt_tokens, vocab), device=device)
    response = torch.tensor(random_prompts(rows, sizes.new_tokens, vocab, seed=1), device=device)
    group_B = groups.repeat_interleave(sizes.samples)
    odd_B = (torch.arange(rows, device=device) % 2).float()
    batch = Batch(
        ids_BL=torch.cat([prompt[group_B], response], 1),
        start_B=torch.full((rows,), sizes.prompt_tokens, device=device),
        mask_BT=torch.ones(rows, sizes.new_tokens, dtype=torch.bool, device=device),
        old_logp_BT=torch.zeros(rows, sizes.new_tokens, device=device),
        reward_B=odd_B,
        group_B=group_B,
        advantage=1.0 - 2.0 * odd_B,
    )
    with torch.no_grad():
        batch.old_logp_BT.copy_(batch_logp(policy, batch, MICRO_TOKENS))
    return batch
