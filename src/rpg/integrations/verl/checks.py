"""The whole run's settings against a preset: refused or remarked upon by the driver, before Ray starts a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from ...console import choose
from ..truncation import truncated, truncation_note
from . import reference
from .losses import GIVEN, TWICE, check_actor
from .settings import ACTOR, AGG_MODES, OPTIONS, PREFIX, Settings

logger = logging.getLogger("rpg.integrations.verl")

SAME = {
    "grpo": "group-mean-std",
    "grpo_vectorized": "group-mean-std",
    "rloo": "leave-one-out",
    "rloo_vectorized": "leave-one-out",
    "remax": "greedy-baseline",
}
MODE = "trainer.v1.trainer_mode"
COLOCATED = f"{MODE}=colocate_async"  # actor and reference in one worker, as in sync
CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults


def check_names(config: Any, losses: Iterable[str], estimators: Iterable[str]) -> None:
    """``loss_mode`` and ``adv_estimator`` against verl's registries, where they are meant to be ours.

    Another name may be registered in a worker alone, by the user's own code.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    foreign = config.actor_rollout_ref.model.get("external_lib", None) is not None
    for setting, name, registered in (
        (f"{ACTOR}.policy_loss.loss_mode", str(loss_mode), set(losses) - {GIVEN}),
        ("algorithm.adv_estimator", str(config.algorithm.adv_estimator), set(estimators)),
    ):
        if name in registered:
            continue
        if PREFIX + name in registered:
            raise ValueError(f"unknown {setting} {name!r}. Did you mean {PREFIX + name!r}?")
        if name.startswith("rpg") or (not foreign and get_close_matches(name, registered)):
            raise ValueError(choose(setting, name, registered))


def refuse_options(policy_loss: Any) -> None:
    """Of a loss that is not ours."""
    if policy_loss.get("rpg", None):
        raise ValueError(f"{OPTIONS} is given, but policy_loss.loss_mode={policy_loss.loss_mode} is no preset of rpg")


def check_run(chosen: Settings, config: Any) -> None:
    """``config``: all of verl's. A ValueError of one line, or lines in the log for what is allowed but seldom meant."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if chosen.method.loss.reduction == "constant" and not chosen.own_constant and actor.loss_scale_factor is None:
        actor.loss_scale_factor = config.data.max_response_length
        logger.warning("%s divides by the longest response, %s", chosen.name, config.data.max_response_length)
    check_actor(chosen, actor)
    _check_kl(chosen, actor, algorithm)
    _check_sampler(chosen, config)
    _check_stale(chosen, config)
    v1 = config.trainer.get("use_v1", True)
    if chosen.method.needs_greedy and v1:
        raise ValueError(
            f"{chosen.name} needs the greedy response's reward, which verl's V1 trainer does not compute: "
            "set trainer.use_v1=False algorithm.adv_estimator=remax"
        )
    if _filter(config).get("enable", False) and not _drops_groups(config):
        raise ValueError(
            "algorithm.filter_groups is ignored by verl's old trainer and by its experimental ones: set enable=False, "
            "or trainer.use_v1=True in verl.trainer.main_ppo"
        )
    if chosen.method.anchor in reference.RULES:
        reference.check(config.actor_rollout_ref)
        if (apart := asynchronous(config)) not in (None, COLOCATED):
            raise ValueError(
                f"{OPTIONS}.reference.update={chosen.method.anchor}: with {apart} an update is a mini-batch, and the "
                "reference may be in another worker: set it to frozen, or trainer_mode to sync"
            )
    for line in remarks(chosen, config):
        logger.warning(line)


def is_experimental(config: Any) -> bool:
    """Whether the settings are those of a trainer in verl.experimental, which has sections of its own."""
    return "async_training" in config or "rollout" in config


def asynchronous(config: Any) -> str | None:
    """What in the settings makes the engine sample with earlier weights than those that are trained, if anything."""
    if is_experimental(config):
        return "async_training" if "async_training" in config else "one_step_off_policy"
    trainer = config.trainer
    mode = (trainer.get("v1", None) or {}).get("trainer_mode", "sync")
    return f"{MODE}={mode}" if trainer.get("use_v1", True) and mode != "sync" else None


def _check_stale(chosen: Settings, config: Any) -> None:
    """What each token was drawn from has to be in the ratio: as old, or beside it with a weight."""
    cause, correction = asynchronous(config), config.algorithm.get("rollout_correction", None) or {}
    if cause is None:
        return
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ValueError(
            f"{cause}: responses come from earlier weights, and nothing says with which probabilities: "
            "set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if chosen.needs_sampler or correction.get("rollout_is", None):
        return
    exact = f"+{OPTIONS}.mismatch=exact"
    if not chosen.method.loss.has_ratio:
        raise ValueError(
            f"{cause}: responses come from earlier weights, and {chosen.name} has no ratio that accounts for it: "
            f"set algorithm.rollout_correction.bypass_mode=False {exact}"
        )
    if not correction.get("bypass_mode", False):
        raise ValueError(
            f"{cause}: responses come from earlier weights than old_log_probs, which biases the gradient: set "
            f"algorithm.rollout_correction.bypass_mode=True (old is what each token was drawn from), or {exact}"
        )


def _drops_groups(config: Any) -> bool:
    return bool(config.trainer.get("use_v1", True)) and not is_experimental(config)


def _check_kl(chosen: Settings, actor: Any, algorithm: Any) -> None:
    in_reward, beta = algorithm.get("use_kl_in_reward", False), chosen.method.advantage.beta
    if chosen.needs_reference and not (actor.use_kl_loss or in_reward):
        raise ValueError(
            f"{chosen.name} needs the reference's log-probabilities: "
            f"set {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0"
        )
    if in_reward and chosen.method.loss.has_kl:
        raise ValueError(f"{chosen.name} has a KL term of its own: set algorithm.use_kl_in_reward=False")
    control = algorithm.kl_ctrl
    if beta and not (
        in_reward and control.type == "fixed" and control.kl_coef == beta and algorithm.kl_penalty == "kl"
    ):
        raise ValueError(
            f"{chosen.name} has its KL in the reward: set algorithm.use_kl_in_reward=True "
            f"algorithm.kl_ctrl.type=fixed algorithm.kl_ctrl.kl_coef={beta} algorithm.kl_penalty=kl"
        )


def _check_sampler(chosen: Settings, config: Any) -> None:
    correction = config.algorithm.get("rollout_correction", None) or {}
    corrects = [name for name in ("rollout_is", "rollout_rs") if correction.get(name, None)]
    if correction.get("bypass_mode", False) and corrects:
        raise ValueError(
            f"algorithm.rollout_correction.{corrects[0]} is ignored by verl in bypass mode: set bypass_mode=False"
        )
    if chosen.needs_sampler and (
        not config.actor_rollout_ref.rollout.calculate_log_probs or correction.get("bypass_mode", False)
    ):
        raise ValueError(
            f"{OPTIONS}.mismatch needs the sampler's log-probabilities and the trainer's: "
            "set actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.bypass_mode=False"
        )
    if chosen.method.loss.mismatch is not None and correction.get("rollout_is", None):
        raise ValueError(TWICE)


def remarks(chosen: Settings, config: Any) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    method, estimator = chosen.method, str(algorithm.adv_estimator)
    mode, sampler = AGG_MODES[method.loss.reduction], config.actor_rollout_ref.rollout
    if asked := truncated("actor_rollout_ref.rollout.", sampler.get("top_p", 1.0), sampler.get("top_k", -1)):
        yield truncation_note(asked)
    if actor.loss_agg_mode != mode:
        yield (
            f"{chosen.name} is reduced by {mode}, as published; {ACTOR}.loss_agg_mode={actor.loss_agg_mode} "
            "concerns only what verl itself adds or reports (entropy)"
        )
    yield from method.remarks(None)
    kind = method.advantage.kind
    group_mean = estimator == "grpo" and not algorithm.get("norm_adv_by_std_in_grpo", True)
    ours = "group-mean" if group_mean else SAME.get(estimator, estimator)
    if ours not in (kind, f"{PREFIX}{kind}", f"{PREFIX}{method.name}"):
        yield f"{chosen.name} was published with algorithm.adv_estimator={PREFIX}{method.name}; got {estimator}"
    for name, default in CLIPS.items():
        if (bound := actor.get(name, default)) != default:
            yield f"{ACTOR}.{name}={bound} has no effect on {chosen.name}: its bounds are +{OPTIONS}.low, .high, .c"
    if method.anchor == "old" and chosen.reference.update not in ("auto", "old"):
        yield f"{chosen.name} has no KL term here: {OPTIONS}.reference.update={chosen.reference.update} has no effect"
    yield from _about_groups(chosen, config)


def _about_groups(chosen: Settings, config: Any) -> Iterator[str]:
    method, groups = chosen.method, _filter(config)
    buffer = (config.get("reward", {}).get("reward_kwargs", None) or {}).get("overlong_buffer_cfg", None)
    penalty = (buffer or {}).get("enable", False)
    if method.dynamic and not _drops_groups(config):
        yield f"{chosen.name} was published with dynamic sampling, which verl has with trainer.use_v1=True only"
    elif method.dynamic and not groups.get("enable", False):
        yield (
            f"{chosen.name} was published with dynamic sampling, which is off: algorithm.filter_groups.enable=True "
            "algorithm.filter_groups.metric=acc (where the reward function gives it, as the reward.py of `rpg export "
            "verl` does; else reward)"
        )
    elif groups.get("enable", False) and groups.get("metric", None) == "reward" and (method.overlong or penalty):
        yield (
            "algorithm.filter_groups.metric=reward keeps groups that differ by their overlong penalty alone; "
            "metric=acc (correctness) and signal (the score) do not (with the reward.py of `rpg export verl`)"
        )
    if method.min_signal and not groups.get("enable", False):
        yield f"{chosen.name} was published with more sampled where few groups have signal: verl has filter_groups"
    if method.overlong and not penalty:
        yield (
            f"{chosen.name} was published with an overlong penalty, which is off: reward.reward_manager.name=dapo "
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True (docs/verl.md)"
        )


def _filter(config: Any) -> Any:
    return config.algorithm.get("filter_groups", None) or {}
