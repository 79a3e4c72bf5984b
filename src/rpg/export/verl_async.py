"""The same command for verl's fully asynchronous trainer: other GPUs sample while these train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..integrations.truncation import truncated
from ..loss.methods import Method
from ..run.config import Config
from . import recipe

PROGRAM = "verl.experimental.fully_async_policy.fully_async_main"


@dataclass(frozen=True)
class Samplers:
    """The GPUs that sample, beside those that train."""

    gpus: int = 4  # on each of their nodes
    nodes: int = 1
    staleness: float = 0.5  # how far they may be ahead, as a share of a step's prompts

    def __post_init__(self) -> None:
        if not 0 <= self.staleness < float("inf"):
            raise ValueError(f"--staleness must be at least 0, a share of a step's prompts; got {self.staleness}")


def refuse(config: Config, method: Method) -> None:
    """What the synchronous trainer has and this one has not, and what would bias the gradient."""
    if method.dynamic:
        raise ValueError(
            "rollout.dynamic has no counterpart in verl's asynchronous trainer, which drops no groups: "
            "give --rollout.dynamic false, or export without --async"
        )
    if method.anchor in ("every", "kl"):
        raise ValueError(
            f"reference.update={method.anchor} has no counterpart in verl's asynchronous trainer, whose reference is "
            "in another worker: give --reference.update frozen or old, or export without --async"
        )
    if method.loss.needs_sampler:
        return
    if not method.loss.has_ratio:
        raise ValueError(
            f"algorithm={method.name} has no ratio that accounts for responses of earlier weights: "
            "give --loss.mismatch exact, or export without --async"
        )
    if config.rollout.old_logp == "recompute":
        raise ValueError(
            "rollout.old_logp=recompute with --async: responses come from earlier weights, which biases the gradient: "
            "give --loss.mismatch exact, or --rollout.old_logp engine"
        )


def settings(config: Config, method: Method, sampling: Samplers, steps: int) -> dict[str, Any]:
    """Beside those of the synchronous trainer, or instead of them. New weights are sampled from after each step."""
    rollout = config.rollout
    return {
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "algorithm.rollout_correction.bypass_mode": not method.loss.needs_sampler,
        "rollout.nnodes": sampling.nodes,
        "rollout.n_gpus_per_node": sampling.gpus,
        "rollout.n": rollout.samples,
        "rollout.total_rollout_steps": steps * rollout.prompts,
        "async_training.staleness_threshold": sampling.staleness,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.require_batches": config.optim.minibatches,
        "async_training.partial_rollout": True,
    }


def check_sampling(config: Config, sampling: Samplers) -> None:
    each = recipe.tensor_parallel(config)
    if (sampling.gpus * sampling.nodes) % each or max(each, sampling.gpus) % min(each, sampling.gpus):
        nodes = f" on each of {sampling.nodes} nodes" if sampling.nodes > 1 else ""
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size={each} does not divide {sampling.gpus} GPUs that sample{nodes}: "
            "give other --rollout-gpus"
        )


def left_out(config: Config, method: Method) -> Iterator[str]:
    """What is another thing in this trainer, in words."""
    if config.rollout.old_logp == "auto" and not method.loss.needs_sampler:
        yield "rollout.old_logp=auto: what each token was drawn from, in whichever weights, as verl's sampler noted it"
    if cut := truncated("rollout.", config.rollout.top_p, config.rollout.top_k):
        yield f"{cut}: old is over the tokens kept, the policy over all: the gradient is biased (docs/verl.md)"
    yield "the prompts of a step: the first whose responses end, so that which they are depends on the machine"
    yield "a resume: responses that were not yet trained on are lost, and their prompts with them"
