"""Layers written out for a decoding step: found by trial, the model's own numbers, and left alone where they differ."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig

import tiny
from rpg.kernels import layer as layers
from rpg.kernels.layer import form_of, write_out
from rpg.kernels.merged import merge
from rpg.rollout import NativeEngine

WRITTEN = ("llama", "llama-tied", "smollm2", "qwen2-grouped", "qwen3", "mistral-window", "granite-scale")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 9, 2, 8]]


def spread(model):
    """Norms' weights that are not ones."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_which_layers_are_known(name):
    model = tiny.make(name)
    assert write_out(model) == []  # before merge(model)
    merge(model)
    for i, part in enumerate(model.modules()):
        part.train(i % 2 > 0)
    dice = torch.random.get_rng_state()
    modes = [m.training for m in model.modules()]
    assert len(write_out(model)) == (2 if name in WRITTEN else 0)
    assert write_out(model) == []
    assert torch.equal(dice, torch.random.get_rng_state())
    assert modes == [m.training for m in model.modules()]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_step_is_the_models_own(name, monkeypatch):
    """The same tokens and log-probabilities with layers written out and without, and every step is."""
    model, taken = spread(tiny.make(name)), []
    own = layers.decode_layer
    monkeypatch.setattr(layers, "decode_layer", lambda *inputs: (taken.append(own(*inputs)), taken[-1])[1])
    made = NativeEngine(model, tiny.tokenizer(), 8, graphs=True)
    taken.clear()
    found = made.generate(PROMPTS, n=3, max_new_tokens=10, seed=2)
    assert all(taken)
    assert len(taken) == 2 * made.timing.steps
    monkeypatch.setattr(layers, "WRITTEN_OUT", False)
    plain = made.generate(PROMPTS, n=3, max_new_tokens=10, seed=2)
    assert len(taken) == 2 * made.timing.steps
    for group, other in zip(found, plain, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.tokens == two.tokens
            assert one.logp == pytest.approx(two.logp, abs=1e-5)


def test_a_cache_in_8_bits_is_the_same_too(monkeypatch):
    model = spread(tiny.make("qwen3"))
    made = NativeEngine(model, tiny.tokenizer(), 8, graphs=True, cache_dtype=torch.float8_e4m3fn)
    found = made.generate(PROMPTS, n=2, max_new_tokens=8, seed=2)
    monkeypatch.setattr(layers, "WRITTEN_OUT", False)
    plain = made.generate(PROMPTS, n=2, max_new_tokens=8, seed=2)
    for group, other in zip(found, plain, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.logp == pytest.approx(two.logp, abs=1e-3)


def test_weights_that_were_moved_are_used_where_they_are():
    model = spread(tiny.make("llama"))
    made = NativeEngine(model, tiny.tokenizer(), 8, graphs=True)
    with torch.no_grad():
        up = model.model.layers[1].mlp.up_proj
        up.weight.data = up.weight.data * 3
    found = made.generate(PROMPTS, max_new_tokens=6, temperature=1.0, seed=2)
    for prompt, (rollout,) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + rollout.tokens])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)[torch.arange(len(rollout.tokens)), rollout.tokens]
        assert torch.allclose(torch.tensor(rollout.logp), logp, atol=1e-4)


class Twice(nn.Module):
    """A norm, or an activation, that is not what it is taken for."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_layer_that_computes_something_else_is_left_alone():
    model = tiny.make("qwen3")
    merge(model)
    layer = model.model.layers[0]
    assert form_of(layer) is not None
    odd = [copy.deepcopy(layer) for _ in range(4)]
    odd[0].self_attn.q_norm = Twice(odd[0].self_attn.q_norm)
    odd[1].mlp.act_fn = nn.ReLU()
    odd[2].input_layernorm = Twice(odd[2].input_layernorm)
    own = odd[3].self_attn.forward
    odd[3].self_attn.forward = lambda *inputs, **named: (own(*inputs, **named)[0] * 1.1, None)
    assert [form_of(other) for other in odd] == [None] * 4


def test_an_attention_that_turns_otherwise_is_left_alone(monkeypatch):
    import transformers.models.llama.modeling_llama as file

    model = tiny.make("llama")
    merge(model)
    own = file.apply_rotary_pos_emb
    for odd in (lambda q, k, cos, sin: own(q, k, sin, cos), lambda q, k, cos, sin: (own(q, k, cos, sin)[0], k)):
        monkeypatch.setattr(file, "apply_rotary_pos_emb", odd)
        assert form_of(model.model.layers[0]) is None


def test_a_model_that_rotates_half_of_each_head_keeps_its_own_layers():
    config = Glm4MoeConfig(
        vocab_size=tiny.make("llama").config.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        first_k_dense_replace=1,  # a plain layer
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        partial_rotary_factor=0.5,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = [NativeEngine(model, tiny.tokenizer(), 8, graphs=graphs) for graphs in (False, True)]
    one, two = (each.generate(PROMPTS, n=2, max_new_tokens=8, seed=2) for each in made)
    assert made[1].decoder is not None
    for a, b in zip([x for group in one for x in group], [x for group in two for x in group], strict=True):
        assert a.tokens == b.tokens
        assert a.logp == pytest.approx(b.logp, abs=1e-5)
