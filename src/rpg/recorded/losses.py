"""A PolicyLoss as plain data, and back: so that a file says exactly which loss ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..loss import clip, gates, mismatch
from ..loss.policy_loss import PolicyLoss

PARTS = (clip.Clip, gates.Gate, mismatch.Mismatch)
KIND = "rule"  # the key that names a part's class
_MODULES = (clip, gates, mismatch)
_RULES = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, PARTS)
}


def loss_as_data(loss: PolicyLoss) -> dict[str, Any]:
    """Every field by name; a rule as {"rule": "Box", "low": 0.2, …}."""
    return {f.name: _plain(getattr(loss, f.name)) for f in fields(loss)}


def loss_of_data(data: Mapping[str, Any]) -> PolicyLoss:
    try:
        return PolicyLoss().replace(**{name: _rule(value) for name, value in data.items()})
    except TypeError as error:
        raise ValueError(f"method.loss cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, PARTS):
        if _RULES.get(type(value).__name__) is not type(value):
            raise ValueError(f"{value} is a rule of your own, which a file cannot name: it cannot be recorded")
        return {KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
    return list(value) if isinstance(value, tuple) else value


def _rule(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    kind = str(options.pop(KIND, ""))
    if kind not in _RULES:
        raise ValueError(f"method.loss has a rule that this version of rpg does not know: {kind!r}")
    return _RULES[kind](**options)
