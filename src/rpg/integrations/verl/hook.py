"""Where the plugin reaches into verl: the actor's loss function, the settings it is made of, and their check.

verl's registry hands a loss neither the reference's log-probabilities nor the sampler's. So ``ppo_loss`` here stands in
front of verl's: for a preset of ours it takes both out of the batch, calls verl's own, and adds the metrics.
"""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import verl.utils.config as verl_config
import verl.workers.config as worker_config
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import PolicyLossConfig
from verl.workers.utils import losses as verl_losses

from . import reference
from .checks import check_run
from .losses import GIVEN, Extra, handing_on, loss_settings, settings_of
from .settings import OPTIONS, Settings

OURS: set[str] = set()  # the loss_modes that are ours; the plugin fills it
_verl_ppo_loss = verl_losses.ppo_loss
_verl_validate = verl_config.validate_config


@dataclass
class LossConfig(PolicyLossConfig):  # type: ignore[misc]
    """verl's, with the options of a preset: ``+actor_rollout_ref.actor.policy_loss.rpg.beta=1e-3``."""

    rpg: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_mode in OURS:
            reference.install(loss_settings(self))
        elif self.rpg:
            raise ValueError(f"{OPTIONS} is given, but policy_loss.loss_mode={self.loss_mode} is no preset of rpg")


def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """verl's actor loss, or ours where ``loss_mode`` names a preset."""
    if config.policy_loss.get("loss_mode") not in OURS:
        return _verl_ppo_loss(config, model_output, data, dp_group)  # type: ignore[no-any-return]
    return _through_verl(settings_of(config), config, model_output, data, dp_group)


@dataclass(frozen=True)
class LossFn:
    """The same for ``set_loss_fn``, whatever the config's ``loss_mode`` says. It can be sent to workers."""

    settings: Settings

    def __call__(
        self, config: Any, model_output: Any, data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        config = copy.copy(config)
        object.__setattr__(config, "policy_loss", PolicyLossConfig(loss_mode=GIVEN))
        return _through_verl(self.settings, config, model_output, data, dp_group)


def _through_verl(
    chosen: Settings, config: Any, model_output: Any, data: Any, dp_group: Any
) -> tuple[Tensor, dict[str, Any]]:
    wanted = {"ref_log_prob": chosen.needs_reference, "rollout_log_probs": True}
    found = [name for name, wants in wanted.items() if wants and name in data]
    padded = data.select(*found).to_padded_tensor() if found else {}
    extra = Extra(chosen, padded.get("ref_log_prob", None), padded.get("rollout_log_probs", None))
    share_of = data["batch_num_tokens"] or 1
    with handing_on(extra):
        loss, metrics = _verl_ppo_loss(config, model_output, data, dp_group)
    share = extra.tokens * data["dp_size"] / share_of if data["batch_num_tokens"] else 1.0
    return loss, metrics | {name: _metric(name, value, share) for name, value in extra.metrics.items()}


def _metric(name: str, value: float, share: float) -> Any:
    """verl adds up the micro-batches and averages over ranks: weighted by tokens, that is the mini-batch's mean."""
    if "max" in name.rpartition("/")[2]:
        return Metric(value=value, aggregation=AggregationType.MAX)
    return Metric(value=value * share if share else 0.0, aggregation=AggregationType.SUM)


@functools.wraps(_verl_validate)
def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
    _verl_validate(config, *args, **kwargs)
    if config.actor_rollout_ref.actor.policy_loss.loss_mode in OURS:
        check_run(settings_of(config.actor_rollout_ref.actor), config)


def install() -> None:
    """Put ours in the place of verl's three, also where they were already imported by name."""
    swaps: dict[str, tuple[Any, Any]] = {
        "ppo_loss": (_verl_ppo_loss, ppo_loss),
        "validate_config": (_verl_validate, validate_config),
        "PolicyLossConfig": (PolicyLossConfig, LossConfig),
    }
    worker_config.PolicyLossConfig, verl_losses.ppo_loss = LossConfig, ppo_loss
    verl_config.validate_config = validate_config
    for name, module in list(sys.modules.items()):
        if name.startswith("verl."):
            for attribute, (theirs, ours) in swaps.items():
                if vars(module).get(attribute) is theirs and name != "verl.workers.config.actor":
                    setattr(module, attribute, ours)
