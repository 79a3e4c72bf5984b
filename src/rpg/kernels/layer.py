"""A decoder layer in a decoding step, in few launches, where the model's own layer computes the same.

    x += o_proj(attention(norm(x)));  x += down_proj(act(gate) · up),  gate and up of norm(x)

Norms of heads, rotation and the write into the cache are part of attention (decode.py). What a layer computes is found
out by trying its parts on random inputs with random weights, as in fused.py; a layer that is anything else keeps to
its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fused
from .custom_attention import configs_of, custom_attention
from .decode import Unfinished, norm_in_torch
from .merged import MergedProjections, forward_of_layer, is_merging

WRITTEN_OUT = True  # False: layers keep to their own code
NormForm = tuple[float, bool, bool]  # eps, offset, rounds: of norm_in_torch
SILU, GELU_TANH = 0, 1
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh")}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class Decoding(Protocol):
    """The cache of a decoding step."""

    @property
    def decoding(self) -> bool: ...

    def decode(
        self,
        layer: int,
        query_AHD: Tensor,
        key_AGD: Tensor,
        value_AGD: Tensor,
        scaling: float | None,
        window: int | None,
        unfinished: Unfinished,
    ) -> Tensor: ...


@dataclass(frozen=True)
class AttentionForm:
    index: int
    width: int  # of a head
    scaling: float | None
    window: int | None
    norms: NormForm | None  # of q_norm and k_norm, where it has them


@dataclass(frozen=True)
class LayerForm:
    """What was found out about a layer."""

    attention: AttentionForm
    before: NormForm
    between: NormForm
    kind: int  # of activation


def write_out(model: nn.Module) -> list[str]:
    """After merge(model): layers whose residuals are folded, and that agree. Their names."""
    done = []
    for name, layer in model.named_modules():
        if getattr(vars(layer).get("forward"), "__func__", None) is forward_of_layer:
            form = form_of(layer)
            if form is not None:
                layer._form = form
                layer.forward = MethodType(_forward, layer)
                done.append(name)
    return done


def _forward(self: Any, hidden_states: Tensor, *inputs: Any, **named: Any) -> Any:
    cache: Any = named.get("past_key_values")
    angles = named.get("position_embeddings")
    if WRITTEN_OUT and is_merging() and not inputs and getattr(cache, "decoding", False) and isinstance(angles, tuple):
        cos_AD, sin_AD = (x[:, 0] for x in angles)
        whole = cos_AD.shape[-1] == self._form.attention.width  # some models rotate a part of a head
        if whole and decode_layer(self._form, self, hidden_states[:, 0], (cos_AD, sin_AD), cache):
            return hidden_states
    return forward_of_layer(self, hidden_states, *inputs, **named)


def _joint(linear: Any, names: tuple[str, ...]) -> MergedProjections | None:
    """The projections that are one with this one, if they are as many as these."""
    group, i = getattr(linear, "_merged", (None, 0))
    return group if group is not None and i == 0 and len(group.layers) == len(names) else None


def form_of(layer: Any) -> LayerForm | None:
    """None: not a layer that is known here."""
    firsts = getattr(layer.self_attn, "q_proj", None), getattr(layer.mlp, "gate_proj", None)
    if None in (_joint(first, names) for first, names in zip(firsts, (QKV, GATE_UP), strict=True)):
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return None
    modes = [(part, part.training) for part in layer.modules()]
    layer.eval()
    try:
        with fused._trial():
            before, between = _norm_form(layer.input_layernorm), _norm_form(layer.post_attention_layernorm)
            kind = _kind(layer.mlp)
            if before is None or between is None or kind is None:
                return None
            attention = _attention(layer.self_attn)
            return None if attention is None else LayerForm(attention, before, between, kind)
    finally:
        for part, training in modes:
            part.training = training


def decode_layer(form: LayerForm, layer: Any, x_AH: Tensor, angles: tuple[Tensor, Tensor], cache: Decoding) -> bool:
    """The layer in place of x. False, and nothing done, where its projections no longer lie side by side."""
    attention, mlp, heads = layer.self_attn, layer.mlp, form.attention
    groups = _joint(attention.q_proj, QKV), _joint(mlp.gate_proj, GATE_UP)
    if any(type(last) is not nn.Linear for last in (attention.o_proj, mlp.down_proj)):
        return False  # an adapter came later
    qkv, gate_up = (None if group is None else group.whole() for group in groups)
    if qkv is None or gate_up is None:
        return False
    joint_AN = F.linear(_normed(x_AH, layer.input_layernorm.weight, form.before), *qkv)
    sizes = [len(getattr(attention, name).weight) for name in QKV]
    query, key, value = (x.view(len(x), -1, heads.width) for x in torch.split(joint_AN, sizes, 1))
    unfinished = Unfinished(angles)
    if heads.norms is not None:
        unfinished = Unfinished(angles, (attention.q_norm.weight, attention.k_norm.weight), *heads.norms)
    seen_AHD = cache.decode(heads.index, query, key, value, heads.scaling, heads.window, unfinished)
    x_AH.addmm_(seen_AHD.flatten(1), attention.o_proj.weight.t())
    both_AN = F.linear(_normed(x_AH, layer.post_attention_layernorm.weight, form.between), *gate_up)
    gate_AF, up_AF = both_AN.chunk(2, -1)
    x_AH.addmm_(_gated(gate_AF, up_AF, form.kind), mlp.down_proj.weight.t())
    return True


def _normed(x_AH: Tensor, weight_H: Tensor, form: NormForm) -> Tensor:
    if fused._runs(x_AH) and x_AH.dtype == weight_H.dtype:
        return fused._kernels().norm(x_AH, weight_H, *form)  # type: ignore[no-any-return]
    return norm_in_torch(x_AH, weight_H, *form)


def _gated(gate_AF: Tensor, up_AF: Tensor, kind: int) -> Tensor:
    if fused._runs(gate_AF):
        return fused._kernels().act_mul(gate_AF, up_AF, kind)  # type: ignore[no-any-return]
    return ACTIVATIONS[kind](gate_AF) * up_AF


# ---- trying ----------------------------------------------------------------------------------------------------------


def _norm_form(module: nn.Module) -> NormForm | None:
    form = fused.norm_form(module, norm_in_torch)
    return None if form is None else (getattr(module, form[0]), form[1], form[2])


def _kind(mlp: Any) -> int | None:
    weights = fused._weights(mlp)
    x_3H = fused._noise(3, mlp.gate_proj.in_features, like=mlp.gate_proj.weight)
    theirs_3H = fused._tried(torch.func.functional_call, mlp, weights, (x_3H,))
    gate, up = (F.linear(x_3H, weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in GATE_UP)
    for kind, act in ACTIVATIONS.items():
        if fused._agrees(F.linear(act(gate) * up, weights["down_proj.weight"]), theirs_3H, 1e-3):
            return kind
    return None


def _attention(attention: Any) -> AttentionForm | None:
    """None, if its queries and keys are anything but projections, normed and rotated."""
    width, like = getattr(attention, "head_dim", None), attention.q_proj.weight
    normed = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    forms = [None if norm is None else _norm_form(norm) for norm in normed]
    if not isinstance(width, int) or width % 2 or forms[0] != forms[1]:
        return None
    if forms[0] is not None and any(norm.weight.shape != (width,) for norm in normed):  # type: ignore[union-attr]
        return None
    weights = fused._weights(attention)
    x_13H = fused._noise(1, 3, attention.q_proj.in_features, like=like)
    cos_13D, sin_13D = fused._noise(1, 3, width, like=like), fused._noise(1, 3, width, like=like)
    seen: list[Any] = []
    answer_13HD = fused._noise(1, 3, len(like) // width, width, like=like)

    def attend(index: int, query: Any, key: Any, value: Any, scaling: float | None, window: int | None) -> Tensor:
        seen.append((query, key, value, index, scaling, window))
        return answer_13HD

    named: dict[str, Any] = {"hidden_states": x_13H, "position_embeddings": (cos_13D, sin_13D), "attention_mask": None}
    named |= {"past_key_values": None}
    with custom_attention(configs_of(attention), attend):
        theirs = fused._tried(torch.func.functional_call, attention, weights, (), named)
    if not isinstance(theirs, tuple) or len(seen) != 1:
        return None
    query, key, value, index, scaling, window = seen[0]
    heads = [
        F.linear(x_13H[0], weights[f"{name}.weight"], weights.get(f"{name}.bias")).view(3, -1, width) for name in QKV
    ]
    of_heads = (weights["q_norm.weight"], weights["k_norm.weight"]) if forms[0] else None
    unfinished = Unfinished((cos_13D[0], sin_13D[0]), of_heads, *(forms[0] or ()))
    for ours, found in zip([*unfinished.finish(*heads[:2]), heads[2]], (query, key, value), strict=True):
        if not fused._agrees(ours.transpose(0, 1)[None], found, 1e-3):
            return None
    after = F.linear(answer_13HD.flatten(2), weights["o_proj.weight"])
    if not fused._agrees(after, theirs[0], 1e-3):
        return None
    return AttentionForm(index, width, scaling, window, forms[0])
