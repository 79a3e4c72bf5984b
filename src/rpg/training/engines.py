"""The engine of a run, as its settings say."""

from __future__ import annotations

from collections.abc import Callable

from ..distributed.ranks import ALONE, World
from ..models.policy import Policy
from ..rollout import Engine, NativeEngine
from ..run.config import Config


def make_engine(
    policy: Policy,
    config: Config,
    slots: int,
    warn: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
) -> Engine:
    """``slots`` sequences are sampled at the same time, on every rank."""
    rollout, ends = config.rollout, policy.end_ids(config.rollout.end_tokens)
    if rollout.engine == "native":
        if rollout.vllm:
            warn(f"rollout.vllm.{next(iter(rollout.vllm))} has no effect: rollout.engine is native")
        return NativeEngine(policy.model, policy.tokenizer, slots, warn, end_ids=ends)
    if world.sharded:
        raise ValueError("rollout.engine=vllm does not run under torchrun: take native, or see docs/engines.md")
    from ..rollout.vllm import VllmEngine

    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if policy.context is not None:
        longest = min(longest, policy.context)
    return VllmEngine(policy.model, ends, longest, slots, rollout.vllm)
