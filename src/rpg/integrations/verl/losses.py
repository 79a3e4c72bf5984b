"""A preset as a policy loss of verl's registry: verl's arguments and denominators in, loss and metrics out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...loss.policy_loss import LossOutput, PolicyLoss
from .settings import ACTOR, AGG_MODES, OPTIONS, PREFIX, Settings, settings

METRICS = "actor/rpg/"
NO_MEAN = ("tokens", "sequences")
GIVEN = "rpg"  # the loss_mode whose settings come with the call

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass
class Extra:
    """What verl's registry does not hand on: the hook leaves it here, and finds the metrics in return."""

    settings: Settings
    ref_logp_BT: Tensor | None = None
    rollout_logp_BT: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0


_extra: ContextVar[Extra | None] = ContextVar("extra", default=None)


@contextmanager
def handing_on(extra: Extra) -> Iterator[None]:
    token = _extra.set(extra)
    try:
        yield
    finally:
        _extra.reset(token)


def policy_loss(preset: str) -> Loss:
    """A function for verl's register_policy_loss."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        extra = _extra.get()
        chosen = settings_of(config, preset) if extra is None else extra.settings
        given = Extra(chosen) if extra is None else extra
        rule = chosen.loss(config.loss_scale_factor)
        check_actor(chosen, config)
        sizes = dict(config.global_batch_info)
        if chosen.needs_whole_step and not _is_whole_step(len(log_prob), sizes):
            raise ValueError(
                f"{type(rule.clip).__name__} fits its bounds to the whole optimiser step: one GPU, and "
                f"{ACTOR}.ppo_micro_batch_size_per_gpu as large as ppo_mini_batch_size × rollout.n"
            )
        check_given(chosen, given, rollout_is_weights)
        out = _weighted(
            rule,
            rollout_is_weights,
            logp=log_prob,
            old_logp=old_log_prob,
            advantages=advantages if rule.level == "token" else _one_each(chosen, advantages, response_mask),
            mask=response_mask,
            ref_logp=given.ref_logp_BT if chosen.reads_reference else None,
            rollout_logp=given.rollout_logp_BT,
            denominator=denominator(rule, sizes),
        )
        found = _numbers(out)
        given.tokens = found["tokens"]
        given.metrics = {METRICS + name: x for name, x in found.items() if name not in NO_MEAN}
        return out.loss, {} if extra is not None else given.metrics

    loss.__name__ = f"rpg_{preset}"
    return loss


def settings_of(config: Any, preset: str | None = None) -> Settings:
    """Of an actor's config: verl's dataclass, or the DictConfig that it is made from."""
    return loss_settings(config.policy_loss, preset)


def loss_settings(chosen: Any, preset: str | None = None) -> Settings:
    """Of its ``policy_loss``; ``preset`` instead of the loss_mode, where it is known."""
    options = _plain(chosen.get("rpg", None))
    if not (options is None or isinstance(options, Mapping)):
        raise ValueError(f"{OPTIONS} is a section, as in +{OPTIONS}.beta=1e-3; got {options!r}")
    return settings(preset or str(chosen.get("loss_mode")), options)


def _plain(options: Any) -> Any:
    """Without OmegaConf's containers."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else options


# ---- what is refused -------------------------------------------------------------------------------------------------


def check_actor(chosen: Settings, config: Any) -> None:
    """Settings of the actor that contradict the preset: before any model is loaded, and again where it runs."""
    reduction = chosen.algorithm.loss.reduction
    own, given = AGG_MODES[reduction], config.loss_agg_mode
    if given not in (own, "token-mean"):  # token-mean is verl's default: who has not set it has not contradicted
        raise ValueError(
            f"{chosen.name} has {ACTOR}.loss_agg_mode={own}; got {given}. "
            f"To change the method: +{OPTIONS}.reduction={_ours(given)}"
        )
    factor = config.loss_scale_factor
    rule = chosen.loss(factor)
    if reduction == "constant" and factor is not None and factor != rule.constant:
        raise ValueError(f"{OPTIONS}.constant={rule.constant} and {ACTOR}.loss_scale_factor={factor} differ: give one")
    if config.use_kl_loss and chosen.has_kl:
        if not chosen.needs_reference:
            raise ValueError(
                f"{chosen.name} has a KL term of its own, anchored at the sampling policy: {ACTOR}.use_kl_loss=False, "
                f"or +{OPTIONS}.reference.update=frozen (every, kl) for the reference that verl holds"
            )
        if config.kl_loss_coef != 0:
            raise ValueError(
                f"{chosen.name} has a KL term of its own: {ACTOR}.kl_loss_coef=0 keeps verl's from being added "
                f"(use_kl_loss=True only makes verl compute the reference); its strength is +{OPTIONS}.beta"
            )


def check_given(chosen: Settings, given: Extra, rollout_is_weights: Tensor | None) -> None:
    if chosen.reads_reference and given.ref_logp_BT is None:
        how = f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0" if chosen.has_kl else "algorithm.use_kl_in_reward=True"
        raise ValueError(f"{chosen.name} needs ref_log_prob, the reference's log-probabilities: set {how}")
    if chosen.needs_sampler and given.rollout_logp_BT is None:
        raise ValueError(
            f"{OPTIONS}.mismatch needs rollout_log_probs, the sampler's own: "
            "set actor_rollout_ref.rollout.calculate_log_probs=True, and no bypass_mode"
        )
    if chosen.algorithm.loss.mismatch is not None and rollout_is_weights is not None:
        raise ValueError(
            f"{OPTIONS}.mismatch and algorithm.rollout_correction.rollout_is correct the same thing twice: give one"
        )


def _ours(mode: str) -> str:
    return next((own for own, theirs in AGG_MODES.items() if theirs == mode), "token-mean")


def _is_whole_step(rows: int, sizes: dict[str, Any]) -> bool:
    return (sizes.get("dp_size") or 1) == 1 and sizes.get("global_batch_size") in (None, rows)


# ---- the arithmetic between the two ----------------------------------------------------------------------------------


def denominator(rule: PolicyLoss, sizes: dict[str, Any]) -> float | None:
    """The optimiser step's total over the ranks whose gradients verl averages, as its agg_loss has it.

    None: verl gave no sizes, and the batch at hand is all there is.
    """
    ranks = sizes.get("dp_size") or 1
    name = "batch_num_tokens" if rule.reduction == "token-mean" else "global_batch_size"
    total = sizes.get(name)
    if total is None:
        if ranks > 1:
            raise ValueError(f"global_batch_info.{name} is needed with dp_size={ranks}")
        return None
    return float(total or 1) * (rule.constant or 1.0) / ranks  # 0: a step of filler alone, whose loss is 0


def _weighted(rule: PolicyLoss, weights_BT: Tensor | None, *, denominator: float | None, **batch: Any) -> LossOutput:
    """The loss; with verl's weights of rollout correction on every token's, or every response's, share of it."""
    if weights_BT is None:
        return rule(denominator=denominator, **batch)
    mask_BT = batch["mask"].bool()
    out = rule.replace(reduction="none", constant=None)(denominator=denominator, **batch)
    if out.loss.dim() == 2:
        weighted = out.loss * weights_BT.detach().to(out.loss.dtype).masked_fill(~mask_BT, 0)
    else:
        weight_B, equal = _per_response(weights_BT, mask_BT)
        if not equal:
            raise ValueError(
                f"level={rule.level} has one loss a response: set algorithm.rollout_correction.rollout_is=sequence"
            )
        weighted = out.loss * weight_B.detach().to(out.loss.dtype)
    return LossOutput(rule.reduce(weighted, mask_BT.sum(-1), denominator), out._diagnose)


def _one_each(chosen: Settings, advantages: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] of verl's [B,T], where a response has one advantage."""
    if advantages.dim() == 1:
        return advantages
    advantage_B, equal = _per_response(advantages, mask_BT.bool())
    if not equal:
        raise ValueError(
            f"{chosen.name} has one advantage a response, and algorithm.adv_estimator gives one a token: "
            f"set it to {PREFIX}{chosen.algorithm.advantage.kind}"
        )
    return advantage_B


def _per_response(x_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, bool]:
    """Each row's value under the mask (0 where there is none), and whether all of a row are that value."""
    first_B1 = mask_BT.int().argmax(-1, keepdim=True)
    value_B = x_BT.gather(-1, first_B1).squeeze(-1).masked_fill(~mask_BT.any(-1), 0)
    apart_BT = (x_BT - value_B.unsqueeze(-1)).abs() > 1e-5 * value_B.abs().unsqueeze(-1)
    return value_B, not bool((apart_BT & mask_BT).any())


def _numbers(out: LossOutput) -> dict[str, float]:
    """The metrics in one transfer from the device."""
    return dict(zip(out.metrics, torch.stack(list(out.metrics.values())).tolist(), strict=True))
