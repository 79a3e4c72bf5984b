"""Checks of the fused layers where models are unusual: adapters, hooks, mixed types, parts that look known."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import torch
from torch import nn

import tiny
from kernels.fused_checks import NORMS, kernels, names, near, results, rotate_reference, same, spread
from rpg.kernels import fused
from rpg.kernels.fused import fuse


class Raised(nn.Linear):
    """A linear layer that returns float32 whatever it computes in."""

    def forward(self, x):
        return super().forward(x).float()


def check_mixed_types():
    """A weight of another type than its input: what comes out is of the type the original gives."""
    norm = tiny.make("llama").model.norm
    x = torch.randn(3, 32).bfloat16()
    wanted = norm(x)
    assert fuse(norm) == [""]
    assert norm(x).dtype == wanted.dtype == torch.float32
    mlp = OddMLP("plain")
    mlp.gate_proj, mlp.up_proj = Raised(8, 12), Raised(8, 12)
    nn.init.normal_(mlp.down_proj.weight)
    copied, x = copy.deepcopy(mlp), torch.randn(3, 8)
    assert fuse(copied) == [""]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = copied(x), mlp(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    for out in (ours, theirs):
        out.float().square().sum().backward()
    near(copied.gate_proj.weight.grad, mlp.gate_proj.weight.grad, 0.05)


class Adapted(nn.Module):
    """A linear layer with a low-rank addition and a dropout, as adapters wrap it."""

    def __init__(self, base, dropout=0.3):
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(dropout)
        self.in_features = base.in_features
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x)))


def adapt(model):
    torch.manual_seed(7)
    for layer in model.model.layers:
        for part in ("gate_proj", "down_proj"):
            setattr(layer.mlp, part, Adapted(getattr(layer.mlp, part)))
    return model.train()


def check_adapters():
    for first in (True, False):  # wrapped before, or after
        model = spread(tiny.make("qwen2-grouped"))
        copied = copy.deepcopy(model)
        if first:
            assert set(fuse(adapt(copied))) == names(NORMS)
        else:
            assert set(fuse(copied)) == names(NORMS)
            adapt(copied)
        same(results(copied), results(adapt(model)), 1e-5)


def check_hooks():
    """Hooks on the down projection see what they always saw."""
    seen, model = [], tiny.make("llama")
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, given, out: seen.append(given[0].detach()))
    results(model)
    fuse(model)
    seen[1:] = []
    results(model)
    near(seen[1], seen[0], 1e-5)


def check_bias():
    model = spread(tiny.make("llama", mlp_bias=True))
    wanted = results(model)
    assert set(fuse(model)) == names(NORMS)
    same(results(model), wanted, 1e-5)


def check_memory():
    """For its backward an MLP keeps two tensors of the inner width: gate and up."""
    model = tiny.make("llama")
    mlp, x, kept = model.model.layers[0].mlp, torch.randn(5, 32), []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    for fusing, wanted in ((False, 4), (True, 2)):
        if fusing:
            fuse(model)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mlp(x)
        assert kept.count((5, 48)) == wanted, kept


# --- what does not fit ----------------------------------------------------------------------------------------------


class OddRMSNorm(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.weight, self.eps, self.form = nn.Parameter(torch.ones(8)), 1e-6, form

    def forward(self, x):
        def unit(x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        if self.form == "square":
            return unit(x) * self.weight**2
        if self.form == "mean":
            return unit(x - x.mean(-1, keepdim=True)) * self.weight
        if self.form == "outside":
            return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight
        if self.form == "pair":
            return unit(x) * self.weight, x
        return unit(x) * self.weight


class OddMLP(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.dropout = form, nn.Dropout(0.5 if form == "dropout" else 0.0)
        self.act_fn = {"relu": nn.ReLU(), "gelu": nn.GELU()}.get(form, nn.SiLU())
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x):
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.dropout(product * 2 if self.form == "twice" else product))


def check_left_alone():
    forms = ("plain", "square", "mean", "outside", "pair")
    norms = {form: fuse(OddRMSNorm(form)) for form in forms}
    assert norms == {form: [""] if form == "plain" else [] for form in forms}
    forms = ("plain", "relu", "gelu", "twice", "dropout")
    mlps = {form: fuse(OddMLP(form)) for form in forms}
    assert mlps == {form: [""] if form == "plain" else [] for form in forms}
    replaced = OddMLP("plain")
    replaced.forward = lambda x: x
    assert fuse(replaced) == []


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return rotate_reference(q, k, cos, sin, unsqueeze_dim)


def doubled(function):
    @functools.wraps(function)
    def wrapper(self, *inputs, **named):
        return 2 * function(self, *inputs, **named)

    return wrapper


def hidden(function):
    """A decorator that does not say what it wraps."""

    def wrapper(self, *inputs):
        return function(self, *inputs)

    return wrapper


def looked_up(function):
    """One whose wrapper has the function elsewhere than in a cell of its own."""
    kept = {"function": function}

    @functools.wraps(function)
    def wrapper(self, *inputs):
        return kept["function"](self, *inputs)

    return wrapper


def attention(*decorators):
    def forward(self, x, cos, sin, *, power=1):
        q, k = apply_rotary_pos_emb(x, x, cos, sin)
        return (q * k * self.weight) ** power

    for decorator in decorators:
        forward = decorator(forward)
    made = type("Attention", (nn.Module,), {"forward": forward})()
    made.weight = nn.Parameter(torch.ones(()))
    return made


def check_decorators():
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    for decorators, fits in (((), 1), ((doubled,), 1), ((doubled, doubled), 1), ((hidden,), 0), ((looked_up,), 0)):
        module = attention(*decorators)
        wanted = module(x, cos, sin)
        assert fuse(module) == [""] * fits, decorators
        with mock.patch.object(kernels(), "rotate", wraps=kernels().rotate) as rotate:
            near(module(x, cos, sin), wanted, 1e-5)
            assert rotate.call_count == fits


def check_rotary_falls_back():
    """Other layouts, narrower angles, another type, angles that learn: the original function is called."""
    torch.manual_seed(0)
    q, k, cos, sin = torch.randn(2, 3, 3, 8), torch.randn(2, 3, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    original = mock.Mock(side_effect=lambda *inputs, **named: "original")
    learns = cos.clone().requires_grad_()
    for inputs, named in (
        ((q, k, cos, sin), {"unsqueeze_dim": 2}),
        ((q, k, cos, sin, 2), {}),
        ((q, k, cos[..., :4], sin[..., :4]), {}),
        ((q, k, cos.double(), sin.double()), {}),
        ((q, k, learns, sin), {}),
        ((q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]), {}),
    ):
        assert fused.rotary(original, *inputs, **named) == "original"
    assert fused.rotary(original, q, k, cos, sin, unsqueeze_dim=1) != "original"
