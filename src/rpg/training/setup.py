"""The parts of a run, made from its settings; a mistake in them is a ValueError of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from ..console import first_line, one_of
from ..costs.devices import host_memory
from ..costs.memory import WAITING_SHARE, Layout
from ..distributed.context import QUIET, RunContext
from ..distributed.ranks import NO_GPU, named_device
from ..loss.advantages import GROUP_KINDS, Advantage
from ..loss.gates import BY_NAME as GATES
from ..loss.methods import Algorithm, Method, algorithm
from ..loss.mismatch import BY_NAME as MISMATCH
from ..loss.mismatch import Mismatch
from ..loss.policy_loss import PolicyLoss
from ..loss.registry import ANCHORS, LONGEST, with_advantage
from ..models import four_bits
from ..models.policy import Policy
from ..rewards.scoring import Part
from ..rollout import Engine, NativeEngine, Sampling
from ..run.config import WHOLE_IN_VLLM, Config, OffPolicyConfig
from ..tasks import ENDLESS, Problem, Scorer, Task, finite, load_task, set_aside, verify_reward
from ..tasks.reward import functions, make_reward, reward_range
from ..tasks.templates import template_text
from .samples.collect import PromptTooLong, encode_prompt, prompt_parts


def make_scorer(config: Config, task: Task) -> Scorer:
    settings = config.task
    _check_template(config)
    reward = make_reward(settings.reward, settings.rewards, task, settings.template, settings.verifier)
    scorer = _scorer(config, reward, settings.workers)
    scorer.start()
    return scorer


def check_rewards(config: Config) -> None:
    """What make_scorer would refuse, as far as it can be known without the task: functions are imported, in a process
    of their own, and never called."""
    settings = config.task
    _check_template(config)
    named = [Part("", name) for name in functions(settings.reward, settings.rewards)]
    with _scorer(config, named, min(1, settings.workers)) as scorer:
        scorer.start()


def _check_template(config: Config) -> None:
    if config.task.template is not None:  # also where no problem takes it
        template_text(config.task.template)


def _scorer(config: Config, reward: Sequence[Part], workers: int) -> Scorer:
    task = config.task
    return Scorer(reward, workers=workers, timeout=task.timeout, on_error=task.on_error, memory_gb=task.memory_gb)


def task_of(config: Config) -> Task:
    """The problems of a run: to train on, and to evaluate on."""
    named = config.task
    task = load_task(named.name, config.seed, named.test, named.prompt_key, named.answer_key)
    return set_aside(task, named.aside) if named.aside else task


# ---- prompts ---------------------------------------------------------------------------------------------------------


def held_out(task: Task, config: Config) -> dict[str, list[Problem]]:
    """The problems to evaluate on, by the name of their set."""
    sets = {name: list(problems[: config.eval.problems]) for name, problems in task.tests.items()}
    empty = [name for name, problems in sets.items() if not problems]
    if empty or not sets:
        which = f"task {config.task.name!r}" if len(sets) < 2 else f"test set {empty[0]!r}"
        raise ValueError(f"{which} has no held-out problems: name some with --task.test")
    return sets


def check_fit(policy: Policy, problems: Sequence[Problem], config: Config) -> int:
    """Prompts and responses have to fit into the model. Gives the length of the longest prompt."""
    longest = max((_length(policy, problem, config) for problem in problems), default=0)
    _check_context(policy, longest, config)
    return longest


def check_train(policy: Policy, task: Task, config: Config, context: RunContext = QUIET) -> int:
    """The problems to train on, as far as they can be looked at; as check_fit, but what is too long is left out.

    A text has at most as many tokens as bytes: where the tokenizer knows every byte, what is shorter in bytes than the
    longest prompt is in tokens need not be looked at.
    """
    if not len(task.train):
        raise ValueError(f"task {config.task.name!r} has no problems to train on")
    problems = task.train
    if len(problems) >= ENDLESS:  # the first, and of a mixture all of the parts that have an end
        problems = list({problem.prompt: problem for problem in [*finite(task.train), *task.train[:64]]}.values())
    sizes = [(_bytes(problem, config), i) for i, problem in enumerate(problems)]
    wrapping = len(policy.encode("", config.task.chat, options=config.task.chat_options)) + 16
    bounded = _knows_every_byte(policy)
    longest, too_long = 0, []
    for size, i in sorted(sizes, reverse=True):
        if bounded and size + wrapping <= longest:
            break
        try:
            longest = max(longest, _length(policy, problems[i], config))
        except PromptTooLong as error:
            too_long.append(error)
    if len(too_long) == len(problems):
        raise too_long[0]
    if too_long:
        context.warn(
            f"{len(too_long)} of {len(problems)} prompts are left out: "
            f"they have more than rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} tokens"
        )
    _check_context(policy, longest, config)
    return longest


def _length(policy: Policy, problem: Problem, config: Config) -> int:
    ids = encode_prompt(policy, problem, config)
    if policy.unknown_ids.intersection(ids):
        raise ValueError(f"the model's tokenizer does not know all characters of the prompt {problem.prompt[:60]!r}")
    return len(ids)


def _knows_every_byte(policy: Policy) -> bool:
    try:
        ids = policy.encode("\u0378\U000e0123", chat=False)  # characters in no vocabulary but as bytes
    except Exception:  # of tokenizers: one that knows neither the characters nor a token for the unknown
        return False
    return len(ids) > 1 and not policy.unknown_ids.intersection(ids)


def _bytes(problem: Problem, config: Config) -> int:
    text, _, system = prompt_parts(problem, config)
    return len(text.encode("utf-8", "surrogatepass")) + len((system or "").encode("utf-8", "surrogatepass"))


def _check_context(policy: Policy, longest: int, config: Config) -> None:
    new, context = config.rollout.max_new_tokens, policy.context
    if context is not None and longest + new > context:
        raise ValueError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={new} do not fit into the {context} of the "
            f"model: give --rollout.max_new_tokens {max(1, context - longest)} or less"
        )


# ---- method ----------------------------------------------------------------------------------------------------------


def method_of(config: Config) -> Method:
    """The run's algorithm, with its own choices around it: decided here, once."""
    rollout = config.rollout
    chosen = corrected(algorithm_of(config), config)
    if chosen.reference == "teacher" and config.reference.model is None:
        raise ValueError(
            f"{chosen.name} learns from a teacher: name it with --reference.model, a folder, hub id or run"
        )
    if chosen.curvature_gate and config.optim.name != "adamw":
        raise ValueError(f"{chosen.name} needs optim.name=adamw: its gate reads AdamW's second moments")
    return chosen.resolve(
        rollout.dynamic,
        rollout.overlong,
        config.reference.rule,
        min_signal=rollout.min_signal,
        rewards=rewards_of(config),
    )


def corrected(chosen: Algorithm, config: Config) -> Algorithm:
    """What a rounded cache draws is another policy's, the engine's μ: old, recomputed, is the whole model's. So it is
    where samples are of earlier policies, and old is recomputed or the loss has no ratio to it.

    So each sample's loss has the exact weight ρ = old/μ, at the loss's level, and the expected gradient is exact
    again. ``loss.mismatch`` decides otherwise where it is given (none: leave it off), and so does a method
    that has a rule. A KL reward-to-go looks beyond its token: there the weight is the response's.
    """
    if not sampler_of(config, chosen.loss) or "mismatch" in config.loss or chosen.loss.mismatch is not None:
        return chosen
    exact = Mismatch("sequence" if chosen.loss.kl_to_go else None)
    return replace(chosen, loss=chosen.loss.replace(mismatch=exact))


def sampler_of(config: Config, loss: PolicyLoss) -> str:
    """Of which policy samples are, where old is always recomputed and is another one; else empty."""
    rollout = config.rollout
    if rollout.cache_dtype != "auto":
        return f"rollout.cache_dtype {rollout.cache_dtype}: samples are of the policy with a rounded cache"
    if config.stale and rollout.old_logp == "recompute":
        return "rollout.old_logp recompute: samples are of earlier policies than old"
    if config.stale and not loss.has_ratio:
        return "no ratio to old is in the loss, and samples are of earlier policies"
    return ""


def about_sampler(method: Method, config: Config) -> Iterator[str]:
    """What is done about samples of another policy than old, where the run did not say it."""
    rule, drawn = method.loss.mismatch, sampler_of(config, method.loss)
    if not drawn:
        return
    if rule is None or not method.loss.needs_sampler:
        yield f"{drawn}, and no weight corrects for it (loss.mismatch {config.loss.get('mismatch', 'none')})"
    elif "mismatch" not in config.loss:
        each = "token" if rule.level_for(method.loss.level) == "token" else "response"
        yield f"{drawn}, so each {each} has the exact weight ρ = old/engine (--loss.mismatch none leaves it off)"


def rewards_of(config: Config) -> tuple[float, float] | None:
    """Where the rewards lie, if that is known."""
    return reward_range(config.task.name, config.task.reward, config.task.rewards)


def anchored(config: Config, method: Method) -> Config:
    """The settings with the method's own moving average spelt out, which takes more memory than they say."""
    if method.anchor != "ema":
        return config
    return replace(config, reference=replace(config.reference, update="ema"))


def algorithm_of(config: Config) -> Algorithm:
    """The preset with the run's options; Dr.GRPO's constant is the run's own longest response unless it is given."""
    options = {name: value for name, value in config.loss.items() if (name, value) != ("constant", LONGEST)}
    for option, rules in (("mismatch", MISMATCH), ("gate", GATES)):
        if isinstance(rule := options.get(option), str):
            one_of(f"loss.{option}", rule, ("none", *rules))
            options[option] = rules.get(rule)
    try:
        published = algorithm(config.algorithm).advantage
        with _naming("loss.advantage.", {f.name for f in fields(Advantage)}):
            made = with_advantage(options, published)
        with _naming("loss.", {*made, *(f.name for f in fields(PolicyLoss))}):
            chosen = algorithm(config.algorithm, **made)
            if chosen.loss.reduction == "constant" and "constant" not in made:
                chosen = algorithm(config.algorithm, **made, constant=float(config.rollout.max_new_tokens))
        one_of("loss.reference", chosen.reference, ANCHORS)
        _try_out(chosen, config.rollout.prompts, config.rollout.samples)
    except (TypeError, AttributeError, RuntimeError) as error:  # a value of another type than the option's
        asked = ", ".join(f"loss.{key}={value!r}" for key, value in options.items())
        raise ValueError(f"{config.algorithm} cannot have {asked}: {error}") from error
    return chosen


@contextmanager
def _naming(section: str, names: Iterable[str]) -> Iterator[None]:
    """A mistake in an option is told of the setting: ``beta must be …`` of loss.beta, or of loss.advantage.beta."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        option = re.match(r"(?:unknown |give )?(\w+)(?![\w.-])", text)
        if option is None or option[1] not in names:
            raise
        at = option.start(1)
        raise ValueError(f"{text[:at]}{section}{text[at:]}") from error


def _try_out(chosen: Algorithm, prompts: int, samples: int) -> None:
    """Two groups of two tokens, so that a combination which cannot be trained is known before anything is sampled."""
    if samples < 2 and chosen.advantage.kind in (*GROUP_KINDS, "optimal-token"):
        raise ValueError(f"{chosen.name} compares the responses to a prompt: rollout.samples must be at least 2")
    if prompts * samples < 2 and (chosen.advantage.whitens or chosen.advantage.kind == "batch-mean"):
        raise ValueError(f"{chosen.name} compares the responses of a step: it needs at least 2")
    if chosen.loss.reduction == "none":
        raise ValueError("loss.reduction=none leaves no number to differentiate")
    if chosen.curvature_gate and chosen.loss.level != "token":
        raise ValueError("the curvature gate works on tokens: loss.level must be token")
    if "keep" in chosen.loss.needs and not chosen.curvature_gate:
        raise ValueError("loss.needs=keep goes with the curvature gate of capo")
    group = torch.arange(2).repeat_interleave(samples)
    logp = torch.full((2 * samples, 2), -1.0, requires_grad=True)
    mask, old = torch.ones(2 * samples, 2, dtype=torch.bool), logp.detach()
    rewards = (torch.arange(2 * samples) % 2).float()
    known = {"mask": mask, "old_logp": old, "ref_logp": old, "greedy_rewards": rewards, "score_sq": old.exp()}
    advantage = chosen.advantage(rewards, group, **known)
    keep = mask if chosen.curvature_gate else None
    chosen.loss(logp, old, advantage, mask, old, old, keep=keep, groups=group, entropy=-logp)


def check_rollout(config: Config) -> None:
    """Truncated sampling is trained on over the tokens kept, which the engine has to tell."""
    rollout = config.rollout
    whole = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p).whole
    if rollout.engine == "vllm" and not whole:
        from ..rollout.vllm import check_kept

        check_kept(rollout.top_k)


def check_ahead(config: Config, method: Method, ranks: int) -> None:
    """What sampling that runs ahead cannot do."""
    if not config.rollout.ahead:
        return
    for cannot, why in (
        (ranks > 1, "rollout.ahead does not run under torchrun yet: take 0"),
        (
            method.needs_greedy,
            f"rollout.ahead must be 0 with {method.name}, which needs a greedy response to each prompt",
        ),
        (
            method.min_signal > 0 and not method.dynamic,
            f"rollout.ahead must be 0 with {method.name}, or give --rollout.min_signal 0: it samples more where too "
            "few groups have a signal",
        ),
    ):
        if cannot:
            raise ValueError(why)


def check_base(policy: Policy, ranks: int, engine: str) -> None:
    """What weights in 4 bits cannot do, which an adapter's folder may bring along without a setting."""
    if four_bits.layers(policy.model):
        if ranks > 1:
            raise ValueError("weights in 4 bits (peft.base_bits) do not run under torchrun yet: take one process")
        if engine == "vllm":
            raise ValueError(WHOLE_IN_VLLM)


def warnings_about(method: Method, config: Config) -> Iterator[str]:
    """What is allowed, but seldom meant."""
    optim, loss = config.optim, method.loss
    steps = optim.minibatches * optim.epochs
    if not loss.has_ratio and steps > 1:
        yield (
            f"{method.name} has no importance weights: only the first of {steps} optimiser steps on a batch is "
            f"{'unbiased' if config.stale else 'on-policy'} (optim.minibatches=1 optim.epochs=1 keeps to it)"
        )
    if method.advantage.beta > 0 and method.anchor == "old":
        yield f"{method.name}: the KL in the reward is 0, as reference.update=old is the sampling policy itself"
    if config.reference.model is not None and not method.has_kl:
        yield f"reference.model={config.reference.model} has no effect: {method.name} has no KL term"
    if config.reference.update != "auto" and not method.has_kl:
        yield f"reference.update={config.reference.update} has no effect: {method.name} has no KL term"
    if config.reference.count != "iterations" and method.anchor not in ("every", "kl"):
        yield (
            f"reference.count={config.reference.count} has no effect: the KL's anchor is {method.anchor}, "
            "and every and kl alone count (reference.update)"
        )
    if loss.gate is not None and loss.gate.role == "kl" and not loss.has_kl:
        yield f"loss.gate={type(loss.gate).__name__} has no effect: {method.name} has no KL term in its loss"
    yield from _about_sampling(method, config)


def _about_sampling(method: Method, config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_signal is not None and method.dynamic:
        yield (
            f"rollout.min_signal={rollout.min_signal:g} has no effect: dynamic sampling keeps no group without signal "
            "(rollout.dynamic=false)"
        )
    if rollout.dynamic_by != "auto" and not method.dynamic and not method.min_signal:
        yield (
            f"rollout.dynamic_by={rollout.dynamic_by} has no effect: no group is sampled again "
            "(rollout.dynamic=true, or rollout.min_signal)"
        )
    yield from _about_staleness(config)
    for name in ("top_k", "min_p"):
        if getattr(rollout, name) == 1:
            yield (
                f"rollout.{name}=1 always takes the most probable token: all responses to a prompt are the same, "
                "and there is nothing to learn from"
            )


def _about_staleness(config: Config) -> Iterator[str]:
    offpolicy = config.offpolicy
    if config.rollout.cache == "kept" and not config.rollout.ahead:
        yield "rollout.cache=kept has no effect: no response is under way when the weights change (rollout.ahead)"
    if offpolicy.max_age != OffPolicyConfig.max_age and offpolicy.reuse == 1:
        yield f"offpolicy.max_age={offpolicy.max_age} has no effect: no group serves again (offpolicy.reuse)"
    for name, off in (("min_ess", 0.0), ("max_kl", None)):
        if (value := getattr(offpolicy, name)) != off and not config.stale:
            yield (
                f"offpolicy.{name}={value:g} has no effect: all samples are of the policy as it is "
                "(rollout.ahead, offpolicy.reuse)"
            )


def unasked(task: Task, config: Config) -> Iterator[str]:
    """Answers are read in a few forms, which a prompt should ask for."""
    settings = config.task
    if settings.template is not None or settings.reward is not None or task.reward is not verify_reward:
        return
    first = task.train[:256]
    plain = sum(problem.template == "plain" for problem in first)
    if plain > len(first) / 2:
        yield (
            f"{task.name}: its prompts do not say how to answer, and only \\boxed{{…}}, #### … and answer … are read: "
            "--task.template boxed asks for it"
        )


# ---- engine, device --------------------------------------------------------------------------------------------------


def make_engine(policy: Policy, config: Config, layout: Layout, context: RunContext = QUIET) -> Engine:
    """As many sequences are sampled at the same time as ``layout`` says, on every rank."""
    rollout, ends, slots = config.rollout, policy.end_ids(config.rollout.end_tokens), layout.slots
    if rollout.engine == "native":
        if rollout.vllm:
            context.warn(f"rollout.vllm.{next(iter(rollout.vllm))} has no effect: rollout.engine is native")
        cache: dict[str, Any] = {} if layout.cache_tokens is None else {"cache_tokens": layout.cache_tokens}
        if rollout.cache_dtype == "fp8":
            cache["cache_dtype"] = torch.float8_e4m3fn
        cache["host_bytes"] = int(WAITING_SHARE * host_memory() / context.world.size)
        return NativeEngine(policy.model, policy.tokenizer, slots, context.warn, end_ids=ends, **cache)
    if context.world.sharded:
        raise ValueError("rollout.engine=vllm does not run under torchrun: take native, or see docs/engines.md")
    from ..rollout.vllm import VllmEngine

    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if policy.context is not None:
        longest = min(longest, policy.context)
    return VllmEngine(policy.model, ends, longest, slots, rollout.vllm)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        devices = (torch.device(kind) for kind, is_there in there.items() if is_there)
        return next(filter(has_float64, devices), torch.device("cpu"))
    device = named_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(NO_GPU.format(name))
    try:
        torch.empty(1, device=device).item()  # which a device without memory (meta) refuses
    except NotImplementedError as error:  # of a backend that is not there a paragraph
        raise ValueError(NO_GPU.format(name)) from error
    except Exception as error:  # each backend has its own kinds
        raise ValueError(f"device {name!r} is not to be had: {first_line(error)}") from error
    if not has_float64(device):
        raise ValueError(f"device {name!r} has no float64, in which tokens are drawn: --device cpu runs without")
    return device


def has_float64(device: torch.device) -> bool:
    """Apple's GPUs (mps) do not: the engine could not draw a token."""
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
