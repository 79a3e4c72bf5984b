"""Which algorithm a trainer has; what TRL cannot express is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...console import one_of
from ...loss.advantages import Advantage
from ...loss.clip import Adaptive, Unweighted
from ...loss.methods import Algorithm, algorithm
from ...loss.mismatch import BY_NAME as MISMATCH
from ...loss.mismatch import SequenceMask
from ...loss.policy_loss import PolicyLoss
from .config import RPGConfig

AlgorithmLike = Algorithm | PolicyLoss | str | None


def resolve(args: RPGConfig, given: AlgorithmLike) -> Algorithm:
    """The trainer's ``algorithm``, or the config's, which is told its name."""
    made = _resolved(args, given)
    if given is not None and args.algorithm not in (made.name, args.named):
        raise ValueError(
            f"RPGConfig has algorithm={args.algorithm!r} and RPGTrainer algorithm={made.name!r}: give it once"
        )
    args.algorithm = args.named = made.name
    return made


def _resolved(args: RPGConfig, given: AlgorithmLike) -> Algorithm:
    """Dr.GRPO's constant is max_completion_length unless it is given."""
    if isinstance(given, (Algorithm, PolicyLoss)):
        if args.loss:
            raise ValueError(
                f"loss={args.loss} are options of a preset's name, but algorithm= is an object: change the object"
            )
        if isinstance(given, Algorithm):
            return given
        anchor = "initial" if "ref_logp" in given.needs else "old"
        return Algorithm("PolicyLoss", given, Advantage("group-mean"), reference=anchor)
    if given is not None and not isinstance(given, str):
        raise TypeError(f"algorithm must be a preset's name, an Algorithm or a PolicyLoss; got {given!r}")
    name, options = given or args.algorithm, dict(args.loss or {})  # type: ignore[arg-type]
    if isinstance(rule := options.get("mismatch"), str):
        one_of('loss["mismatch"]', rule, MISMATCH)
        options["mismatch"] = MISMATCH[rule]
    try:
        made = algorithm(name, **options)
        if made.loss.reduction == "constant" and "constant" not in options:
            made = algorithm(name, **options, constant=float(args.max_completion_length))
    except (TypeError, AttributeError) as error:  # a value of another type than the option's
        raise ValueError(f"{name} cannot have loss={args.loss}: {error}") from error
    one_of('loss["reference"]', made.reference, ("old", "initial"))
    return made


def refuse(made: Algorithm, args: RPGConfig, samples_known: bool) -> None:
    """``samples_known``: whether the sampler's own log-probabilities come with the responses."""
    loss, name = made.loss, made.name
    if made.curvature_gate or "keep" in loss.needs:
        raise ValueError(f"{name} cannot run in TRL: its gate needs logits and the optimiser's moments; use rpg train")
    if made.advantage.kind == "greedy-baseline":
        raise ValueError(
            f"{name} cannot run in TRL: its baseline is the reward of a greedy response to each prompt, which TRL does "
            'not sample; use rpg train, or loss={"advantage": "leave-one-out"}'
        )
    if loss.reduction == "none":
        raise ValueError(f'{name}: loss={{"reduction": "none"}} leaves no number to differentiate')
    if made.advantage.kind == "reward-to-go" and loss.level != "token":
        raise ValueError(f'{name}: an advantage per token needs loss={{"level": "token"}}')
    parts = args.gradient_accumulation_steps * args.world_size
    if parts > 1 and (isinstance(loss.clip, Adaptive) or loss.control_variate):
        what = "control_variate" if loss.control_variate else f"clip {type(loss.clip).__name__}"
        raise ValueError(
            f"{what} is fitted to the whole optimiser step, which here is {parts} micro-batches: it needs "
            "gradient_accumulation_steps=1 and one process"
        )
    if loss.mismatch is not None and not isinstance(loss.mismatch, SequenceMask) and not samples_known:
        raise ValueError(
            f"mismatch={loss.mismatch} needs the sampler's own log-probabilities: use_vllm=True or a rollout_func"
        )
    if overlong(made, args) and not 0 < args.overlong_tokens < args.max_completion_length:
        raise ValueError(
            f"overlong_tokens must be below max_completion_length, {args.max_completion_length}; "
            f"got {args.overlong_tokens} (overlong=False: no penalty)"
        )


def overlong(made: Algorithm, args: RPGConfig) -> bool:
    return bool(made.overlong_penalty if args.overlong is None else args.overlong)


def dynamic(made: Algorithm, args: RPGConfig) -> bool:
    return bool(made.dynamic_sampling if args.dynamic is None else args.dynamic)


def paper(made: Algorithm) -> dict[str, str]:
    """Where the method was published, for TRL's model card; nothing where that is not on arXiv."""
    found = re.fullmatch(r"arXiv (\d{4}\.\d{5})", made.paper)
    return {"title": made.paper, "id": found[1]} if found else {}


def messages(made: Algorithm, args: RPGConfig, rule: str) -> Iterator[str]:
    """What a user should know at the start."""
    if dynamic(made, args):
        yield (
            "dynamic sampling: groups whose rewards are all equal are dropped from the loss and its denominator, but "
            "no others are sampled in their place (dynamic=False keeps them)"
        )
    if args.use_vllm and args.vllm_importance_sampling_correction and made.loss.mismatch is None:
        yield (
            "vllm_importance_sampling_correction only measures here: TRL's weight is not applied; "
            'loss={"mismatch": "tis"} corrects for what differs between vLLM and the trainer'
        )
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if isinstance(made.loss.clip, Unweighted) and made.loss.divergence == "none" and steps > 1:
        yield (
            f"{made.name} has no importance weights: only the first of {steps:g} optimiser steps on a generation is "
            "on-policy (num_iterations=1 and steps_per_generation=gradient_accumulation_steps keep to it)"
        )
    if args.reference_update not in ("auto", "old") and rule == "old":
        yield f"reference_update={args.reference_update} has no effect: {made.name} has no KL term"
