"""What needs no vLLM: the error without it, which weights are pushed, whose log-probabilities are the old ones."""

import importlib.util
import re

import pytest
import torch

import rpg
from engine_vllm.small_models import PROMPTS, make
from rpg.console import install
from rpg.models.plain_weights import merged_state, stored_state
from rpg.rollout.vllm import VllmEngine
from rpg.run.config import Config, RolloutConfig
from rpg.training.old_logp import OldLogp

peft = pytest.importorskip("peft")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_one_line_says_what_to_install():
    with pytest.raises(ValueError, match=re.escape(f"needs vLLM: {install('rpg-rl[vllm]')}")):
        VllmEngine(make(), [1], 100)


def test_a_model_without_an_end_token_is_one_line():
    with pytest.raises(ValueError, match=r"^the model has no end token: name one with rollout.end_tokens$"):
        VllmEngine(make(), [], 100)


@pytest.mark.parametrize(
    ("expected", "how"),
    [
        (True, {}),
        (True, {"dtype": torch.float32}),
        (True, {"dtype": torch.float32, "top_p": 0.9}),
        (True, {"old_logp": "recompute"}),
        (False, {"old_logp": "engine"}),
        (False, {"engine": "native", "dtype": torch.float32}),
    ],
    ids=str,
)
def test_old_logp_are_computed_anew_unless_told_otherwise(expected, how):
    dtype = how.pop("dtype", torch.bfloat16)
    rule = OldLogp(Config(rollout=RolloutConfig(**{"engine": "vllm", **how})), rpg.algorithm("dapo").loss, dtype)
    for kl in (0.0, 1.0):
        rule.measure({"mismatch/kl": kl})
        assert rule.recompute == expected


# ---- weights by their plain names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_state_of_a_plain_model_is_its_own(tied):
    model = make(tied=tied)
    found = dict(merged_state(model))
    expected = model.state_dict()
    assert set(expected) - set(found) == ({"lm_head.weight"} if tied else set())
    assert all(found[name].data_ptr() == expected[name].data_ptr() for name in found)  # no copies
    assert not any(value.requires_grad for value in found.values())


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=["o_proj", "down_proj"], init_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "oft": lambda: peft.OFTConfig(oft_block_size=16, target_modules=["q_proj"], init_weights=False),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_adapters_are_merged_by_their_own_rule(method):
    plain, model = make(), make()
    peft.inject_adapter_in_model(CONFIGS[method](), model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ia3_l" in name:
                p.add_(torch.randn_like(p), alpha=0.3)
        ids = torch.tensor([PROMPTS[0]])
        before = {name: p.clone() for name, p in model.named_parameters()}
        expected = model(ids).logits
        assert float((expected - plain(ids).logits).abs().max()) > 0.01
        found = dict(merged_state(model))
        missing = plain.load_state_dict(found, strict=False)
        assert missing.missing_keys == ["lm_head.weight"]  # tied
        assert not missing.unexpected_keys
        assert float((plain(ids).logits - expected).abs().max()) < 1e-4
        assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_adapter_that_is_off_or_merged_counts_once():
    plain, model = make(), make()
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]
    name = "model.layers.0.self_attn.q_proj.weight"
    own, with_adapter = plain.state_dict()[name], dict(merged_state(model))[name].clone()
    assert not torch.equal(own, with_adapter)
    for layer in layers:
        layer.enable_adapters(False)
    assert torch.equal(dict(merged_state(model))[name], own)
    for layer in layers:
        layer.enable_adapters(True)
        layer.merge()
    assert torch.equal(dict(merged_state(model))[name], with_adapter)


def test_a_layer_that_is_trained_whole_beside_an_adapter():
    plain, model = make(tied=False), make(tied=False)
    peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.lm_head.modules_to_save["default"].weight.add_(1)
    found = dict(merged_state(model))
    assert set(found) == set(plain.state_dict())
    assert torch.equal(found["lm_head.weight"], plain.lm_head.weight + 1)


def test_an_adapter_on_tied_weights_is_refused():
    model = make(tied=True)
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["embed_tokens"]), model)
    with pytest.raises(ValueError, match=r"^peft.options: model.embed_tokens shares its weights[^\n]*$"):
        dict(merged_state(model))


def test_experts_have_the_names_of_their_files():
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
    )
    names = dict(stored_state(transformers.AutoModelForCausalLM.from_config(config)))
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
