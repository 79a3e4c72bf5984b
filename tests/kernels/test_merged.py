"""Projections as one product: the same model, the same parameters, the same files."""

import copy

import pytest
import torch
import transformers

import tiny
from rpg.kernels import merged as rooms
from rpg.kernels.merged import MergedProjections, adjacent, merge, merging, side_by_side

IDS = torch.arange(2, 14)[None]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def logits(model):
    with merging():
        return model(IDS).logits


def plain_logits(model):
    with torch.no_grad():
        return model(IDS).logits


def products(model, monkeypatch):
    """How many products there are that add nothing but a bias, and how many that add a residual."""
    seen = {}
    for where, name in ((torch.nn.functional, "linear"), (torch.Tensor, "addmm_")):
        own, seen[name] = getattr(where, name), []
        monkeypatch.setattr(where, name, lambda *a, own=own, name=name: (seen[name].append(0), own(*a))[1])
    logits(model)
    monkeypatch.undo()
    return len(seen["linear"]), len(seen["addmm_"])


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_same_logits_from_fewer_products(name, monkeypatch):
    model = tiny.make(name)
    before, (apart, added) = plain_logits(model), products(model, monkeypatch)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    done = merge(model)
    assert merge(model) == []
    assert torch.allclose(logits(model), before, atol=1e-5)
    assert torch.equal(plain_logits(model), before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    groups = {id(m._merged[0]): m._merged[0] for m in model.modules() if hasattr(m, "_merged")}
    saved = sum(len(group.layers) - 1 for group in groups.values())
    folded = [key for key in done if key.rpartition(".")[2].isdigit()]
    assert len(groups) + len(folded) == len(done)
    assert products(model, monkeypatch) == (apart - saved - 2 * len(folded), added + 2 * len(folded))
    assert saved == {"gpt-neox": 0, "gpt2": 0, "phi-bias": 4}.get(name, 6)  # of two layers
    assert len(folded) == (2 if name.startswith(("llama", "smollm", "qwen", "mistral", "granite")) else 0)
    assert all(group.held is None for group in groups.values())


def test_no_copy_and_updates_in_place_are_seen():
    model = tiny.make("qwen2-grouped")
    parameters = dict(model.named_parameters())
    merge(model)
    assert all(parameters[name] is p for name, p in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert adjacent([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    before = logits(model)
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)
        attention.v_proj.bias.add_(1)
    plain = tiny.make("qwen2-grouped")
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(logits(model), plain_logits(plain), atol=1e-5)
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_gradients_are_those_of_the_plain_model():
    plain, merged = tiny.make("qwen2-grouped"), tiny.make("qwen2-grouped")
    merge(merged)
    for model in (plain, merged):
        model(IDS).logits.square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), merged.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_gradients_of_one_product_are_those_of_several(name, monkeypatch):
    """As on a GPU: jointly, whether or not gradients are asked for."""
    monkeypatch.setattr(rooms, "JOINT_ON", {"cpu"})
    plain, joint = tiny.make(name).double(), tiny.make(name).double()
    merge(joint)
    calls, own = [], rooms._Joint.apply
    monkeypatch.setattr(rooms._Joint, "apply", lambda *a: (calls.append(0), own(*a))[1])
    for model in (plain, joint):
        model(IDS).logits.square().sum().backward()
    groups = {id(m._merged[0]) for m in joint.modules() if hasattr(m, "_merged")}
    assert len(calls) == len(groups)
    for (key, a), (_, b) in zip(plain.named_parameters(), joint.named_parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-12), key
    with torch.no_grad():
        assert torch.equal(joint(IDS).logits, joint(IDS).logits)
        quiet = joint(IDS).logits
    assert torch.equal(quiet, joint(IDS).logits.detach())  # with gradients and without: the same bits


def test_a_model_that_changes_projections_in_place_learns_without_joint_ones(monkeypatch):
    monkeypatch.setattr(rooms, "JOINT_ON", {"cpu"})
    plain, joint = (tiny.make(config="OlmoConfig", clip_qkv=0.5) for _ in range(2))
    assert merge(joint)
    for model in (plain, joint):
        model(IDS).logits.square().sum().backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), joint.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key
    assert torch.allclose(logits(joint), plain_logits(plain), atol=1e-5)


def test_frozen_projections_get_no_gradient_and_unused_ones_zeros(monkeypatch):
    monkeypatch.setattr(rooms, "JOINT_ON", {"cpu"})
    layers = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    owner = torch.nn.ModuleDict(dict(zip(("q_proj", "k_proj", "v_proj"), layers, strict=True)))
    merge(owner)
    layers[0].weight.requires_grad_(False)
    x = torch.randn(5, 4, requires_grad=True)
    used, _, also = (layer(x) for layer in layers)
    (used.sum() + 2 * also.sum()).backward()
    assert layers[0].weight.grad is None
    assert not layers[1].weight.grad.any()
    assert torch.allclose(layers[2].weight.grad, 2 * x.detach().sum(0).expand(2, 4))
    assert torch.allclose(layers[2].bias.grad, torch.full((2,), 10.0))
    expected = layers[0].weight.sum(0) + 2 * layers[2].weight.sum(0)
    assert torch.allclose(x.grad, expected.expand(5, 4))


def test_parts_that_lie_side_by_side_are_joined_without_a_copy():
    whole = torch.randn(3, 5, 10)
    parts = list(torch.split(whole, [4, 4, 2], -1))
    assert side_by_side(parts).data_ptr() == whole.data_ptr()
    assert torch.equal(side_by_side(parts), whole)
    for other in ([parts[1], parts[0], parts[2]], parts[:2], [parts[0], parts[1].clone(), parts[2]]):
        assert torch.equal(side_by_side(other), torch.cat(other, -1))
    assert torch.equal(side_by_side(parts[1:2]), parts[1])


def test_a_copy_stands_for_itself():
    model = tiny.make("llama")
    merge(model)
    before, other = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert torch.allclose(logits(other), before, atol=1e-5)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    assert torch.allclose(logits(other), logits(model), atol=1e-5)


def test_a_parameter_that_was_moved_away_is_used_where_it_is():
    model = tiny.make("llama")
    merge(model)
    with torch.no_grad():
        up = model.model.layers[1].mlp.up_proj
        up.weight.data = up.weight.data * 3
    plain = tiny.make("llama")
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)


def test_results_are_for_the_very_input():
    layers = [torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 2, bias=False)]
    owner = torch.nn.ModuleDict({"gate_proj": layers[0], "up_proj": layers[1]})
    assert merge(owner) == [""]
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    with merging():
        layers[0](x)
        assert torch.allclose(layers[1](y), y @ layers[1].weight.T)
        layers[0](x)
        assert torch.allclose(layers[1](x), x @ layers[1].weight.T, atol=1e-6)
        assert layers[0]._merged[0].held is None


def test_what_differs_is_left_alone():
    """Inputs of different width, a bias on some only, layers of another kind."""
    linear = torch.nn.Linear
    for pair in (
        (linear(4, 3), linear(5, 3)),
        (linear(4, 3), linear(4, 3, bias=False)),
        (linear(4, 3), linear(4, 3).double()),
        (linear(4, 3), torch.nn.Bilinear(4, 4, 3)),
    ):
        assert merge(torch.nn.ModuleDict(dict(zip(("gate_proj", "up_proj"), pair, strict=True)))) == []
    assert MergedProjections([linear(4, 3)]).held is None


def test_a_layer_that_scales_what_it_adds_is_left_alone():
    model = tiny.make("granite-scale", residual_multiplier=0.7)
    before = plain_logits(model)
    assert not [name for name in merge(model) if name.rpartition(".")[2].isdigit()]
    assert torch.allclose(logits(model), before, atol=1e-5)
    assert "forward" not in vars(model.model.layers[0])
    assert "forward" not in vars(model.model.layers[0].mlp.down_proj)


def test_a_model_that_cannot_be_tried_or_may_learn_a_scale_is_left_alone(monkeypatch):
    model = tiny.make("llama")
    model.model.layers[0].scale = torch.nn.Parameter(torch.ones(()))
    assert [name for name in merge(model) if name.rpartition(".")[2].isdigit()] == ["model.layers.1"]
    model = tiny.make("llama")
    monkeypatch.setattr(model, "forward", lambda **inputs: 1 / 0)
    assert not [name for name in merge(model) if name.rpartition(".")[2].isdigit()]
    assert "forward" not in vars(model.model.layers[0])


def test_a_residual_does_not_outlive_its_layer():
    """A pass that fails on the way leaves nothing behind that a later one would add."""
    model = tiny.make("llama")
    merge(model)
    before, attention = logits(model), model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda **inputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        logits(model)
    attention.forward = own
    assert all("_residual" not in vars(module) for module in model.modules())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["qwen2-grouped", "llama-tied", "gemma3-window"])
def test_saved_as_ever(name, tmp_path):
    model = tiny.make(name)
    model.save_pretrained(tmp_path / "plain")
    merge(model)
    model.save_pretrained(tmp_path / "merged")
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("plain", "merged")]
    assert sizes[0] == sizes[1]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for (key, a), (other, b) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(a, b)
