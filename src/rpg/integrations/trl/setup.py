"""Which algorithm a trainer has; what TRL cannot express is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...console import choose, one_of
from ...loss.advantages import Advantage
from ...loss.clip import Adaptive
from ...loss.methods import Algorithm, Method, algorithm
from ...loss.mismatch import BY_NAME as MISMATCH
from ...loss.mismatch import Mismatch
from ...loss.policy_loss import PolicyLoss
from ...loss.registry import ANCHORS, LONGEST
from ..truncation import truncated, truncation_note
from .config import RPGConfig

CORRECT_NAMES = ("correct", "accuracy_reward")  # what is taken for correctness: a part of rpg's rewards, TRL's own
AlgorithmLike = Algorithm | PolicyLoss | str | None


def algorithm_of(args: RPGConfig, asked: AlgorithmLike) -> Algorithm:
    """The trainer's ``algorithm``, or the config's, which is told its name."""
    chosen = _asked_for(args, asked)
    one_of('loss["reference"]', chosen.reference, ANCHORS)
    if asked is not None and args.algorithm not in (chosen.name, args.named):
        raise ValueError(
            f"RPGConfig has algorithm={args.algorithm!r} and RPGTrainer algorithm={chosen.name!r}: give it once"
        )
    args.algorithm = args.named = chosen.name
    return chosen


def _asked_for(args: RPGConfig, asked: AlgorithmLike) -> Algorithm:
    """Dr.GRPO's constant is max_completion_length unless it is given."""
    if isinstance(asked, (Algorithm, PolicyLoss)):
        if args.loss:
            raise ValueError(
                f"loss={args.loss} are options of a preset's name, but algorithm= is an object: change the object"
            )
        if isinstance(asked, Algorithm):
            return asked
        anchor = "initial" if "ref_logp" in asked.needs else "old"
        return Algorithm("PolicyLoss", asked, Advantage("group-mean"), reference=anchor)
    if asked is not None and not isinstance(asked, str):
        raise TypeError(f"algorithm must be a preset's name, an Algorithm or a PolicyLoss; got {asked!r}")
    name, options = asked or args.algorithm, dict(args.loss or {})  # type: ignore[arg-type]
    if options.get("constant") == LONGEST:
        del options["constant"]
    if isinstance(rule := options.get("mismatch"), str):
        one_of('loss["mismatch"]', rule, MISMATCH)
        options["mismatch"] = MISMATCH[rule]
    try:
        chosen = algorithm(name, **options)
        if chosen.loss.reduction == "constant" and "constant" not in options:
            chosen = algorithm(name, **options, constant=float(args.max_completion_length))
    except (TypeError, AttributeError) as error:  # a value of another type than the option's
        raise ValueError(f"{name} cannot have loss={args.loss}: {error}") from error
    return chosen


def weighed(loss: PolicyLoss, args: RPGConfig) -> PolicyLoss:
    """The loss where the sampler's own log-probabilities are known: ρ = old/sampler, exactly, unless a rule is given.

    TRL's switch for its own weight leaves this one away too.
    """
    if loss.mismatch is not None or not args.vllm_importance_sampling_correction:
        return loss
    return loss.replace(mismatch=Mismatch("sequence" if loss.kl_to_go else None))


def refuse(method: Method, args: RPGConfig, has_sampler_logp: bool) -> None:
    """``has_sampler_logp``: whether the sampler's own log-probabilities come with the responses."""
    loss, name = method.loss, method.name
    if method.only_here:
        raise ValueError(f"{name} cannot run in TRL: {method.only_here}; use rpg train")
    if method.needs_greedy:
        raise ValueError(
            f"{name} cannot run in TRL: its baseline is the reward of a greedy response to each prompt, which TRL does "
            'not sample; use rpg train, or loss={"advantage": "leave-one-out"}'
        )
    if loss.reduction == "none":
        raise ValueError(f'{name}: loss={{"reduction": "none"}} leaves no number to differentiate')
    if method.advantage.per_token and loss.level != "token":
        raise ValueError(f'{name}: an advantage per token needs loss={{"level": "token"}}')
    micro_batches = args.gradient_accumulation_steps * args.world_size
    if micro_batches > 1 and (isinstance(loss.clip, Adaptive) or loss.control_variate):
        what = "control_variate" if loss.control_variate else f"clip {type(loss.clip).__name__}"
        raise ValueError(
            f"{what} is fitted to the whole optimiser step, which here is {micro_batches} micro-batches: it needs "
            "gradient_accumulation_steps=1 and one process"
        )
    if args.record is not None and args.world_size > 1:
        raise ValueError("record needs one process: leave it out, or train on one GPU for the step to be recorded")
    if loss.needs_sampler and not has_sampler_logp:
        raise ValueError(
            f"mismatch={loss.mismatch} needs the sampler's own log-probabilities: use_vllm=True or a rollout_func"
        )
    if method.overlong and not 0 < args.overlong_tokens < args.max_completion_length:
        raise ValueError(
            f"overlong_tokens must be below max_completion_length, {args.max_completion_length}; "
            f"got {args.overlong_tokens} (overlong=False: no penalty)"
        )


def paper(chosen: Algorithm) -> dict[str, str]:
    """Where the method was published, for TRL's model card; nothing where that is not on arXiv."""
    arxiv = re.fullmatch(r"arXiv (\d{4}\.\d{5})", chosen.paper)
    return {"title": chosen.paper, "id": arxiv[1]} if arxiv else {}


def signal_function(args: RPGConfig, names: Sequence[str]) -> int | None:
    """Which of the reward functions tells groups with signal from those without; None: the reward that is their sum."""
    if args.dynamic_by == "reward":
        return None
    if args.dynamic_by == "auto":
        return next((names.index(name) for name in CORRECT_NAMES if name in names), None)
    if args.dynamic_by not in names:
        raise ValueError(choose("dynamic_by", args.dynamic_by, ("auto", "reward", *names)))
    return names.index(args.dynamic_by)


def messages(method: Method, args: RPGConfig, by: str | None = None, has_sampler_logp: bool = False) -> Iterator[str]:
    """What a user should know at the start. ``by``: the reward function that tells groups with signal, if one does."""
    given = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p} | (args.generation_kwargs or {})
    if asked := truncated("", given["top_p"], given["top_k"], given["min_p"]):
        yield truncation_note(asked)
    yield from method.remarks(None)
    if method.dynamic:
        what = "rewards are all equal" if by is None else f"values of {by} are all equal"
        yield (
            f"dynamic sampling: groups whose {what} are dropped from the loss and its denominator, but no others are "
            "sampled in their place (dynamic=False keeps them)"
        )
    elif method.min_signal:
        yield f"{method.name} was published with more sampled where few groups have signal: TRL samples no others"
    if has_sampler_logp and method.loss.mismatch is None:
        yield (
            "each token is weighed by old/sampler, so that the gradient is exact for what it was drawn from: "
            'loss={"mismatch": "tis"} caps the weight'
            if args.vllm_importance_sampling_correction
            else "vllm_importance_sampling_correction=False: the gradient is biased where the sampler's "
            "log-probabilities are not the trainer's"
        )
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if not method.loss.has_ratio and steps > 1:
        yield (
            f"{method.name} has no importance weights: only the first of {steps:g} optimiser steps on a generation is "
            "on-policy (num_iterations=1 and steps_per_generation=gradient_accumulation_steps keep to it)"
        )
    if args.reference_update not in ("auto", "old") and method.anchor == "old":
        yield f"reference_update={args.reference_update} has no effect: {method.name} has no KL term"
