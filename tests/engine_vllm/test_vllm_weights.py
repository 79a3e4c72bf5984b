"""vLLM has the policy's weights, whatever happens to them; and what it cannot run is said in one line."""

import pytest
import torch
import transformers

from engine_vllm.small_models import CLOSE, PROMPTS, make, needs_vllm, starting, tokens, worst
from rpg.rollout import NotFinite

pytestmark = needs_vllm


@pytest.fixture
def start():
    with starting() as start:
        yield start


# ---- weights ---------------------------------------------------------------------------------------------------------


def step(model, size=0.1):
    """As an optimiser's, on every weight."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=size)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_after_a_step_and_sync_samples_are_of_the_new_weights(start, tied):
    """The prompt's keys and values of before are in the prefix cache: they must not be used."""
    model = make(tied=tied)
    run = start(model, block_size=32)
    prompts = [[3 + i % 50 for i in range(130)], [9 + i % 40 for i in range(130)]]
    before = run.generate(prompts, n=3, max_new_tokens=8, seed=1)
    assert cached(run, prompts[0]) >= 96  # the cache is on, and holds them
    assert worst(model, prompts, before) < CLOSE
    step(model)
    assert worst(model, prompts, run.generate(prompts, n=3, max_new_tokens=8, seed=1)) > 0.01  # not synchronised
    run.sync()
    after = run.generate(prompts, n=3, max_new_tokens=8, seed=1)
    assert worst(model, prompts, after) < CLOSE
    step(model, -0.1)
    assert worst(model, prompts, after) > 0.01
    run.sync()
    assert tokens(run.generate(prompts, n=3, max_new_tokens=8, seed=1)) == tokens(before)


def cached(run, prompt):
    """Tokens of a prompt that vLLM takes from its cache."""
    outputs = run.llm.generate([{"prompt_token_ids": prompt}], run.vllm.SamplingParams(max_tokens=1), use_tqdm=False)
    return outputs[0].num_cached_tokens


def test_lora_is_merged_on_the_way(start):
    peft = pytest.importorskip("peft")
    model = make()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = start(model)
    found = run.generate(PROMPTS, n=3, max_new_tokens=8, seed=1)
    assert worst(model, PROMPTS, found) < CLOSE
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(-1)
    assert worst(model, PROMPTS, found) > 0.01
    run.sync()
    assert worst(model, PROMPTS, run.generate(PROMPTS, n=3, max_new_tokens=8, seed=1)) < CLOSE
    for name, p in model.named_parameters():
        assert torch.equal(p.abs(), before[name].abs())  # nothing is merged in the policy itself


def test_weights_that_are_not_finite_are_said_so(start):
    model = make()
    run = start(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    run.sync()
    with pytest.raises(NotFinite, match="not finite"):
        run.generate([[3, 4]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("kind", "width", "tied"), [("llama", 64, False), ("llama", 32, True), ("qwen3", 64, True), ("qwen2", 32, False)]
)
def test_other_architectures(start, kind, width, tied):
    model = make(kind, width, tied)
    run = start(model)
    assert worst(model, PROMPTS, run.generate(PROMPTS, n=2, max_new_tokens=9)) < CLOSE
    step(model)
    run.sync()
    assert worst(model, PROMPTS, run.generate(PROMPTS, n=2, max_new_tokens=9)) < CLOSE


def test_half_precision(start):
    model = make(dtype=torch.bfloat16)
    run = start(model)
    assert worst(model, PROMPTS, run.generate(PROMPTS, n=2, max_new_tokens=9)) < 0.3
    step(model, 0.05)
    run.sync()
    assert worst(model, PROMPTS, run.generate(PROMPTS, n=2, max_new_tokens=9)) < 0.3


# ---- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"load_format": "auto"}, r"rollout\.vllm\.load_format is set by the engine"),
        ({"tensor_parallel_size": 2}, "one GPU only"),
        ({"colour": "red"}, "vLLM cannot run Qwen2ForCausalLM: .*unexpected keyword argument 'colour'"),
        ({"max_model_len": 4096}, "vLLM cannot run Qwen2ForCausalLM: .*max_model_len"),
        ({"kv_cache_memory_bytes": 1024}, "vLLM cannot run Qwen2ForCausalLM: "),
    ],
    ids=str,
)
def test_an_option_that_does_not_go_is_one_line(start, options, match):
    with pytest.raises(ValueError, match=match) as caught:
        start(make(), **options)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_vllm_does_not_have_is_one_line(start):
    class OwnForCausalLM(transformers.LlamaForCausalLM):
        pass

    model = make("llama")
    model.__class__ = OwnForCausalLM
    with pytest.raises(ValueError, match="vLLM cannot run OwnForCausalLM: ") as caught:
        start(model)
    assert "\n" not in str(caught.value)


def test_a_model_that_vllm_computes_otherwise_is_refused(start, monkeypatch):
    """As with weights of other names than vLLM's: here one layer's are left out."""
    import rpg.models.plain_weights as module

    whole = module.merged_state
    monkeypatch.setattr(module, "merged_state", lambda m: ((n, p) for n, p in whole(m) if "layers.1.mlp" not in n))
    with pytest.raises(ValueError, match="vLLM cannot run Qwen2ForCausalLM: its log-probabilities are wrong by"):
        start(make())


def test_an_end_token_that_only_the_tokenizer_has(start):
    found = start(make(), ends=[1, 9999]).generate(PROMPTS, n=8, max_new_tokens=60)
    assert {r.tokens[-1] for group in found for r in group if r.finished} == {1}


def test_torch_is_as_before(start):
    model = make()
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    start(model).generate(PROMPTS, max_new_tokens=5)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(state, torch.random.get_rng_state())
