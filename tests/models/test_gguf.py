"""GGUF files, written here as llama.cpp does: the model in them is the model they were made from."""

import re

import gguf
import numpy as np
import pytest
import torch
import transformers

import tiny
from models.gguf_files import MODELS, SPECIAL, made, permuted, tokens, write
from rpg.console import install
from rpg.models.gguf import end_ids
from rpg.models.loading import load
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine
from rpg.run.config import OptimConfig
from rpg.training.optim import make_optimizer

IDS = torch.tensor([[5, 6, 7, 8, 30, 31, 2, 3]])


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_model_in_the_file(name, tmp_path):
    model = made(name)
    found, _ = load(str(write(tmp_path / "m.gguf", model)))
    assert torch.allclose(logits(found), logits(model), atol=1e-5)
    assert found.config.tie_word_embeddings == (name == "llama-tied")
    assert all(p.requires_grad for p in found.parameters())
    assert getattr(found.config, "quantization_config", None) is None
    assert not found.training
    half, _ = load(str(tmp_path / "m.gguf"), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_quantised_weights_are_those_that_gguf_gives(name, kind, tmp_path):
    model, kind = made(name), gguf.GGMLQuantizationType[kind]
    found, _ = load(str(write(tmp_path / "m.gguf", model, kind)))
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    layer = found.model.layers[1]
    assert np.array_equal(layer.mlp.down_proj.weight.detach().numpy(), stored["blk.1.ffn_down.weight"])
    assert np.array_equal(found.model.embed_tokens.weight.detach().numpy(), stored["token_embd.weight"])
    for projection, key, heads in ((layer.self_attn.q_proj, "attn_q", 4), (layer.self_attn.k_proj, "attn_k", 2)):
        own = projection.weight.detach().numpy()
        assert np.array_equal(permuted(own, heads) if name == "llama" else own, stored[f"blk.1.{key}.weight"])
    assert not torch.equal(found.lm_head.weight, model.lm_head.weight)
    near = {"Q8_0": 0.02, "Q4_0": 0.3, "Q5_1": 0.1}[kind.name]
    assert (layer.mlp.down_proj.weight - model.model.layers[1].mlp.down_proj.weight).abs().max() < near


def test_it_trains_samples_and_is_saved_as_any_other(tmp_path):
    policy = Policy.load(str(write(tmp_path / "m.gguf", made("qwen2"), gguf.GGMLQuantizationType.Q8_0)))
    assert policy.packs
    assert policy.linear
    ids, mask = IDS.repeat(2, 1), torch.ones(2, 3, dtype=torch.bool)
    optimizer = make_optimizer(policy.parameters(), OptimConfig(lr=1e-2))
    before = policy.score(ids, torch.tensor([5, 5]), mask).logp_BT.sum()
    (-before).backward()
    optimizer.step()
    assert policy.score(ids, torch.tensor([5, 5]), mask).logp_BT.sum() > before
    NativeEngine(policy.model, policy.tokenizer, end_ids=policy.end_ids()).generate([[5, 6]], 2, 4)
    policy.save(tmp_path / "saved")
    assert "gguf" not in (tmp_path / "saved" / "config.json").read_text()
    again = Policy.load(str(tmp_path / "saved"))
    assert torch.equal(logits(again.model), logits(policy.model))
    assert again.encode("abc") == policy.encode("abc")
    assert again.end_ids() == policy.end_ids()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(plain), logits(policy.model))


def test_text_and_ends_are_from_the_file(tmp_path):
    policy = Policy.load(str(write(tmp_path / "m.gguf", made("qwen2"))))
    start, end, newline = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"], tokens().index("Ċ")
    word = [tokens().index(c) for c in "user"]
    b = tokens().index("b")
    assert policy.encode("abc") == [start, *word, newline, tokens().index("abc"), end, newline, start, b]
    assert policy.end_ids() == [37, 39]
    assert policy.model.generation_config.eos_token_id == [39, 37]
    assert policy.tokenizer.pad_token_id == 37
    assert policy.decode([tokens().index("ab"), end, 37]) == "ab"
    known = end_ids(gguf.GGUFReader(write(tmp_path / "none.gguf", made("qwen2"), ends=False)))
    assert known == [39, 37]  # by what they are called


def test_tokenizer_files_beside_it_are_not_its_own(tmp_path):
    alone = Policy.load(str(write(tmp_path / "m.gguf", made("llama"))))
    tiny.tokenizer("{{ messages[0]['content'] }}").save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    found = Policy.load(str(tmp_path / "m.gguf"))
    assert found.encode("abc") == alone.encode("abc")
    assert found.encode("abc", chat=False) == [tokens().index("abc")]
    assert found.end_ids() == [37, 39]


def test_what_cannot_be_read_is_one_line(tmp_path):
    whole = write(tmp_path / "m.gguf", made("llama")).read_bytes()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(whole[:300])
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    write(tmp_path / "scaled.gguf", made("llama"), llama__rope__scaling__type="yarn")
    model = made("llama")
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up" not in k}
    model.state_dict = lambda: state
    write(tmp_path / "lacking.gguf", model)
    for name, text in {
        "text": "no GGUF file",
        "cut": "is damaged",
        "half": "is damaged",
        "scaled": "scales its rotary positions",
        "lacking": "lacks 1 of the weights of LlamaForCausalLM, model.layers.1.mlp.up_proj.weight",
    }.items():
        with pytest.raises(ValueError, match=rf"^[^\n]*{text}[^\n]*$"):
            load(str(tmp_path / f"{name}.gguf"))


def test_a_kind_of_model_that_transformers_does_not_know(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "nonesuch")
    writer.add_tensor("x.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"^[^\n]*architecture nonesuch[^\n]*Hugging Face folder[^\n]*$"):
        load(str(tmp_path / "m.gguf"))


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", made("llama"))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match=re.escape(install("rpg-rl[gguf]"))):
        load(str(path))


def test_nothing_of_the_reader_is_left_changed(tmp_path):
    own = gguf.GGUFReader
    load(str(write(tmp_path / "m.gguf", made("llama"))))
    assert gguf.GGUFReader is own
