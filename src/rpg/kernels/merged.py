"""Projections of one input as one product: query, key and value; gate and up.

Their weights are laid side by side in one storage, each parameter a part of it: the same parameters, no copy. Where no
gradient is asked for, the first of a group multiplies by the whole and the others take their part of the result.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def merge(model: nn.Module) -> list[str]:
    """On this instance, where plain linear layers of these names stand beside each other; the modules they are in."""
    done = []
    for name, module in model.named_modules():
        for names in GROUPS:
            found = [module._modules.get(key) for key in names]
            layers = [x for x in found if isinstance(x, nn.Linear) and _plain(x)]
            if len(layers) == len(names) and _merge(layers):
                done.append(name)
    return done


def _plain(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _merge(layers: list[nn.Linear]) -> bool:
    first = layers[0]
    alike = {(x.in_features, x.weight.dtype, x.weight.device, x.weight.is_contiguous()) for x in layers}
    biases = [x.bias for x in layers if x.bias is not None]
    if len(alike) > 1 or not first.weight.is_contiguous() or len(biases) not in (0, len(layers)):
        return False
    for parameters in ([x.weight for x in layers], biases):
        if parameters and not adjacent(parameters):
            whole = torch.cat([p.data for p in parameters])
            for p, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
                p.data = part
    group = Group(layers)
    for i, layer in enumerate(layers):
        layer._merged = group, i  # type: ignore[assignment]
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    return True


def adjacent(parameters: list[Any]) -> bool:
    """Whether they follow each other in one storage."""
    for one, other in itertools.pairwise(parameters):
        if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            return False
        if one.data_ptr() + one.numel() * one.element_size() != other.data_ptr() or not other.is_contiguous():
            return False
    return True


class Group:
    """Layers that are called in turn on the same input."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.held: tuple[Tensor, tuple[Tensor, ...]] | None = None  # the input seen last, and all results for it

    def __call__(self, i: int, x: Tensor) -> Tensor:
        layer = self.layers[i]
        held, self.held = self.held, None
        if torch.is_grad_enabled():
            return nn.functional.linear(x, layer.weight, layer.bias)
        if i > 0:
            if held is None or held[0] is not x:
                return nn.functional.linear(x, layer.weight, layer.bias)
            if i + 1 < len(self.layers):
                self.held = held
            return held[1][i]
        weights = [other.weight for other in self.layers]
        biases = [other.bias for other in self.layers if other.bias is not None]
        if not (adjacent(weights) and adjacent(biases)):  # of a copy of the model, or moved since
            return nn.functional.linear(x, layer.weight, layer.bias)
        out = nn.functional.linear(x, _whole(weights), _whole(biases) if biases else None)
        self.held = x, torch.split(out, [len(weight) for weight in weights], -1)
        return self.held[1][0]


def _whole(parameters: list[Any]) -> Tensor:
    first = parameters[0].detach()
    rows = sum(len(p) for p in parameters)
    whole: Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
    return whole


def _forward(self: Any, input: Tensor) -> Tensor:
    group, i = self._merged
    result: Tensor = group(i, input)
    return result
