"""Fewer kernels a layer: norms, gated MLPs and rotary embeddings of a transformers model, replaced where they agree.

`fuse` changes one instance: a module gets a `forward` of its own, the class and every other model keep theirs. What a
module computes is found out by trying it on random inputs with random weights; a module that agrees with none of the
kernels is left alone. Tensors a kernel cannot take (on a CPU, say) go the module's own way.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .merged import forward_of_last

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16384  # a row of a norm is held in registers
EPSILONS = ("variance_epsilon", "eps", "epsilon")
ROTARY = "apply_rotary_pos_emb"
Forward = Callable[..., Any]


def fuse(model: nn.Module) -> list[str]:
    """Replace what agrees with a kernel, on this instance; the names of the modules replaced by this call.

    Nothing happens on a CPU, without Triton, or to a module whose forward is not its class's (a second call, say).
    """
    if importlib.util.find_spec("triton") is None:
        return []
    done: list[str] = []
    rotated: dict[Any, Forward | None] = {}
    with _trial():
        for name, module in model.named_modules():
            parameter = next(module.parameters(), None)
            untouched = getattr(module.forward, "__func__", None) is type(module).forward
            if parameter is None or not untouched or not _takes(parameter.device):
                continue
            forward = _norm_for(module) or _mlp_for(module) or _attention_for(module, parameter.device, rotated)
            if forward is not None:
                module.forward = MethodType(forward, module)
                done.append(name)
    return done


@functools.cache
def _kernels() -> Any:
    from .triton import fused as fused_triton

    return fused_triton


@functools.cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _takes(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and _interprets())


def _runs(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and (x.is_cuda or (_interprets() and x.device.type == "cpu"))
        and x.dtype in DTYPES
        and x.numel() > 0
    )


def _tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# --- trying ---------------------------------------------------------------------------------------------------------


@contextmanager
def _trial() -> Iterator[None]:
    """No gradients, no autocast, and the generators of random numbers are afterwards what they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    plain = torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices), torch.no_grad(), plain[0], plain[1]:
        yield


def _tried(call: Callable[..., Any], *inputs: Any) -> Any:
    """What the call returns, seeded; None if it cannot be called so: not a module we know."""
    torch.manual_seed(1)
    try:
        return call(*inputs)
    except Exception:
        return None


def _noise(*shape: int, like: Tensor, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=like.device) * scale


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Random weights for all of a module: those it has may hide what it does with them (ones, zeros)."""
    torch.manual_seed(0)
    return {
        name: _noise(*x.shape, like=x, scale=1.0 if x.dim() < 2 else x.shape[-1] ** -0.5)
        for name, x in module.named_parameters()
        if x.is_floating_point()
    }


def _agrees(ours: Tensor, theirs: Any, tolerance: float = 1e-5) -> bool:
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


# --- norms ----------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, offset: bool, rounds: bool) -> Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.form = eps, offset, rounds
        return _kernels().norm(x, weight_H, eps, offset, rounds)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, dweight_H = _kernels().norm_backward(grads[0], *ctx.saved_tensors, *ctx.form, ctx.needs_input_grad[:2])
        return dx, dweight_H, None, None, None


def _norm(x: Tensor, weight_H: Tensor, eps: float, offset: bool, rounds: bool) -> Tensor:
    call = _Norm.apply if _tracked(x, weight_H) else _kernels().norm
    return call(x, weight_H, eps, offset, rounds)  # type: ignore[no-any-return]


@functools.cache
def _norm_forward(epsilon: str, offset: bool, rounds: bool) -> Forward:
    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        weight_H: Any = self.weight
        if len(inputs) != 1 or named or not _runs(inputs[0]) or inputs[0].dtype != weight_H.dtype:
            return type(self).forward(self, *inputs, **named)
        return _norm(inputs[0], weight_H, getattr(self, epsilon), offset, rounds)

    return forward


def _norm_for(module: nn.Module) -> Forward | None:
    form = norm_form(module, _norm)
    return None if form is None else _norm_forward(*form)


def norm_form(module: nn.Module, norm: Callable[..., Tensor]) -> tuple[str, bool, bool] | None:
    """The name of its epsilon, and with which ``offset`` and ``rounds`` it agrees with ``norm``."""
    weight_H = getattr(module, "weight", None)
    epsilon = next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if "RMSNorm" not in type(module).__name__ or epsilon is None or not isinstance(weight_H, Tensor):
        return None
    if weight_H.dim() != 1 or not 0 < len(weight_H) <= WIDEST:
        return None
    eps, weights = getattr(module, epsilon), _weights(module)
    scale_51 = torch.tensor([[1.0], [3.0], [0.1], [eps**0.5], [1.0]], device=weight_H.device)  # one at which eps counts
    x_5H = (_noise(5, len(weight_H), like=weight_H) + 0.3) * scale_51
    theirs = _tried(torch.func.functional_call, module, weights, (x_5H,))
    for offset in (False, True):
        if _agrees(norm(x_5H, weights["weight"], eps, offset, False), theirs):
            return epsilon, offset, _rounds(module, norm, weights, x_5H, eps, offset)
    return None


def _rounds(
    module: nn.Module, norm: Callable[..., Tensor], weights: dict[str, Tensor], x_5H: Tensor, eps: float, offset: bool
) -> bool:
    """Does it round before it multiplies by the weight (Llama) or after (Gemma)? Whichever is nearer."""
    half = {name: x.half() for name, x in weights.items()}
    theirs = _tried(torch.func.functional_call, module, half, (x_5H.half(),))
    if not isinstance(theirs, Tensor):
        return True
    off = [(norm(x_5H.half(), half["weight"], eps, offset, r).float() - theirs).abs().sum() for r in (True, False)]
    return bool(off[0] <= off[1])


# --- gated MLPs -----------------------------------------------------------------------------------------------------


class _ActMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _kernels().act_mul(gate, up, kind)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dgate, dup = _kernels().act_mul_backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.kind, False)
        return dgate, dup, None


class _ActMulLinear(torch.autograd.Function):
    """The product with `linear` behind it: gate and up are kept, the product is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_HF: Tensor, bias_H: Tensor | None, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up, weight_HF)
        ctx.kind = kind
        return F.linear(_kernels().act_mul(gate, up, kind), weight_HF, bias_H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up, weight_HF = ctx.saved_tensors
        dy_NH = grads[0].reshape(-1, grads[0].shape[-1])
        dgate = dup = dweight_HF = dbias_H = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            product_NF = dy_NH @ weight_HF
            dgate, dup = _kernels().act_mul_backward(product_NF, gate, up, ctx.kind, ctx.needs_input_grad[2])
        elif ctx.needs_input_grad[2]:
            product_NF = _kernels().act_mul(gate, up, ctx.kind).view(len(dy_NH), -1)
        if ctx.needs_input_grad[2]:
            dweight_HF = dy_NH.t() @ product_NF
        if ctx.needs_input_grad[3]:
            dbias_H = dy_NH.sum(0)
        return dgate, dup, dweight_HF, dbias_H, None


def _plain(linear: nn.Module) -> bool:
    """A linear layer that does nothing else: not wrapped, not hooked."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    forward = getattr(vars(linear).get("forward"), "__func__", forward_of_last)  # its class's outside merging()
    return type(linear) is nn.Linear and forward is forward_of_last and not any(vars(linear)[name] for name in hooks)


def _down(linear: Any, gate: Tensor, up: Tensor, kind: int) -> Any:
    """linear(act(gate) · up)."""
    if _plain(linear) and linear.weight.dtype == gate.dtype and not torch.is_autocast_enabled(gate.device.type):
        weight_HF, bias_H = linear.weight, linear.bias
        if _tracked(gate, up, weight_HF, bias_H):
            return _ActMulLinear.apply(gate, up, weight_HF, bias_H, kind)  # type: ignore[no-untyped-call]
    return linear((_ActMul.apply if _tracked(gate, up) else _kernels().act_mul)(gate, up, kind))


@functools.cache
def _mlp_forward(act: str, kind: int, joint: bool) -> Forward:
    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if len(inputs) != 1 or named or not _runs(inputs[0]):
            return type(self).forward(self, *inputs, **named)
        if joint:
            gate, up = self.gate_up_proj(inputs[0]).chunk(2, -1)
        else:
            gate, up = self.gate_proj(inputs[0]), self.up_proj(inputs[0])
        if not _runs(gate) or gate.dtype != up.dtype or gate.shape != up.shape:
            return self.down_proj(getattr(self, act)(gate) * up)
        return _down(self.down_proj, gate, up, kind)

    return forward


def _mlp_for(module: nn.Module) -> Forward | None:
    joint = hasattr(module, "gate_up_proj")
    parts = ["gate_up_proj", "down_proj"] if joint else ["gate_proj", "up_proj", "down_proj"]
    act = next((name for name in ("act_fn", "activation_fn") if callable(getattr(module, name, None))), None)
    if act is None or not all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
        return None
    width, weights = getattr(getattr(module, parts[0]), "in_features", None), _weights(module)
    if not isinstance(width, int) or not weights:
        return None
    like = next(iter(weights.values()))
    kind = _kind(getattr(module, act), _noise(512, like=like, scale=3.0))
    if kind is None:
        return None
    modes = [(part, part.training) for part in module.modules()]
    try:
        forward = _mlp_forward(act, kind, joint)
        return forward if _same_mlp(module, forward, weights, _noise(3, width, like=like)) else None
    finally:
        for part, training in modes:
            part.training = training


def _kind(act: Callable[..., Any], gate_N: Tensor) -> int | None:
    theirs_N, ones_N = _tried(act, gate_N), torch.ones_like(gate_N)
    kinds = (_kernels().SILU, _kernels().GELU_TANH)
    return next((kind for kind in kinds if _agrees(_kernels().act_mul(gate_N, ones_N, kind), theirs_N)), None)


def _same_mlp(module: nn.Module, forward: Forward, weights: dict[str, Tensor], x_3H: Tensor) -> bool:
    for training in (False, True):  # with the same random numbers: a dropout of the MLP's own would show
        module.train(training)
        theirs_3H = _tried(torch.func.functional_call, module, weights, (x_3H,))
        if theirs_3H is None:
            return False
        torch.manual_seed(1)
        module.forward = MethodType(forward, module)
        try:
            ours_3H = torch.func.functional_call(module, weights, (x_3H,))
        finally:
            del module.forward
        if not _agrees(ours_3H, theirs_3H, 1e-3):  # the activation is known to agree; matrix products may use TF32
            return False
    return True


# --- rotary embeddings ----------------------------------------------------------------------------------------------


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _kernels().rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk = _kernels().rotate(*grads, *ctx.saved_tensors, back=True)
        return dq, dk, None, None


def _rotates(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """q [B,Hq,L,D], k [B,Hk,L,D], cos and sin [B or 1,L,D], all of one type, and no gradient to the angles."""
    return (
        _runs(q)
        and _runs(k)
        and q.dim() == k.dim() == 4
        and cos.shape == sin.shape
        and q.shape[-1] % 2 == 0
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:] == cos.shape[1:]
        and cos.shape[0] in (1, q.shape[0])
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.device == cos.device
        and not _tracked(cos, sin)
    )


def rotary(original: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
    """q and k rotated by one kernel where it can be done, by `original` where not."""
    if rest or named not in ({}, {"unsqueeze_dim": 1}) or not _rotates(q, k, cos, sin):
        return original(q, k, cos, sin, *rest, **named)
    return _Rotary.apply(q, k, cos, sin) if _tracked(q, k) else _kernels().rotate(q, k, cos, sin)  # type: ignore[no-untyped-call]


def _agreed(original: Callable[..., Any], device: torch.device) -> bool:
    """Do both rotate alike? The halves of the angles differ here, so that no other pairing passes."""
    torch.manual_seed(0)
    like = torch.empty(0, device=device)
    q, k = _noise(2, 3, 5, 16, like=like), _noise(2, 1, 5, 16, like=like)
    cos, sin = _noise(2, 5, 16, like=like), _noise(2, 5, 16, like=like)
    theirs = _tried(original, q, k, cos, sin)
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    return all(_agrees(a, b) for a, b in zip(rotary(original, q, k, cos, sin), theirs, strict=True))


def _named(function: Any) -> FunctionType | None:
    """The function under the decorators whose code calls the rotary embedding."""
    while isinstance(function, FunctionType):
        if ROTARY in function.__code__.co_names and ROTARY in function.__globals__:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _rebound(function: FunctionType, inner: FunctionType, ours: Callable[..., Any]) -> FunctionType | None:
    """The function again, with `inner` calling ours; decorators around it are kept, each with a cell of its own."""
    names, closure = function.__globals__, function.__closure__
    if function is inner:
        names = {**names, ROTARY: ours}
    else:
        wrapped = function.__wrapped__  # type: ignore[attr-defined]
        below = _rebound(wrapped, inner, ours)
        cells = closure or ()
        if below is None or not any(cell.cell_contents is wrapped for cell in cells):
            return None
        closure = tuple(CellType(below) if cell.cell_contents is wrapped else cell for cell in cells)
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__dict__.update(function.__dict__)
    if function is not inner:
        copy.__wrapped__ = below  # type: ignore[attr-defined]
    copy.__qualname__, copy.__doc__, copy.__module__ = function.__qualname__, function.__doc__, function.__module__
    return copy


def _attention_for(module: nn.Module, device: torch.device, done: dict[Any, Forward | None]) -> Forward | None:
    function = type(module).forward
    inner = _named(function)
    if inner is None:
        return None
    if (function, device) not in done:
        original = inner.__globals__[ROTARY]
        ours = functools.partial(rotary, original)
        done[function, device] = _rebound(function, inner, ours) if _agreed(original, device) else None  # type: ignore[arg-type]
    return done[function, device]
