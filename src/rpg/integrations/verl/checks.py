"""The whole run's settings against a preset: refused or remarked upon by the driver, before Ray starts a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from . import reference
from .losses import check_actor
from .settings import ACTOR, AGG_MODES, OPTIONS, PREFIX, Settings

logger = logging.getLogger("rpg.integrations.verl")

SAME = {
    "grpo": "group-mean-std",
    "grpo_vectorized": "group-mean-std",
    "rloo": "leave-one-out",
    "remax": "greedy-baseline",
}
SAME |= {"rloo_vectorized": "leave-one-out"}


def check_run(chosen: Settings, config: Any) -> None:
    """``config``: all of verl's. A ValueError of one line, or lines in the log for what is allowed but seldom meant."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    check_actor(chosen, actor)
    _check_kl(chosen, actor, algorithm)
    _check_sampler(chosen, config)
    if chosen.algorithm.advantage.kind == "greedy-baseline" and config.trainer.get("use_v1", True):
        raise ValueError(
            f"{chosen.name} needs the greedy response's reward, which verl's V1 trainer does not compute: "
            "set trainer.use_v1=False algorithm.adv_estimator=remax"
        )
    if chosen.anchor in reference.RULES:
        reference.check(config.actor_rollout_ref)
    for line in remarks(chosen, config):
        logger.warning(line)


def _check_kl(chosen: Settings, actor: Any, algorithm: Any) -> None:
    in_reward, beta = algorithm.get("use_kl_in_reward", False), chosen.algorithm.advantage.beta
    if chosen.needs_reference and not (actor.use_kl_loss or in_reward):
        raise ValueError(
            f"{chosen.name} needs the reference's log-probabilities: "
            f"set {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0"
        )
    if in_reward and chosen.has_kl:
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
    if chosen.needs_sampler and (
        not config.actor_rollout_ref.rollout.calculate_log_probs or correction.get("bypass_mode", False)
    ):
        raise ValueError(
            f"{OPTIONS}.mismatch needs the sampler's log-probabilities and the trainer's: "
            "set actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.bypass_mode=False"
        )
    if chosen.algorithm.loss.mismatch is not None and correction.get("rollout_is", None):
        raise ValueError(
            f"{OPTIONS}.mismatch and algorithm.rollout_correction.rollout_is correct the same thing twice: give one"
        )


def remarks(chosen: Settings, config: Any) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    method, estimator = chosen.algorithm, str(algorithm.adv_estimator)
    own = AGG_MODES[method.loss.reduction]
    if actor.loss_agg_mode != own:
        yield (
            f"{chosen.name} is reduced by {own}, as published; {ACTOR}.loss_agg_mode={actor.loss_agg_mode} "
            "concerns only what verl itself adds or reports (entropy)"
        )
    kind = method.advantage.kind
    group_mean = estimator == "grpo" and not algorithm.get("norm_adv_by_std_in_grpo", True)
    found = "group-mean" if group_mean else SAME.get(estimator, estimator)
    if found not in (kind, f"{PREFIX}{kind}", f"{PREFIX}{method.name}"):
        yield f"{chosen.name} was published with algorithm.adv_estimator={PREFIX}{method.name}; got {estimator}"
    if method.dynamic_sampling and not (algorithm.get("filter_groups", None) or {}).get("enable", False):
        yield (
            f"{chosen.name} was published with dynamic sampling, which is off: "
            "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward"
        )
    buffer = (config.get("reward", {}).get("reward_kwargs", None) or {}).get("overlong_buffer_cfg", None)
    if method.overlong_penalty and not (buffer or {}).get("enable", False):
        yield (
            f"{chosen.name} was published with an overlong penalty, which is off: reward.reward_manager.name=dapo "
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True (docs/verl.md)"
        )
