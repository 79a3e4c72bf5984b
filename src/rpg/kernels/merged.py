"""Fewer products and additions, in a model that went through ``merge``:

- projections of one input are one product: query, key and value; gate and up. Their weights are laid side by side in
  one storage, each parameter a part of it: the same parameters, no copy. On a GPU always, with gradients or without;
- within ``merging()``, a decoding step, the residual is added by the product before it, in place: x + o_proj(…),
  x + down_proj(…).

Elsewhere the model computes as ever: log-probabilities with and without gradients are the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
JOINT_ON = {"cuda"}  # devices on which projections are one product outside of decoding too
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}  # parts of a layer that can add so

_merging: list[None] = []


@contextmanager
def merging() -> Iterator[None]:
    """Within, no gradients are to be had."""
    _merging.append(None)
    try:
        with torch.no_grad():
            yield
    finally:
        _merging.pop()


def merge(model: nn.Module) -> list[str]:
    """Prepare this instance; the names of the modules whose projections are merged or whose residuals are folded."""
    done = []
    for name, module in model.named_modules():
        for names in GROUPS:
            children = [module._modules.get(key) for key in names]
            layers = [x for x in children if isinstance(x, nn.Linear) and _plain(x)]
            if len(layers) == len(names) and _merge(layers):
                done.append(name)
    if done and not _learns(model):
        for module in model.modules():
            group, _ = getattr(module, "_merged", (None, 0))
            if group is not None:
                group.learns = False
    return done + _fold(model)


def _learns(model: Any) -> bool:
    """Whether gradients pass through joint projections: not where a model changes their results in place (OLMo)."""
    device = next(model.parameters()).device
    if device.type not in JOINT_ON:
        return True
    try:
        with torch.enable_grad():
            model(input_ids=torch.arange(1, 4, device=device)[None], use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return "inplace" not in str(error)
    except Exception:  # it cannot be called so
        return True
    return True


def _plain(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer)


# ---- projections -----------------------------------------------------------------------------------------------------


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
    group = MergedProjections(layers)
    for i, layer in enumerate(layers):
        layer._merged = group, i  # type: ignore[assignment]
        layer.forward = MethodType(_forward_of_group, layer)  # type: ignore[method-assign]
    return True


def adjacent(parameters: list[Any]) -> bool:
    """Whether they follow each other in one storage."""
    for one, other in itertools.pairwise(parameters):
        if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            return False
        if one.data_ptr() + one.numel() * one.element_size() != other.data_ptr() or not other.is_contiguous():
            return False
    return True


class MergedProjections:
    """Layers that are called in turn on the same input."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.held: tuple[Tensor, tuple[Tensor, ...]] | None = None  # the input seen last, and all results for it
        self.learns = True  # jointly: gradients pass through

    def __call__(self, i: int, x: Tensor) -> Tensor:
        layer = self.layers[i]
        held, self.held = self.held, None
        kind = x.device.type
        if not _merging and (kind not in JOINT_ON or not self.learns or torch.is_autocast_enabled(kind)):
            return nn.functional.linear(x, layer.weight, layer.bias)
        if i > 0:
            if held is None or held[0] is not x:
                return nn.functional.linear(x, layer.weight, layer.bias)
            if i + 1 < len(self.layers):
                self.held = held
            return held[1][i]
        whole = self.whole()
        if whole is None:
            return nn.functional.linear(x, layer.weight, layer.bias)
        parameters = [p for p in (*(y.weight for y in self.layers), *(y.bias for y in self.layers)) if p is not None]
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
            parts = _Joint.apply(x, *whole, len(self.layers), *parameters)  # type: ignore[no-untyped-call]
        else:
            parts = torch.split(nn.functional.linear(x, *whole), [len(y.weight) for y in self.layers], -1)
        self.held = x, parts
        return parts[0]  # type: ignore[no-any-return]

    def whole(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of all layers. None: of a copy of the model, or moved since."""
        weights = [other.weight for other in self.layers]
        biases = [other.bias for other in self.layers if other.bias is not None]
        if not (adjacent(weights) and adjacent(biases)):
            return None
        return _whole(weights), _whole(biases) if biases else None


def _whole(parameters: list[Any]) -> Tensor:
    first = parameters[0].detach()
    rows = sum(len(p) for p in parameters)
    whole: Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
    return whole


class _Joint(torch.autograd.Function):
    """Projections of one input by their joint weight and bias; what is returned are parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_KH: Tensor, bias_K: Tensor | None, count: int, *parameters: Tensor) -> Any:
        ctx.save_for_backward(x, weight_KH)
        ctx.sizes, ctx.biased = [len(p) for p in parameters[:count]], bias_K is not None
        return torch.split(nn.functional.linear(x, weight_KH, bias_K), ctx.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight_KH = ctx.saved_tensors
        sizes, (needs_x, _, _, _, *needs) = ctx.sizes, ctx.needs_input_grad
        zeros = (x.new_zeros(*x.shape[:-1], size) if d is None else d for d, size in zip(grads, sizes, strict=True))
        d_NK, x_NH = side_by_side(list(zeros)).flatten(0, -2), x.flatten(0, -2)
        d_x = (d_NK @ weight_KH).view(x.shape) if needs_x else None
        found: list[Tensor | None] = [None] * len(needs)
        if any(needs[: len(sizes)]):
            found[: len(sizes)] = torch.split(d_NK.t() @ x_NH, sizes)
        if ctx.biased and any(needs[len(sizes) :]):
            found[len(sizes) :] = torch.split(d_NK.sum(0), sizes)
        return d_x, None, None, None, *(d if need else None for d, need in zip(found, needs, strict=True))


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Joined over the last dimension; no copy where they lie so in one storage."""
    first, width = parts[0], sum(x.shape[-1] for x in parts)
    place, strides = first.data_ptr(), first.stride()
    for x in parts:
        one = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and x.data_ptr() == place
        if not one or x.dim() < 2 or x.stride() != strides or x.stride(-1) != 1 or x.stride(-2) != width:
            return torch.cat(parts, -1)
        place += x.shape[-1] * x.element_size()
    return first.as_strided((*first.shape[:-1], width), strides)


def _forward_of_group(self: Any, input: Tensor) -> Tensor:
    group, i = self._merged
    result: Tensor = group(i, input)
    return result


# ---- residuals -------------------------------------------------------------------------------------------------------


def _fold(model: Any) -> list[str]:
    """Layers that are x + self_attn(norm(x)), then x + mlp(norm(x)). That is tried out: some scale what they add."""
    layers = {name: m for name, m in model.named_modules() if set(m._modules) == LAYER and _ends_in_products(m)}
    if not layers or not hasattr(model, "get_input_embeddings"):
        return []
    ids = torch.arange(1, 7, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    for layer in layers.values():
        layer.forward = MethodType(forward_of_layer, layer)
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.forward = MethodType(forward_of_last, last)
    if _same_within(model, ids):
        return list(layers)
    for layer in layers.values():
        for module in (layer, layer.self_attn.o_proj, layer.mlp.down_proj):
            del module.forward
    return []


def _same_within(model: Any, ids: Tensor) -> bool:
    """Whether merging changes nothing but the rounding; False also where the model cannot be called so."""
    try:
        with torch.no_grad():
            before = model(input_ids=ids, use_cache=False).logits.float()
        with merging():
            after = model(input_ids=ids, use_cache=False).logits.float()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    near = (1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2) * before.abs().max()
    return bool((after - before).abs().max() <= near)


def _ends_in_products(layer: Any) -> bool:
    last = [getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None)]
    plain = all(isinstance(x, nn.Linear) and _plain(x) and x.bias is None for x in last)
    scales = layer._parameters  # they may be 1 as long as they are not trained
    return plain and "forward" not in vars(layer) and not scales


def is_merging() -> bool:
    return bool(_merging)


def forward_of_layer(self: Any, hidden_states: Tensor, *inputs: Any, **named: Any) -> Any:
    if not _merging or inputs:
        return type(self).forward(self, hidden_states, *inputs, **named)
    attention, mlp = self.self_attn, self.mlp
    with _adding(attention.o_proj, hidden_states):
        hidden_states = attention(hidden_states=self.input_layernorm(hidden_states), **named)[0]
    with _adding(mlp.down_proj, hidden_states):
        return mlp(self.post_attention_layernorm(hidden_states))


@contextmanager
def _adding(last: Any, residual: Tensor) -> Iterator[None]:
    """Within, the next call of this layer adds the residual."""
    vars(last)["_residual"] = residual
    try:
        yield
    finally:
        vars(last).pop("_residual", None)


def forward_of_last(self: Any, input: Tensor) -> Tensor:
    residual = vars(self).pop("_residual", None)
    if residual is None:
        return nn.functional.linear(input, self.weight, self.bias)
    sums: Tensor = residual.flatten(0, -2)  # in place: elsewhere torch would copy it first
    return sums.addmm_(input.flatten(0, -2), self.weight.t()).view(residual.shape)
