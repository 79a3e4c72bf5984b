"""Checks of the fused layers, run under Triton's interpreter: it cuts bfloat16 off but rounds float16."""

from __future__ import annotations

import copy
import functools
import os
import pickle
from unittest import mock

import torch
import torch.nn.functional as F

import tiny
from rpg.kernels import fused
from rpg.kernels.fused import fuse

HALVES = (torch.bfloat16, torch.float16)
if os.environ.get("TRITON_INTERPRET") == "1":
    torch.use_deterministic_algorithms(True)  # fresh memory is then filled with NaN


def near(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    off = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30)
    assert off <= tolerance, f"{float(off):.2e} > {tolerance}"  # NaN fails


def tolerance(dtype):
    return {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]


def kernels():
    return fused._kernels()


# --- kernels against float64 ----------------------------------------------------------------------------------------


def norm_reference(x, weight, eps, offset):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


def check_norm():
    torch.manual_seed(0)
    tiles = (None, (2, 256, 4), (4, 256, 8))
    for rows, width, dtype in (
        (1, 33, torch.float32),
        (5, 200, torch.float32),
        (37, 64, torch.float16),
        (7, 130, HALVES[0]),
    ):
        for offset in (False, True):
            for tile in tiles if rows < 37 else tiles[:2]:
                x, dy = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
                weight = torch.randn(width).to(dtype)
                double = [t.double().requires_grad_() for t in (x, weight)]
                wanted = norm_reference(*double, 1e-2, offset)
                wanted.backward(dy.double())
                near(kernels().norm(x, weight, 1e-2, offset, True, tile), wanted, tolerance(dtype))
                form = 1e-2, offset, not offset
                for needs in ((True, True), (True, False), (False, True)):
                    got = kernels().norm_backward(dy, x, weight, *form, needs, tile, waves=1)
                    for gradient, reference, needed in zip(got, double, needs, strict=True):
                        assert (gradient is not None) == needed
                        if needed:
                            near(gradient, reference.grad, tolerance(dtype))


def check_norm_shapes():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 2, 8).transpose(1, 2), torch.randn(8)
    near(kernels().norm(x, weight, 1e-6, False, True), norm_reference(x, weight, 1e-6, 0), 1e-6)
    wide = torch.randn(2, 16384)
    near(kernels().norm(wide, wide[0], 1e-6, True, True), norm_reference(wide, wide[0], 1e-6, 1), 1e-5)


def check_act_mul():
    torch.manual_seed(0)
    for dtype in (torch.float32, *HALVES):
        whole = (torch.randn(3, 5, 2 * 37) * 3).to(dtype)
        flat = [part.contiguous() for part in whole.chunk(2, -1)]
        turned = [part.transpose(0, 1) for part in flat]
        layouts = (flat, whole.chunk(2, -1), turned, (flat[0], whole.chunk(2, -1)[1]))
        for gate, up in layouts if dtype == torch.float32 else layouts[:2]:
            for kind, act in ((0, F.silu), (1, functools.partial(F.gelu, approximate="tanh"))):
                double = [t.double().requires_grad_() for t in (gate, up)]
                wanted = act(double[0]) * double[1]
                d = torch.randn(gate.shape).to(dtype)
                wanted.backward(d.double())
                near(kernels().act_mul(gate, up, kind, block=64), wanted, tolerance(dtype))
                for product in (False, True):
                    given = d.clone()
                    got = kernels().act_mul_backward(given, gate, up, kind, product, block=64)
                    for gradient, reference in zip(got, double, strict=True):
                        near(gradient, reference.grad, tolerance(dtype))
                    near(given, wanted if product else d, tolerance(dtype))


def check_act_mul_far_out():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    for kind in (0, 1):
        assert kernels().act_mul(gate, torch.ones(5), kind).tolist() == [0, 0, 0, 100, 1e4]
        dgate, _ = kernels().act_mul_backward(torch.ones(5), gate, torch.ones(5), kind, False)
        assert dgate.tolist() == [0, 0, 0.5, 1, 1]


def turn_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_reference(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn_half(q) * sin, k * cos + turn_half(k) * sin


def check_rotate():
    torch.manual_seed(0)
    for dtype in (torch.float32, *HALVES):
        for batch, angles, heads, groups, length, width in (
            (2, 2, 3, 1, 5, 6),
            (3, 1, 4, 2, 1, 16),
            (1, 1, 5, 5, 4, 10),
        ):
            whole = torch.randn(batch, length, heads + 2 * groups, width).to(dtype)
            plain = [torch.randn(batch, n, length, width).to(dtype) for n in (heads, groups)]
            slices = [x.transpose(1, 2) for x in (whole[:, :, :heads], whole[:, :, heads : heads + groups])]
            turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
            last = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in plain]
            gapped = [torch.randn(batch, 2 * n, length, width).to(dtype)[:, ::2] for n in (heads, groups)]
            cos, sin = torch.randn(2, angles, length, width).to(dtype)
            layouts = (plain, slices, turned, last, gapped)
            for q, k in layouts if dtype == torch.float32 else layouts[:2]:
                ours = kernels().rotate(q, k, cos, sin)
                theirs = rotate_reference(q.double(), k.double(), cos.double(), sin.double())
                for a, b in zip(ours, theirs, strict=True):
                    near(a, b, tolerance(dtype))
                double = [x.double().requires_grad_() for x in (q, k)]
                torch.autograd.backward(
                    rotate_reference(*double, cos.double(), sin.double()), [x.double() for x in (q, k)]
                )
                back = kernels().rotate(q, k, cos, sin, back=True)
                for a, b in zip(back, double, strict=True):
                    near(a, b.grad, tolerance(dtype))
            assert kernels().rotate(*turned, cos, sin)[0].stride() == turned[0].stride()


def check_rounding():
    """In float16 a fused part gives the very numbers of the original, but for the last bit of a few."""
    torch.manual_seed(0)
    for name in ("llama", "gemma3-window"):
        model = tiny.make(name, dtype=torch.float16)
        layer = model.model.layers[0]
        with torch.no_grad():
            layer.input_layernorm.weight.normal_()
        x = torch.randn(40, 32).half()
        wanted = [part(x) for part in (layer.input_layernorm, layer.mlp)]
        fuse(model)
        for ours, theirs in zip([layer.input_layernorm(x), layer.mlp(x)], wanted, strict=True):
            assert (ours != theirs).float().mean() < 0.01
    x, angle = torch.randn(2, 3, 40, 8).half(), torch.randn(2, 40, 8).half()
    assert torch.equal(kernels().rotate(x, x, angle, angle)[0], rotate_reference(x, x, angle, angle)[0])


# --- models ---------------------------------------------------------------------------------------------------------

NORMS = {"input_layernorm", "post_attention_layernorm"}
HEADS = {"self_attn.q_norm", "self_attn.k_norm"}
SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def names(parts, layers=2):
    return {f"model.layers.{i}.{part}" for i in range(layers) for part in {"self_attn", "mlp"} | parts} | {"model.norm"}


def spread(model):
    """Weights of norms that differ from ones and zeros."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def results(model, rows=2, **settings):
    """Logits, and the gradients of all that learns."""
    torch.manual_seed(5)
    ids = torch.randint(2, tiny.VOCABULARY, (rows, 7))
    for parameter in model.parameters():
        parameter.grad = None
    logits = model(ids, use_cache=False, **settings).logits
    (logits.float() * torch.randn(logits.shape)).sum().backward()
    return logits, {name: x.grad for name, x in model.named_parameters()}


def same(ours, theirs, tolerance):
    near(ours[0], theirs[0], tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (gradient is None) == (ours[1][name] is None), name
        if gradient is not None:
            near(ours[1][name], gradient, tolerance)


def compare(name, parts, halves=False, **settings):
    """``halves``: in two bytes as well, for the models that have every kind of part between them."""
    model = spread(tiny.make(name, **settings))
    copied = copy.deepcopy(model)
    done = fuse(copied)
    assert len(done) == len(set(done))
    assert set(done) == names(parts)
    same(results(copied), results(model), 1e-5)
    if not halves:
        return
    same(results(copied.half()), results(model.half()), 0.03)
    ids = torch.randint(2, tiny.VOCABULARY, (1, 5))
    ours, theirs = (made.bfloat16()(ids, use_cache=False).logits.float() for made in (copied, model))
    assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def check_qwen2():
    compare("qwen2-grouped", NORMS)


def check_qwen3():
    compare("qwen3", NORMS | HEADS, halves=True)


def check_llama():
    compare("llama", NORMS)


def check_mistral():
    compare("mistral-window", NORMS)


def check_gemma3():
    compare("gemma3-window", NORMS | HEADS | SANDWICH, halves=True)


def check_phi3():
    compare(None, NORMS, config="Phi3Config")


def check_cohere():
    """Its norm subtracts the mean and its rotation pairs neighbours: only the MLPs fit."""
    model = tiny.make("cohere-scale")
    copied = copy.deepcopy(model)
    assert set(fuse(copied)) == {f"model.layers.{i}.mlp" for i in range(2)}
    same(results(copied), results(model), 1e-5)


def check_partial_rotation():
    """GPT-NeoX turns a quarter of a head: its own function does that."""
    model = tiny.make("gpt-neox")
    copied = copy.deepcopy(model)
    fuse(copied)
    same(results(copied), results(model), 1e-7)


def check_second_call():
    model = tiny.make("qwen3")
    assert fuse(model)
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    assert fuse(model) == []
    assert forwards == {name: vars(module).get("forward") for name, module in model.named_modules()}


def check_deepcopy():
    model = tiny.make("qwen2-grouped")
    fuse(model)
    before = results(model, 1)
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if "forward" in vars(module):
            assert vars(module)["forward"].__self__ is module
    same(results(copied, 1), before, 0)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(results(copied, 1)[0], before[0])
    same(results(model, 1), before, 0)


def check_pickle():
    """A model that was saved whole comes back as it was before, and can be fused again."""
    model = tiny.make("llama")
    wanted, done = results(model), fuse(model)
    loaded = pickle.loads(pickle.dumps(model))
    same(results(loaded), wanted, 0)
    assert fuse(loaded) == done


def check_nothing_else_changes():
    import transformers.models.qwen3.modeling_qwen3 as file

    model, other = tiny.make("qwen3"), tiny.make("qwen3")
    model.train()
    model.model.layers[0].mlp.eval()
    classes = (file.Qwen3RMSNorm, file.Qwen3MLP, file.Qwen3Attention)
    before = [kind.forward for kind in classes], file.apply_rotary_pos_emb, dict(vars(file))
    wanted, state = results(other), {name: x.clone() for name, x in model.state_dict().items()}
    modes, dice = [module.training for module in model.modules()], torch.random.get_rng_state()
    assert fuse(model)
    assert torch.equal(dice, torch.random.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert before == ([kind.forward for kind in classes], file.apply_rotary_pos_emb, vars(file))
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert not any("forward" in vars(module) for module in other.modules())
    with mock.patch.object(kernels(), "norm", side_effect=AssertionError("another model's norm")):
        same(results(other), wanted, 0)


def check_without_kernels():
    """Where no kernel can run a fused model computes what it did before, bit for bit."""
    model = spread(tiny.make("gemma3-window"))
    wanted = results(model, 1)
    fuse(model)
    assert not torch.equal(results(model, 1)[0], wanted[0])
    with mock.patch.object(fused, "_interprets", return_value=False):
        same(results(model, 1), wanted, 0)
        assert fuse(tiny.make("llama")) == []


def check_inference_mode():
    model = spread(tiny.make("qwen3"))
    ids = torch.randint(2, tiny.VOCABULARY, (2, 7))
    wanted = model(ids).logits
    fuse(model)
    with torch.inference_mode():
        near(model(ids).logits, wanted, 1e-5)
        prompt = model(ids[:, :4], use_cache=True)
        steps = [prompt.logits]
        for i in range(4, 7):
            steps.append(model(ids[:, i : i + 1], past_key_values=prompt.past_key_values, use_cache=True).logits)
        near(torch.cat(steps, 1), wanted, 1e-5)


def check_checkpointing():
    model = spread(tiny.make("qwen3")).train()
    wanted = results(model, 1)
    fuse(model)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        same(results(model, 1), wanted, 1e-5)


def check_frozen():
    for learns in ("norm", "q_proj", "down_proj", "k_norm", "embed", "0.mlp"):
        model = spread(tiny.make("qwen3", num_hidden_layers=1))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learns in name)
        wanted = results(model, 1)
        fuse(model)
        same(results(model, 1), wanted, 1e-5)


def check_autocast():
    model = spread(tiny.make("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = results(model)
        assert fuse(model)
        same(results(model), wanted, 0.1)
