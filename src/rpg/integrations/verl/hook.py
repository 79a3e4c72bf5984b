"""Where the plugin reaches into verl: the actor's loss function, the settings it is made of, and their check.

verl's registry hands a loss neither the reference's log-probabilities nor the sampler's. So ``ppo_loss`` here stands in
front of verl's: for a preset of ours it takes both out of the batch, calls verl's own, and adds the metrics.
"""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import verl.utils.config as verl_config
import verl.utils.device as verl_device
import verl.workers.config as worker_config
from omegaconf import open_dict
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig
from verl.workers.utils import losses as verl_losses

from ...loss.methods import algorithm as get_preset
from . import metrics, record, reference
from .advantages import OPTIONS_KEY
from .checks import check_names, check_run, is_experimental, refuse_options
from .losses import GIVEN, Extra, handing_on, loss_settings, settings_of
from .settings import PREFIX, Settings, wanted

OURS: set[str] = set()  # the loss_modes that are ours; the plugin fills it
DEFINED_IN = ("verl.workers.config.actor", "verl.trainer.config.algorithm")  # what is subclassed here stays there
_verl_ppo_loss = verl_losses.ppo_loss
_verl_validate = verl_config.validate_config
_verl_auto_set_device = verl_device.auto_set_device


@dataclass
class LossConfig(PolicyLossConfig):  # type: ignore[misc]
    """verl's, with the options of a preset: ``+actor_rollout_ref.actor.policy_loss.rpg.beta=1e-3``."""

    rpg: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_mode in OURS:
            chosen = loss_settings(self)
            metrics.install()
            reference.install(chosen)
            if chosen.record is not None:
                record.install()
        else:
            refuse_options(self)


@dataclass
class AdvantageConfig(AlgoConfig):  # type: ignore[misc]
    """verl's, with the options of the preset's advantage: see _hand_on_advantage."""

    rpg_advantage: dict[str, Any] = field(default_factory=dict)


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
    wanted = {"ref_log_prob": chosen.reads_reference, "rollout_log_probs": True}
    names = [name for name, wants in wanted.items() if wants and name in data]
    padded = data.select(*names).to_padded_tensor() if names else {}
    extra = Extra(chosen, padded.get("ref_log_prob", None), padded.get("rollout_log_probs", None))
    with handing_on(extra):
        loss, verl_metrics = _verl_ppo_loss(config, model_output, data, dp_group)
    if chosen.record is not None and loss.requires_grad:
        record.note(chosen, config, data, loss, extra)
    return loss, verl_metrics | metrics.of_micro_batch(extra, data)


@functools.wraps(_verl_validate)
def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
    """Ours first: what verl's instantiates raises its errors in three lines."""
    if _check(config):
        kwargs["use_critic"] = False
    _verl_validate(config, *args, **kwargs)


@functools.wraps(_verl_auto_set_device)
def auto_set_device(config: Any) -> None:
    """What every program of verl's calls first. The experimental trainers check nothing before Ray starts workers."""
    _verl_auto_set_device(config)
    if is_experimental(config):
        _check(config)


def _check(config: Any) -> bool:
    """All of a run's settings, completed and checked. Whether verl's default, a critic, gave way to our advantage."""
    check_names(config, POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY)
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss.loss_mode not in OURS:
        refuse_options(actor.policy_loss)
        return False
    chosen = settings_of(actor)
    taken = _take_advantage(chosen, config)
    check_run(chosen, config)
    _hand_on_advantage(chosen, config.algorithm)
    return taken


def _take_advantage(chosen: Settings, config: Any) -> bool:
    """The preset's own, where verl's default was left: gae, which is for a critic."""
    if str(config.algorithm.adv_estimator) != "gae" or config.critic.enable:
        return False
    config.algorithm.adv_estimator = wanted(chosen)["algorithm.adv_estimator"]
    config.critic.enable = False
    return True


def _hand_on_advantage(chosen: Settings, algorithm: Any) -> None:
    """Options of the preset's advantage to where verl calls estimators: another process, which gets this section."""
    rule, name = chosen.method.advantage, str(algorithm.adv_estimator)
    if name != PREFIX + chosen.method.name or rule == get_preset(chosen.method.name).advantage:
        return
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(rule).items()}
    with open_dict(algorithm):
        algorithm[OPTIONS_KEY] = options


def install() -> None:
    """Put ours in the place of verl's five, also where they were already imported by name."""
    swaps: dict[str, tuple[Any, Any]] = {
        "ppo_loss": (_verl_ppo_loss, ppo_loss),
        "validate_config": (_verl_validate, validate_config),
        "auto_set_device": (_verl_auto_set_device, auto_set_device),
        "PolicyLossConfig": (PolicyLossConfig, LossConfig),
        "AlgoConfig": (AlgoConfig, AdvantageConfig),
    }
    worker_config.PolicyLossConfig, verl_losses.ppo_loss = LossConfig, ppo_loss
    verl_config.validate_config = validate_config
    verl_device.auto_set_device = auto_set_device
    for name, module in list(sys.modules.items()):
        if name.startswith("verl."):
            for attribute, (theirs, ours) in swaps.items():
                if vars(module).get(attribute) is theirs and name not in DEFINED_IN:
                    setattr(module, attribute, ours)
