"""A preset as verl's settings name it: which algorithm, which options, what it needs of the run. Does without verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import torch

from ...console import choose, one_of
from ...loss.clip import Adaptive
from ...loss.methods import Algorithm, algorithm, algorithms
from ...loss.mismatch import BY_NAME as MISMATCH
from ...loss.mismatch import SequenceMask
from ...loss.policy_loss import PolicyLoss
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
    """What runs: the algorithm, and how the KL's anchor is renewed."""

    algorithm: Algorithm
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    own_constant: bool = False  # whether ``constant`` was given, so that verl's loss_scale_factor is not asked for it

    @property
    def name(self) -> str:
        return self.algorithm.name or "this loss"

    @property
    def has_kl(self) -> bool:
        """In the loss; a KL in the reward is verl's to compute."""
        return self.algorithm.loss.divergence != "none" and self.algorithm.loss.beta > 0

    @property
    def anchor(self) -> str:
        """old, frozen, every or kl, as ``reference.update`` has it."""
        if not self.has_kl and not self.algorithm.advantage.beta:
            return "old"
        if self.reference.update != "auto":
            return self.reference.update
        return "old" if self.algorithm.reference == "old" else "frozen"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for the reference's log-probabilities."""
        return self.has_kl and self.anchor != "old"

    @property
    def reads_reference(self) -> bool:
        """Also where only the rule asks for the KL to it: update=kl of a method with its KL in the reward."""
        return self.needs_reference or self.anchor == "kl"

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss asks for the sampler's own log-probabilities."""
        rule = self.algorithm.loss.mismatch
        return rule is not None and not isinstance(rule, SequenceMask)

    @property
    def needs_whole_step(self) -> bool:
        return isinstance(self.algorithm.loss.clip, Adaptive)

    def loss(self, loss_scale_factor: float | None) -> PolicyLoss:
        """The loss, Dr.GRPO's constant being verl's ``loss_scale_factor`` unless it is an option of the preset."""
        rule = self.algorithm.loss
        if rule.reduction != "constant" or self.own_constant:
            return rule
        if loss_scale_factor is None:
            raise ValueError(
                f"{self.name} divides by a constant: set {ACTOR}.loss_scale_factor to data.max_response_length"
            )
        return rule.replace(constant=float(loss_scale_factor))


def wanted(chosen: Settings) -> dict[str, object]:
    """verl's settings for a preset as published, by their full names; the preset's options are not among them."""
    method, greedy = chosen.algorithm, chosen.algorithm.advantage.kind == "greedy-baseline"
    out: dict[str, object] = {
        f"{ACTOR}.policy_loss.loss_mode": PREFIX + method.name,
        f"{ACTOR}.loss_agg_mode": AGG_MODES[method.loss.reduction],
        "algorithm.adv_estimator": "remax" if greedy else PREFIX + method.name,
    }
    if greedy:
        out["trainer.use_v1"] = False  # the only trainer of verl's that samples a greedy response
    if chosen.needs_reference:
        out |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0}
    if method.advantage.beta:
        out |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl"}
        out |= {"algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": method.advantage.beta}
    if chosen.needs_sampler:
        out["actor_rollout_ref.rollout.calculate_log_probs"] = True
    if method.dynamic_sampling:
        out |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"}
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
    given = options.get("reference")
    reference = _reference(options.pop("reference")) if isinstance(given, Mapping) else ReferenceConfig()
    if isinstance(rule := options.get("mismatch"), str):
        one_of(f"{OPTIONS}.mismatch", rule, MISMATCH)
        options["mismatch"] = MISMATCH[rule]
    try:
        if isinstance(chosen, str):
            chosen = algorithm(chosen, **options)
        elif options:
            raise ValueError(f"options go with a preset's name; got an Algorithm and {', '.join(options)}")
        made = Settings(chosen, reference, own_constant="constant" in options)
        _no_switches(options)
        _refuse(made)
        _try_out(made)
    except (TypeError, AttributeError, RuntimeError) as error:  # a value of another type than the option's
        text = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"{OPTIONS}: {chosen} cannot have {text}: {error}") from error
    return made


def _reference(given: Mapping[str, Any]) -> ReferenceConfig:
    known = {f.name for f in fields(ReferenceConfig)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(choose(f"option {OPTIONS}.reference", str(key), known))
        if key in NUMBERS:
            what, types, fits = NUMBERS[key]
            if isinstance(value, bool) or not isinstance(value, types) or not fits(value):
                raise ValueError(f"{OPTIONS}.reference.{key} must be {what}; got {value!r}")
    config = ReferenceConfig(**given)
    one_of(f"{OPTIONS}.reference.update", config.update, get_args(get_type_hints(ReferenceConfig)["update"]))
    return config


def _no_switches(options: Mapping[str, Any]) -> None:
    """true and false are numbers to Python."""
    switches = {f.name for kind in (Algorithm, PolicyLoss) for f in fields(kind) if "bool" in str(f.type)}
    for key, value in options.items():
        if isinstance(value, bool) and key not in switches:
            raise ValueError(f"{OPTIONS}.{key} is no switch (true or false); got {str(value).lower()}")


def _refuse(made: Settings) -> None:
    """What the engine cannot express, by name."""
    chosen = made.algorithm
    one_of(f"{OPTIONS}.reference", chosen.reference, ("old", "initial"))
    if chosen.curvature_gate or "keep" in chosen.loss.needs:
        raise ValueError(f"{made.name} cannot run inside verl: its gate reads logits and the optimiser's moments")
    if chosen.loss.control_variate:
        raise ValueError("control_variate cannot run inside verl: it needs each response's prompt, which losses lack")
    if made.reference.update == "ema":
        raise ValueError(f"{OPTIONS}.reference.update=ema cannot be had inside verl: every, kl, frozen or old")
    if chosen.loss.reduction == "none":
        raise ValueError(f"{OPTIONS}.reduction=none leaves no number to differentiate")
    if made.anchor == "old" and "ref_logp" in chosen.loss.needs and made.has_kl:
        raise ValueError(f"{OPTIONS}.reference.update=old: {made.name} is another method without its reference")


def _try_out(made: Settings) -> None:
    """On two tokens, so that a combination which cannot be trained is known before a model is loaded."""
    logp = torch.full((2, 2), -1.0, requires_grad=True)
    old, mask = logp.detach(), torch.ones(2, 2, dtype=torch.bool)
    made.algorithm.loss(logp, old, torch.tensor([1.0, -1.0]), mask, ref_logp=old, rollout_logp=old)
