"""Adapters: only they are trained, they are what is sampled from, and PEFT reads what is saved."""

import json
import re

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import tiny
from rollout.engines import engine, forward_logp
from rpg.console import install
from rpg.kernels.fused import fuse
from rpg.kernels.merged import merge, merging
from rpg.models import BUILTIN, adapters
from rpg.models.architecture import head_is_linear
from rpg.models.policy import Policy
from rpg.run.config import OptimConfig, PeftConfig
from rpg.training.optim import make_optimizer

IDS = torch.tensor([[5, 6, 7, 3, 9, 10, 11, 12], [4, 4, 9, 2, 8, 30, 31, 1]])
START, MASK = torch.tensor([3, 4]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
LORA = PeftConfig("lora", {"r": 4})
METHODS = {
    "lora": {"r": 4},
    "dora": {"r": 4},
    "ia3": {},
    "oft": {"oft_block_size": 4, "target_modules": "all-linear"},
    "boft": {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "vera": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "loha": {"r": 4, "target_modules": "all-linear"},
    "lokr": {"r": 4, "target_modules": "all-linear"},
    "hra": {"r": 4, "target_modules": "all-linear"},
    "ln_tuning": {},
}


@pytest.fixture
def base(tmp_path):
    Policy(tiny.make("qwen2-grouped"), tiny.tokenizer()).save(tmp_path / "base")
    return tmp_path / "base"


def load(base, peft_config=LORA, **how):
    return Policy.load(str(base), peft=peft_config, **how)


def learn(policy, steps=3, lr=0.05, rows=(IDS, START, MASK)):
    optimizer = make_optimizer(policy.parameters(), OptimConfig(lr=lr))
    for _ in range(steps):
        optimizer.zero_grad()
        (-policy.score(*rows).logp_BT.sum()).backward()
        optimizer.step()
    return policy


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(base):
    plain, policy = Policy.load(str(base)), load(base, PeftConfig("lora"))
    assert torch.equal(logits(policy.model), logits(plain.model))
    assert type(policy.model) is type(plain.model)
    assert policy.adapted
    assert policy.fresh
    assert all("lora_" in name for name, _ in policy.parameters())
    config = policy.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in policy.parameters()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert policy.packs
    assert policy.linear
    assert not plain.adapted
    assert not plain.fresh


@pytest.mark.parametrize("method", METHODS)
def test_training_moves_the_adapter_alone(method, base):
    policy = load(base, PeftConfig(method, METHODS[method]))
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    start = policy.score(IDS, START, MASK).logp_BT.sum()
    off = logits(policy.model)
    learn(policy)
    assert policy.score(IDS, START, MASK).logp_BT.sum() > start + 0.05
    assert policy.fresh
    for name, p in policy.model.named_parameters():
        assert p.requires_grad or torch.equal(p, before[name]), name
    with adapters.switched_off(policy.model):
        assert torch.allclose(logits(policy.model), off, atol=1e-5)
    assert not torch.allclose(logits(policy.model), off, atol=1e-2)
    assert all(p.requires_grad for _, p in policy.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_the_whole_weight_through_the_chain_rule(base, recompute):
    """W + s·B·A: dB = s·dW·Aᵀ, dA = s·Bᵀ·dW."""
    policy = learn(load(base, dtype=torch.float64))
    merged = Policy(tiny.make("qwen2-grouped", dtype=torch.float64), tiny.tokenizer())
    weights = dict(merged.model.named_parameters())
    scale = policy.model.model.layers[0].self_attn.q_proj.scaling["default"]
    pairs = {}
    for name, p in policy.model.named_parameters():
        if ".lora_A." in name:
            b = dict(policy.model.named_parameters())[name.replace("lora_A", "lora_B")]
            key = name.partition(".lora_A")[0] + ".weight"
            pairs[key] = p, b
            weights[key].data += scale * (b @ p).detach()
    for one in (policy, merged):
        one.model.zero_grad()
        one.score(IDS, START, MASK, recompute=recompute).logp_BT.double().pow(2).sum().backward()
    assert len(pairs) == 14
    for key, (a, b) in pairs.items():
        whole = weights[key].grad
        near = {"rtol": 1e-4, "atol": 1e-5 * float(whole.norm())}
        assert torch.allclose(b.grad, scale * whole @ a.T, **near), key
        assert torch.allclose(a.grad, scale * b.T @ whole, **near), key
        assert b.grad.abs().max() > 0


def test_an_adapter_begins_as_the_same_numbers_and_draws_none(base):
    random = torch.random.get_rng_state()
    one = load(base)
    assert torch.equal(torch.random.get_rng_state(), random)
    torch.rand(7)
    two = load(base)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.parameters(), two.parameters(), strict=True))


def test_what_begins_as_something_is_not_undone_by_switching_it_off(base):
    assert not load(base, PeftConfig("lora", {"r": 4, "init_lora_weights": "pissa"})).fresh
    assert not load(base, PeftConfig("lora", {"r": 4, "init_lora_weights": False})).fresh


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", ["lora", "dora", "ia3", "oft"])
def test_responses_are_the_adapted_models(method, graphs, base):
    policy, engine.graphs = load(base, PeftConfig(method, METHODS[method])), graphs
    run = engine(policy.model)
    learn(policy)
    found = run.generate([[5, 6, 7], [4, 4]], 3, 8, seed=1)
    worst = 0.0
    for prompt, group in zip([[5, 6, 7], [4, 4]], found, strict=True):
        for r in group:
            assert r.logp == pytest.approx(forward_logp(policy.model, prompt, r.tokens).tolist(), abs=1e-4)
            with adapters.switched_off(policy.model):
                worst = max(worst, (forward_logp(policy.model, prompt, r.tokens) - torch.tensor(r.logp)).abs().max())
    assert worst > 0.05  # and not the base's


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["o_proj", "up_proj"], ["lm_head", "q_proj"]])
def test_projections_with_an_adapter_are_not_merged(targets, base):
    policy = load(base, PeftConfig("lora", {"r": 4, "target_modules": targets}))
    merge(policy.model)
    fuse(policy.model)
    learn(policy)
    with merging():
        assert torch.allclose(policy.model(IDS).logits, logits(policy.model), atol=1e-5)
    for name, module in policy.model.named_modules():
        if hasattr(module, "_merged"):
            assert "base_layer" not in name


def test_a_head_with_an_adapter_is_not_taken_for_a_matrix(base):
    policy = load(base, PeftConfig("lora", {"r": 4, "target_modules": ["lm_head"]}))
    assert not head_is_linear(policy.model)
    assert not policy.linear
    assert policy.apart
    learn(policy)
    expected = logits(policy.model).float().log_softmax(-1)
    found = policy.score(IDS, START, MASK).logp_BT
    assert found[0, 0].item() == pytest.approx(float(expected[0, 2, IDS[0, 3]]), abs=1e-5)
    engine.graphs = False
    (r,) = engine(policy.model).generate([[5, 6]], 1, 6)[0]
    assert r.logp == pytest.approx(forward_logp(policy.model, [5, 6], r.tokens).tolist(), abs=1e-4)


def test_bfloat16_has_masters_so_that_small_updates_are_not_lost(base):
    policy = load(base, dtype=torch.bfloat16)
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    optimizer = make_optimizer(policy.parameters(), OptimConfig(lr=1e-5, warmup=0))
    assert {x.dtype for x in optimizer.masters.values()} == {torch.float32}
    assert len(optimizer.masters) == len(policy.parameters())
    _, a = next((name, p) for name, p in policy.parameters() if "lora_A" in name)
    before = optimizer.masters[a].clone()
    for _ in range(20):
        optimizer.zero_grad()
        (-policy.score(IDS, START, MASK).logp_BT.sum()).backward()
        optimizer.step()
    moved = (optimizer.masters[a] - before).abs()
    assert 1e-5 < moved.max() < 3e-4  # a 256th of most weights is more
    assert torch.equal(a, optimizer.masters[a].bfloat16())


def test_bfloat16_weights_of_an_adapter_cost_no_more_than_those_of_the_model(base):
    """Against a run in float32: as near as float32 weights of an adapter in a bfloat16 model are."""
    errors = {"half": 0.0, "single": 0.0}
    for seed in range(4):
        ids = torch.randint(2, 40, (8, 16), generator=torch.Generator().manual_seed(seed))
        rows = ids, torch.full((8,), 5), torch.ones(8, 11, dtype=torch.bool)
        found = {}
        for name, dtype in (("whole", torch.float32), ("half", torch.bfloat16), ("single", torch.bfloat16)):
            policy = load(base, dtype=dtype)
            for _, p in policy.parameters() if name == "single" else []:
                p.data = p.data.float()
            learn(policy, 8, 0.02, rows)
            found[name] = policy.score(*rows).logp_BT.detach()
        for name in errors:
            errors[name] += float((found[name] - found["whole"]).abs().mean())
    assert errors["half"] < 1.3 * errors["single"]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_by_us_and_by_peft(method, base, tmp_path):
    policy = learn(load(base, PeftConfig(method, METHODS[method])))
    policy.save(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base)
    again = Policy.load(str(tmp_path / "saved"))
    assert torch.equal(logits(again.model), logits(policy.model))
    assert [name for name, _ in again.parameters()] == [name for name, _ in policy.parameters()]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.parameters(), policy.parameters(), strict=True))
    assert again.adapted
    assert not again.fresh
    again.save(tmp_path / "twice")
    twice = json.loads((tmp_path / "twice" / "adapter_config.json").read_text())
    for config in (about, twice):  # PEFT writes a set, in any order
        config["target_modules"] = sorted(config.get("target_modules") or [])
    assert twice == about
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert torch.allclose(
        logits(peft.PeftModel.from_pretrained(plain, tmp_path / "saved")), logits(policy.model), atol=1e-5
    )


def test_transformers_loads_it_by_itself(base, tmp_path):
    policy = learn(load(base))
    policy.save(tmp_path / "saved")
    assert torch.allclose(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(policy.model), atol=1e-5
    )


@pytest.mark.parametrize("options", [{}, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}])
def test_saving_asks_no_hub_and_keeps_the_trained_weights(options, base, tmp_path, monkeypatch):
    policy = learn(load(base, PeftConfig("lora", {"r": 4, **options})))
    vars(policy.model)[adapters.WRAPPER].peft_config["default"].base_model_name_or_path = "org/name"

    def fail(*args, **kwargs):
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", fail)
    policy.save(tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert sum(x.numel() for x in found.values()) == sum(p.numel() for _, p in policy.parameters())
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = str(base)
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(about))
    assert torch.equal(logits(Policy.load(str(tmp_path / "saved")).model), logits(policy.model))


def test_the_builtin_model_is_found_from_anywhere(tmp_path, monkeypatch):
    policy = Policy.load("builtin", peft=LORA)
    policy.save(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(BUILTIN)
    about["base_model_name_or_path"] = "/elsewhere/rpg/models/builtin"
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(about))
    monkeypatch.chdir(tmp_path)
    assert Policy.load("./saved").adapted


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("lorra", {}, "there is no 'lorra'; did you mean lora?"),
        ("zzz", {}, "there is no 'zzz'; there are .*lora"),
        ("lora", {"rank": 4}, "lora has no option 'rank'"),
        ("lora", {"lora_alfa": 4}, "did you mean lora_alpha?"),
        ("lora", {"lora_dropout": 0.1}, "lora_dropout must be 0"),
        ("lora", {"r": 0}, "peft.method lora does not fit"),
        ("lora", {"target_modules": ["nonesuch"]}, "peft.method lora does not fit this model"),
        ("prefix_tuning", {}, "prefix_tuning learns a prompt"),
        ("prompt_tuning", {}, "prompt_tuning learns a prompt"),
        ("adalora", {}, "adalora does not work here"),
        ("lora", {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changes the model at random: take pissa"),
        ("ia3", {"target_modules": ["q_proj"]}, "ia3 does not fit this model: .*feedforward_modules.* subset"),
        ("trainable_tokens", {}, "trainable_tokens does not fit this model: "),
        ("lora", {"alora_invocation_tokens": [5, 6]}, "lora does not fit this model: its weights do not change what"),
        (None, {"r": 4}, "peft.options without a method"),
    ],
)
def test_a_mistake_is_one_line(method, options, text, base):
    with pytest.raises(ValueError, match=rf"^[^\n]*{text.replace('?', '[?]')}[^\n]*$"):
        load(base, PeftConfig(method, options))


def test_what_a_method_lacks_is_one_line(base, monkeypatch):
    def fail(self):
        raise ImportError("this method needs\na package")

    monkeypatch.setattr(peft.LoraConfig, "__post_init__", fail)
    with pytest.raises(ValueError, match=r"^peft.options of lora: this method needs a package$"):
        load(base)


def test_an_adapter_that_was_split_off_at_random_is_not_loaded(base, tmp_path):
    load(base).save(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    about["init_lora_weights"] = "pissa_niter_4"
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"^[^\n]*pissa_niter_4 changes the model at random[^\n]*$"):
        Policy.load(str(tmp_path / "saved"))


def test_tokens_that_are_trained_need_not_be_the_first_ones(base):
    policy = load(base, PeftConfig("trainable_tokens", {"token_indices": [30, 31]}))
    assert policy.fresh
    assert learn(policy).score(IDS, START, MASK).logp_BT.sum() > load(base).score(IDS, START, MASK).logp_BT.sum()


def test_an_adapter_goes_on_as_what_it_is(base, tmp_path):
    learn(load(base)).save(tmp_path / "saved")
    assert not load(tmp_path / "saved").fresh
    with pytest.raises(ValueError, match=r"^peft.options.r is 8, but the model is an adapter made with 4$"):
        load(tmp_path / "saved", PeftConfig("lora", {"r": 8}))
    with pytest.raises(ValueError, match=r"^peft.method is ia3, but the model is a lora adapter[^\n]*$"):
        load(tmp_path / "saved", PeftConfig("ia3"))


def test_an_adapter_without_its_model(base, tmp_path):
    learn(load(base)).save(tmp_path / "saved")
    base.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=rf"^[^\n]*saved is an adapter for {base}: [^\n]*no such folder[^\n]*$"):
        Policy.load(str(tmp_path / "saved"))
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = None
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"^[^\n]*does not name the model it is for[^\n]*$"):
        Policy.load(str(tmp_path / "saved"))


def test_without_the_package_the_extra_is_named(base, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=re.escape(install("rpg-rl[peft]"))):
        load(base)
