"""A frozen base in 4 bits under a LoRA: what is computed, what is trained, what is held, and what is refused."""

import copy
import json

import pytest
import torch

import rpg
import tiny
from rollout.engines import engine, flat, forward_logp
from rpg.costs.memory import Layout, estimate
from rpg.export.start import fresh
from rpg.export.trl import fields as of_trl
from rpg.export.verl import export as of_verl
from rpg.models import adapters, four_bits
from rpg.models.meta import shell
from rpg.models.plain_weights import merged_state
from rpg.models.policy import Policy
from rpg.run.config import Config, PeftConfig, RolloutConfig
from rpg.run.settings import build, flags_of
from rpg.training.setup import check_base
from running import metrics

IDS = torch.tensor([[5, 6, 7, 3, 9, 10, 11, 12], [4, 4, 9, 2, 8, 30, 31, 1]])
START, MASK = torch.tensor([3, 4]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
FOUR = PeftConfig("lora", {"r": 4}, 4)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def base(tmp_path):
    Policy(tiny.make("qwen2-grouped", **SIZES), tiny.tokenizer()).save(tmp_path / "base")
    return tmp_path / "base"


def load(base, peft=FOUR, **how):
    return Policy.load(str(base), peft=peft, **how)


def moved(policy, seed=0):
    """With an adapter that has learnt something."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in policy.parameters():
            p += 0.1 * torch.randn(p.shape, generator=g).to(p.dtype)
    return policy


def dense_twin(policy):
    model = copy.deepcopy(policy.model)
    four_bits.make_dense(model)
    assert not four_bits.layers(model)
    return Policy(model, policy.tokenizer)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_which_weights_are_held_so(base):
    policy, plain = load(base), Policy.load(str(base))
    names = {
        name.replace(".base_layer", "").rpartition(".")[2]
        for name, layer in policy.model.named_modules()
        if isinstance(layer, four_bits.FourBitLinear)
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(four_bits.layers(policy.model)) == 14
    assert torch.equal(policy.head(), plain.head())
    assert torch.equal(policy.model.get_input_embeddings().weight, plain.model.get_input_embeddings().weight)
    assert all("lora_" in name for name, _ in policy.parameters())
    assert policy.fresh
    assert policy.linear
    assert policy.packs


def test_rows_that_are_no_whole_blocks_stay_as_they_are(tmp_path):
    Policy(tiny.make("qwen2-grouped", hidden_size=64, intermediate_size=96), tiny.tokenizer()).save(tmp_path / "odd")
    policy = load(tmp_path / "odd")
    odd = [layer.down_proj.base_layer for layer in (x.mlp for x in policy.model.model.layers)]
    assert all(type(layer) is torch.nn.Linear for layer in odd)
    assert len(four_bits.layers(policy.model)) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_those_of_the_dense_model(base, dtype, recompute):
    policy = moved(load(base, dtype=dtype))
    twin = dense_twin(policy)
    assert torch.equal(logits(policy.model), logits(twin.model))
    assert not torch.equal(logits(policy.model), logits(moved(load(base, PeftConfig("lora", {"r": 4}))).model))
    for one in (policy, twin):
        one.score(IDS, START, MASK, recompute=recompute).logp_BT.square().sum().backward()
    gradients = [{name: p.grad for name, p in one.parameters()} for one in (policy, twin)]
    assert len(gradients[0]) == 28
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        assert torch.equal(gradient, gradients[1][name]), name


def test_the_reference_is_the_base_in_4_bits(base):
    policy = load(base)
    before = logits(policy.model)
    moved(policy)
    assert not torch.equal(logits(policy.model), before)
    with adapters.switched_off(policy.model):
        assert torch.equal(logits(policy.model), before)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_sampler_draws_from_what_is_trained(base, graphs):
    engine.graphs = graphs
    policy = moved(load(base))
    prompts = [[5, 6, 7], [3, 8, 9, 10]]
    groups = engine(policy.model).generate(prompts, 3, max_new_tokens=8, seed=1)
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            expected = forward_logp(policy.model, prompt, rollout.tokens)
            assert torch.allclose(torch.tensor(rollout.logp), expected, atol=1e-4)
    assert len(flat(groups)) == 6


def test_the_plan_counts_the_bytes_that_are_held(base):
    config = Config(model=str(base), peft=FOUR, rollout=RolloutConfig(max_new_tokens=64))
    policy = load(base, dtype=torch.bfloat16)
    planned = shell(str(base), torch.bfloat16, {}, "lora", json.dumps({"r": 4}), 4)
    sizes = [estimate(model, config, Layout(1), 64, False, False, False) for model in (planned.model, policy.model)]
    assert sizes[0] == sizes[1]
    held = {x.data_ptr(): x.untyped_storage().nbytes() for x in (*policy.model.parameters(), *buffers(policy.model))}
    assert sizes[0].weights == sum(held.values())
    layers = four_bits.layers(policy.model)
    assert four_bits.packed_bytes(policy.model) == 17 * four_bits.packed_weights(policy.model) // 32
    assert sizes[0].dense == max(x.weight.nbytes for x in layers) == 64 * 128 * 2
    dense = shell(str(base), torch.bfloat16, {}, "lora", json.dumps({"r": 4}))
    assert planned.parameters == dense.parameters
    whole = estimate(dense.model, config, Layout(1), 64, False, False, False)
    saved = four_bits.packed_weights(policy.model) * (2 - 17 / 32)
    assert whole.weights - sizes[0].weights == saved
    assert whole.dense == 0


def buffers(model):
    return [x for layer in four_bits.layers(model) for x in (layer.packed, layer.scale)]


def test_a_saved_adapter_comes_back_on_the_rounded_base(base, tmp_path):
    policy = moved(load(base))
    policy.save(tmp_path / "adapter")
    again = Policy.load(str(tmp_path / "adapter"))
    assert torch.equal(logits(again.model), logits(policy.model))
    assert all(torch.equal(a, b) for a, b in zip(buffers(again.model), buffers(policy.model), strict=True))
    assert four_bits.packed_weights(shell(str(tmp_path / "adapter"), torch.float32, {}).model) > 0
    (tmp_path / "adapter" / four_bits.FILE).write_text('{"base_bits": 3}')
    with pytest.raises(ValueError, match="not of a kind that this rpg knows"):
        Policy.load(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / four_bits.FILE).unlink()
    assert not four_bits.layers(Policy.load(str(tmp_path / "adapter")).model)


def test_an_adapter_on_the_head_comes_back_on_the_same_model(base, tmp_path):
    options = {"r": 4, "target_modules": ["q_proj", "lm_head"]}
    policy = moved(Policy.load(str(base), peft=PeftConfig("lora", options, 4)))
    policy.save(tmp_path / "adapter")
    again = Policy.load(str(tmp_path / "adapter"))
    assert len(four_bits.layers(again.model)) == len(four_bits.layers(policy.model))
    assert torch.equal(logits(again.model), logits(policy.model))


def test_whole_layers_beside_rounded_ones_are_refused(base):
    with pytest.raises(ValueError, match="modules_to_save"):
        Policy.load(str(base), peft=PeftConfig("lora", {"modules_to_save": ["lm_head"]}, 4))


def test_an_adapter_stays_beside_the_weights_it_was_trained_on(base, tmp_path):
    Policy.load(str(base), peft=PeftConfig("lora", {"r": 4})).save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="unrounded"):
        Policy.load(str(tmp_path / "adapter"), peft=PeftConfig("lora", {}, 4))


def test_merged_it_is_the_rounded_base_with_the_adapter(base, tmp_path):
    policy = moved(load(base))
    state = dict(merged_state(policy.model))
    wrapper = vars(dense_twin(policy).model)[adapters.WRAPPER]
    expected = wrapper.merge_and_unload().state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    policy.save(tmp_path / "adapter")
    merged = rpg.merge([tmp_path / "adapter"], tmp_path / "whole", init=str(base))
    whole = Policy.load(str(tmp_path / "whole"))
    assert torch.allclose(logits(whole.model), logits(policy.model), atol=1e-4)
    learnt = [layer.get_delta_weight("default").detach().norm() for layer in tuned(policy.model)]
    assert abs(merged.norms[0] - float(torch.stack(learnt).norm())) < 1e-3  # the rounding of the base is none of it
    moved(load(base, PeftConfig("lora", {"r": 4}))).save(tmp_path / "other")
    with pytest.raises(ValueError, match="merge each kind on its own"):
        rpg.merge([tmp_path / "adapter", tmp_path / "other"], tmp_path / "both", init=str(base))


def tuned(model):
    return [module for module in model.modules() if hasattr(module, "get_delta_weight")]


def test_a_run_says_what_it_was_trained_beside(train, command, tmp_path):
    four = ["--peft.method", "lora", "--peft.base_bits", "4"]
    job = train(tmp_path / "run", *four, "--steps", "2", "--optim.lr", "3e-3", "--checkpoint.best", "false")
    assert job.code == 0, job.text
    model = max((tmp_path / "run" / "checkpoints").iterdir()) / "model"
    assert json.loads((model / four_bits.FILE).read_text())["base_bits"] == 4
    card = (model / "README.md").read_text()
    assert "in 4 bits (NF4) with a lora adapter" in card
    assert "`rpg merge` writes the whole model as it was trained" in card
    job = command("eval", tmp_path / "run", "--k", "2", "--problems", "8", "--json")
    assert job.code == 0, job.text
    solved = "eval/arithmetic/solved"
    assert json.loads(job.out)[solved] == [row for row in metrics(tmp_path / "run") if solved in row][-1][solved]


@pytest.mark.parametrize(
    ("peft", "says"),
    [
        (PeftConfig(base_bits=4), "give --peft.method lora"),
        (PeftConfig("ia3", {}, 4), "plain LoRA, not ia3"),
        (PeftConfig("dora", {}, 4), "plain LoRA, not dora"),
        (PeftConfig("lora", {"init_lora_weights": "pissa"}, 4), "rewrites the model's weights"),
    ],
)
def test_what_would_train_or_rewrite_the_base_is_refused(base, peft, says):
    with pytest.raises(ValueError, match=says):
        load(base, peft)
    with pytest.raises(ValueError, match=says):
        shell(str(base), torch.float32, {}, peft.method, json.dumps(peft.options), peft.base_bits)


def test_an_adapter_of_another_kind_is_refused_on_it(base, tmp_path):
    load(base, PeftConfig("ia3")).save(tmp_path / "ia3")
    (tmp_path / "ia3" / four_bits.FILE).write_text(json.dumps({"base_bits": 4, "format": "nf4", "block": 64}))
    with pytest.raises(ValueError, match="plain LoRA, not ia3"):
        Policy.load(str(tmp_path / "ia3"))


def test_the_setting_is_a_number_or_none():
    for flags in ({"peft.base_bits": "4"}, {"peft.base_bits": 4}):
        config = build(Config, flags={**flags, "peft.method": "lora"})
        assert config.peft.base_bits == 4
        assert ("--peft.base_bits", "4") in list(flags_of(config))
    assert build(Config, flags={"peft.base_bits": "none"}).peft.base_bits is None
    for wrong in ("8", 8, True, 4.0):
        with pytest.raises(ValueError, match=r"peft\.base_bits must be one of 4"):
            build(Config, flags={"peft.base_bits": wrong})


def test_several_processes_are_refused(base):
    check_base(load(base), 1, "native")
    check_base(Policy.load(str(base)), 2, "vllm")
    with pytest.raises(ValueError, match="torchrun"):
        check_base(load(base), 2, "native")


def test_what_holds_the_model_in_another_way_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=r"peft\.base_bits goes with rollout\.engine native"):
        Config(peft=FOUR, rollout=RolloutConfig(engine="vllm"))
    moved(load(base)).save(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"peft\.base_bits goes with rollout\.engine native"):
        check_base(Policy.load(str(tmp_path / "adapter")), 1, "vllm")  # its folder says it, no setting does
    with pytest.raises(ValueError, match="rpg merge it first"):
        fresh(Config(model=str(tmp_path / "adapter")))
    for other in (of_verl, of_trl):
        with pytest.raises(ValueError, match=r"peft\.base_bits"):
            other(Config(peft=PeftConfig("lora", {}, 4)))
