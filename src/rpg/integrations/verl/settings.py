"""A preset as verl's settings name it: which algorithm, which options, what it needs of the run. Does without verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import torch

from ...console import choose, one_of
from ...loss.methods import Algorithm, Method, algorithm, algorithms
from ...loss.mismatch import BY_NAME as MISMATCH
from ...loss.policy_loss import PolicyLoss
from ...loss.registry import ANCHORS, LONGEST
from ...run.config import ReferenceConfig

PREFIX = "rpg:"
ACTOR = "actor_rollout_ref.actor"
OPTIONS = f"{ACTOR}.policy_loss.rpg"
AGG_MODES = {  # our reductions in verl's words
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}

NUMBERS: dict[str, tuple[str, Any, Callable[[Any], bool]]] = {  # of ``reference``, as in a recipe
    "every": ("a whole number of at least 1", int, lambda x: x >= 1),
    "kl": ("a positive number", (int, float), lambda x: 0 < x < float("inf")),
    "smoothing": ("at least 0 and below 1", (int, float), lambda x: 0 <= x < 1),
    "decay": ("at least 0 and below 1", (int, float), lambda x: 0 <= x < 1),
}


@dataclass(frozen=True)
class Settings:
    """What runs: the method, and how the KL's anchor is renewed."""

    method: Method
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    own_constant: bool = False  # whether ``constant`` was given, so that verl's loss_scale_factor is not asked for it
    record: str | None = None  # file to write the batch of one optimiser step to, for rpg replay
    record_step: int = 1  # which one, counted from 1 in each worker's process

    @property
    def name(self) -> str:
        return self.method.name or "this loss"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for the reference's log-probabilities; a KL in the reward is verl's to compute."""
        return self.method.loss.has_kl and self.method.anchor != "old"

    @property
    def reads_reference(self) -> bool:
        """Also where only the rule asks for the KL to it: update=kl of a method with its KL in the reward."""
        return self.needs_reference or self.method.anchor == "kl"

    @property
    def needs_sampler(self) -> bool:
        return self.method.loss.needs_sampler

    def loss(self, loss_scale_factor: float | None) -> PolicyLoss:
        """The loss, Dr.GRPO's constant being verl's ``loss_scale_factor`` unless it is an option of the preset."""
        rule = self.method.loss
        if rule.reduction != "constant" or self.own_constant:
            return rule
        if loss_scale_factor is None:
            raise ValueError(
                f"{self.name} divides by a constant: set {ACTOR}.loss_scale_factor to data.max_response_length"
            )
        return rule.replace(constant=float(loss_scale_factor))


def wanted(chosen: Settings) -> dict[str, object]:
    """verl's settings for a preset as published, by their full names; the preset's options are not among them."""
    method = chosen.method
    out: dict[str, object] = {
        f"{ACTOR}.policy_loss.loss_mode": PREFIX + method.name,
        f"{ACTOR}.loss_agg_mode": AGG_MODES[method.loss.reduction],
        "algorithm.adv_estimator": "remax" if method.needs_greedy else PREFIX + method.name,
    }
    if method.needs_greedy:
        out["trainer.use_v1"] = False  # the only trainer of verl's that samples a greedy response
    if chosen.needs_reference:
        out |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0}
    if method.advantage.beta:
        out |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl"}
        out |= {"algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": method.advantage.beta}
    if chosen.needs_sampler:
        out["actor_rollout_ref.rollout.calculate_log_probs"] = True
    if method.dynamic:
        out |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    return out


def names() -> dict[str, str]:
    """loss_mode -> preset: every preset by its own name and with the prefix."""
    return {name: name for name in algorithms()} | {PREFIX + name: name for name in algorithms()}


def settings(chosen: str | Algorithm, options: Mapping[str, Any] | None = None) -> Settings:
    """Of a preset (with or without ``rpg:``) and its options, ``policy_loss.rpg``. What verl cannot have is refused."""
    options = dict(options or {})
    if not isinstance(chosen, str):
        return _checked(chosen, options)
    try:
        key = json.dumps(options, sort_keys=True)
    except TypeError:  # rules of rpg.clip and rpg.mismatch, given in Python
        return _checked(chosen.removeprefix(PREFIX), options)
    return _cached(chosen.removeprefix(PREFIX), key)


@lru_cache(maxsize=64)
def _cached(name: str, options: str) -> Settings:
    return _checked(name, json.loads(options))


def _checked(chosen: str | Algorithm, options: dict[str, Any]) -> Settings:
    record, record_step = options.pop("record", None), options.pop("record_step", 1)
    if not (record is None or isinstance(record, str)) or not isinstance(record_step, int) or record_step < 1:
        raise ValueError(f"{OPTIONS}.record is a file, and record_step a number from 1; got {record!r}, {record_step}")
    section = options.get("reference")
    reference = _reference(options.pop("reference")) if isinstance(section, Mapping) else ReferenceConfig()
    if isinstance(rule := options.get("mismatch"), str):
        one_of(f"{OPTIONS}.mismatch", rule, MISMATCH)
        options["mismatch"] = MISMATCH[rule]
    try:
        if isinstance(chosen, str):
            if options.get("constant") == LONGEST:  # loss_scale_factor says which
                del options["constant"]
            chosen = algorithm(chosen, **options)
        elif options:
            raise ValueError(f"options go with a preset's name; got an Algorithm and {', '.join(options)}")
        one_of(f"{OPTIONS}.reference", chosen.reference, ANCHORS)
        method, own_constant = chosen.resolve(update=reference.update), "constant" in options
        resolved = Settings(method, reference, own_constant, record, record_step)
        _refuse(resolved)
        _try_out(resolved.method.loss)
    except (TypeError, AttributeError, RuntimeError) as error:  # a value of another type than the option's
        text = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"{OPTIONS}: {chosen} cannot have {text}: {error}") from error
    return resolved


def _reference(section: Mapping[str, Any]) -> ReferenceConfig:
    keys = {f.name for f in fields(ReferenceConfig)}
    for key, value in section.items():
        if key not in keys:
            raise ValueError(choose(f"option {OPTIONS}.reference", str(key), keys))
        if key in NUMBERS:
            what, types, fits = NUMBERS[key]
            if isinstance(value, bool) or not isinstance(value, types) or not fits(value):
                raise ValueError(f"{OPTIONS}.reference.{key} must be {what}; got {value!r}")
    config = ReferenceConfig(**section)
    for name in ("update", "count"):
        one_of(f"{OPTIONS}.reference.{name}", getattr(config, name), get_args(get_type_hints(ReferenceConfig)[name]))
    return config


def _refuse(chosen: Settings) -> None:
    """What the engine cannot express, by name."""
    method, loss = chosen.method, chosen.method.loss
    if method.only_here:
        raise ValueError(f"{chosen.name} cannot run inside verl: {method.only_here}")
    if loss.control_variate:
        raise ValueError("control_variate cannot run inside verl: it needs each response's prompt, which losses lack")
    if method.anchor == "ema":
        raise ValueError(f"{OPTIONS}.reference.update=ema cannot be had inside verl: every, kl, frozen or old")
    if chosen.reference.model is not None:
        raise ValueError(f"{OPTIONS}.reference.model: a teacher cannot be had inside verl; use rpg train")
    if loss.reduction == "none":
        raise ValueError(f"{OPTIONS}.reduction=none leaves no number to differentiate")
    if method.anchor == "old" and "ref_logp" in loss.needs and loss.has_kl:
        raise ValueError(f"{OPTIONS}.reference.update=old: {chosen.name} is another method without its reference")


def _try_out(loss: PolicyLoss) -> None:
    """On two tokens, so that a combination which cannot be trained is known before a model is loaded."""
    logp = torch.full((2, 2), -1.0, requires_grad=True)
    old, mask = logp.detach(), torch.ones(2, 2, dtype=torch.bool)
    loss(logp, old, torch.tensor([1.0, -1.0]), mask, ref_logp=old, rollout_logp=old)
