"""The native engine against transformers: a full forward pass, generate(), and exact enumeration."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

import tiny
from rollout.engines import PROMPTS, engine, flat, forward_logp
from rpg.kernels.sample_torch import truncate
from rpg.rollout import NativeEngine, TooManyKept, kept

ATTENTION = "sdpa"
pytestmark = pytest.mark.usefixtures("graphs")


# ---- right for each architecture -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_logp_is_that_of_a_full_forward_pass(name):
    """Prompts of five lengths, one of them a single token, slots refilled, contexts longer than the sliding windows."""
    model = tiny.make(name)
    found = engine(model, slots=4).generate(PROMPTS, n=3, max_new_tokens=14, temperature=0.9, seed=3)
    lengths = set()
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            expected = forward_logp(model, prompt, rollout.tokens, 0.9)
            assert torch.allclose(torch.tensor(rollout.logp), expected, atol=1e-4)
            lengths.add(len(rollout.tokens))
    assert 14 in lengths


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_is_transformers_generate_token_by_token(name):
    model = tiny.make(name)
    found = engine(model, slots=3).generate(PROMPTS, max_new_tokens=12, temperature=0.0)
    for prompt, (rollout,) in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert rollout.tokens == whole[0, len(prompt) :].tolist()
        assert rollout.logp == [0.0] * len(rollout.tokens)


def test_truncated_logp_is_renormalised(llama):
    found = engine(llama).generate(PROMPTS, n=4, max_new_tokens=6, temperature=1.3, top_k=5, seed=1)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            with torch.no_grad():
                logits = llama(torch.tensor([prompt + rollout.tokens])).logits[0, len(prompt) - 1 : -1] / 1.3
            best = logits.topk(5)
            at = (best.indices == torch.tensor(rollout.tokens)[:, None]).nonzero()
            assert len(at) == len(rollout.tokens)  # all among the five
            expected = best.values.log_softmax(-1)[at[:, 0], at[:, 1]]
            assert torch.allclose(torch.tensor(rollout.logp), expected, atol=1e-4)


@pytest.mark.parametrize("pool", [2**24, 2**11], ids=["roomy", "spilled"])
@pytest.mark.parametrize("how", [{"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_kept_sets_are_what_each_token_was_drawn_from(llama, how, pool, monkeypatch):
    """In the order of the responses, whatever the slots; and over them the log-probability is the sampler's."""
    monkeypatch.setattr(kept, "POOL", pool)
    made = engine(llama, slots=4)
    found = made.generate(PROMPTS, n=3, max_new_tokens=12, temperature=1.3, seed=1, kept=True, **how)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            with torch.no_grad():
                logits = llama(torch.tensor([prompt + rollout.tokens])).logits[0, len(prompt) - 1 : -1] / 1.3
            expected = truncate(logits, **how)
            assert rollout.kept.counts.tolist() == expected.isfinite().sum(-1).tolist()
            assert rollout.kept.ids.tolist() == expected.isfinite().nonzero()[:, 1].tolist()
            logp = expected.log_softmax(-1)[torch.arange(len(rollout.tokens)), rollout.tokens]
            assert torch.allclose(torch.tensor(rollout.logp), logp, atol=1e-4)
    plain = made.generate(PROMPTS, n=3, max_new_tokens=12, temperature=1.3, seed=1, **how)
    assert [r.tokens for r in flat(plain)] == [r.tokens for r in flat(found)]
    assert all(r.kept is None for r in flat(plain))


def test_sets_are_given_only_where_there_are_any(llama):
    for how in ({}, {"temperature": 0.0, "top_p": 0.5}):
        found = engine(llama).generate(PROMPTS, max_new_tokens=4, kept=True, **how)
        assert all(r.kept is None for r in flat(found))


def test_sets_that_are_too_large_are_refused_in_one_line(llama, monkeypatch):
    monkeypatch.setattr(kept, "POOL", 64)
    monkeypatch.setattr(kept, "HOST_BYTES", 512)
    with pytest.raises(TooManyKept, match=r"^rollout.top_p, top_k and min_p keep too many[^\n]*--rollout.top_k 100"):
        engine(llama).generate(PROMPTS, n=2, max_new_tokens=12, top_p=0.9, kept=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    model = tiny.make("qwen2-grouped", dtype=dtype)
    found = engine(model, slots=4).generate(PROMPTS, n=2, max_new_tokens=8, seed=3)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            error = (forward_logp(model, prompt, rollout.tokens) - torch.tensor(rollout.logp)).abs().max()
            assert error < (1e-5 if dtype == torch.float64 else 0.5)


# ---- the seeding contract --------------------------------------------------------------------------------------------


def test_sample_j_of_prompt_i_does_not_depend_on_the_slots(llama):
    one, three, many = (engine(llama, s).generate(PROMPTS, n=5, max_new_tokens=12, seed=9) for s in (1, 3, 64))
    for a, b, c in zip(flat(one), flat(three), flat(many), strict=True):
        assert a.tokens == b.tokens == c.tokens
        assert a.finished == b.finished == c.finished
        assert a.logp == pytest.approx(b.logp, abs=1e-5)
        assert a.logp == pytest.approx(c.logp, abs=1e-5)


def test_the_order_of_the_prompts_does_not_matter(llama):
    run = engine(llama, 7)
    there = run.generate(PROMPTS, n=3, max_new_tokens=10, seed=4)
    back = run.generate(PROMPTS[::-1], n=3, max_new_tokens=10, seed=4)
    assert [[r.tokens for r in group] for group in back[::-1]] == [[r.tokens for r in group] for group in there]
    twice = run.generate([PROMPTS[2], PROMPTS[0], PROMPTS[2]], n=3, max_new_tokens=10, seed=4)
    six = run.generate([PROMPTS[2]], n=6, max_new_tokens=10, seed=4)[0]
    assert [r.tokens for r in twice[0] + twice[2]] == [r.tokens for r in six]  # not the same three again
    assert [r.tokens for r in six[:3]] != [r.tokens for r in six[3:]]


def test_sample_j_of_prompt_i_does_not_depend_on_the_other_prompts_nor_on_n(llama):
    """It is a function of the seed, of j and of the prompt's own tokens."""
    run = engine(llama, 7)
    whole = run.generate(PROMPTS, n=6, max_new_tokens=10, seed=4)
    others = [[20, 21, 22], [30] * 9, PROMPTS[2], [1, 2], [2]]
    mixed = run.generate(others, n=6, max_new_tokens=10, seed=4)
    assert [r.tokens for r in mixed[2]] == [r.tokens for r in whole[2]]
    fewer = run.generate(PROMPTS[:3], n=2, max_new_tokens=10, seed=4)
    assert [[r.tokens for r in group] for group in fewer] == [[r.tokens for r in group[:2]] for group in whole[:3]]
    longer = run.generate(PROMPTS, n=6, max_new_tokens=15, seed=4)
    assert all(b.tokens[:10] == a.tokens for a, b in zip(flat(whole), flat(longer), strict=True))


def test_samples_prompts_and_seeds_draw_their_own_numbers():
    run = engine(tiny.make("llama"))
    same = run.generate([[5, 6]] * 3, n=8, max_new_tokens=10, seed=0)
    assert len({tuple(r.tokens) for r in flat(same)}) > 20
    other = run.generate([[5, 6]] * 3, n=8, max_new_tokens=10, seed=1)
    assert sum(a.tokens == b.tokens for a, b in zip(flat(same), flat(other), strict=True)) < 4


def test_torch_generators_are_neither_used_nor_moved(llama):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    a = engine(llama).generate(PROMPTS, n=2, max_new_tokens=5, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert engine(llama).generate(PROMPTS, n=2, max_new_tokens=5, seed=3) == a


def test_two_token_continuations_have_their_exact_probabilities():
    model = tiny.make("qwen3", spread=0.3)
    prompt, count, temperature = [5, 9, 7], 20_000, 1.2
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
        after = torch.tensor([[*prompt, v] for v in range(tiny.VOCABULARY)])
        second = (model(after).logits[:, -1].double() / temperature).softmax(-1)
    p = {(1,): float(first[1])}  # ended at once
    pairs = itertools.product(range(tiny.VOCABULARY), repeat=2)
    p |= {(a, b): float(first[a] * second[a, b]) for a, b in pairs if a != 1}
    assert sum(p.values()) == pytest.approx(1)

    (group,) = engine(model, slots=4096).generate([prompt], count, 2, temperature, seed=11)
    drawn = dict.fromkeys(p, 0)
    for rollout in group:
        drawn[tuple(rollout.tokens)] += 1
    common = [key for key in p if count * p[key] >= 5]
    rest = 1 - sum(p[key] for key in common)
    observed = [drawn[key] for key in common]
    observed.append(count - sum(observed))
    expected = count * np.array([*(p[key] for key in common), rest])
    assert len(common) > 100
    assert stats.chisquare(observed, expected).pvalue > 1e-3


# ---- refilling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_refilling_with_several_end_tokens_and_lengths(slots):
    model = tiny.make("llama-tied", spread=0.15)
    model.generation_config.eos_token_id = [1, 17, 23]
    run = engine(model, slots)
    assert run.end_ids == [1, 17, 23]
    told = []
    found = run.generate(PROMPTS, n=9, max_new_tokens=20, seed=2, progress=told.append)
    assert [len(group) for group in found] == [9] * 5
    assert told == sorted(told)
    assert told[-1] == 45
    lengths = [len(r.tokens) for r in flat(found)]
    assert len(set(lengths)) > 8
    for rollout in flat(found):
        assert len(rollout.tokens) == len(rollout.logp) <= 20
        assert rollout.finished == (rollout.tokens[-1] in (1, 17, 23))
        assert rollout.finished or len(rollout.tokens) == 20
        assert not set(rollout.tokens[:-1]) & {1, 17, 23}
    assert {r.tokens[-1] for r in flat(found)} > {1, 17, 23}
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group[:2]:
            assert rollout.logp == pytest.approx(forward_logp(model, prompt, rollout.tokens).tolist(), abs=1e-4)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("new", [2, 60])
@pytest.mark.parametrize("lengths", [(1, 2, 55, 1, 3, 30), (55, 1, 2), (2, 20, 3, 40, 1, 58)], ids=str)
def test_a_long_prompt_may_follow_short_ones(lengths, new, slots):
    """Room for keys and values grows with what is read and written."""
    model = tiny.make("qwen2-grouped", max_position_embeddings=128)
    prompts = [[(7 * i + j) % 37 + 3 for j in range(length)] for i, length in enumerate(lengths)]
    found = engine(model, slots).generate(prompts, n=2, max_new_tokens=new, seed=6)
    for prompt, group in zip(prompts, found, strict=True):
        for rollout in group:
            assert rollout.logp == pytest.approx(forward_logp(model, prompt, rollout.tokens).tolist(), abs=1e-4)
    assert max(len(r.tokens) for r in flat(found)) == new


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_one_new_token(llama, slots):
    found = engine(llama, slots).generate(PROMPTS, n=4, max_new_tokens=1, seed=2)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            assert len(rollout.tokens) == 1
            assert rollout.finished == (rollout.tokens == [1])
            assert rollout.logp == pytest.approx(forward_logp(llama, prompt, rollout.tokens).tolist(), abs=1e-4)


def test_an_end_token_as_the_very_last_one_counts_as_finished(llama):
    run = engine(llama)
    whole = flat(run.generate(PROMPTS, n=8, max_new_tokens=12, seed=5))
    early = next(i for i, r in enumerate(whole) if r.finished and 2 < len(r.tokens) < 12)
    length = len(whole[early].tokens)
    assert flat(run.generate(PROMPTS, n=8, max_new_tokens=length, seed=5))[early].finished
    assert not flat(run.generate(PROMPTS, n=8, max_new_tokens=length - 1, seed=5))[early].finished


def test_nothing_to_do(llama):
    assert engine(llama).generate([]) == []
    assert engine(llama).generate([[3], [4]], n=0) == [[], []]


# ---- the model afterwards --------------------------------------------------------------------------------------------


def state(model):
    configs = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    return configs, model.training, {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}


def assert_untouched(model, before):
    configs, training, parameters = state(model)
    assert configs == before[0] == {ATTENTION}
    assert training == before[1]
    for name, (value, wants) in parameters.items():
        assert torch.equal(value, before[2][name][0])
        assert wants == before[2][name][1]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = tiny.make("gemma3-window").train(training)
    before = state(model)
    engine(model).generate(PROMPTS, n=2, max_new_tokens=4)
    assert_untouched(model, before)
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()  # nothing of inference mode is left in it
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_is_left_as_it_was_when_generation_fails_on_the_way():
    model = tiny.make("qwen3").train()
    run, before = engine(model, 4), state(model)
    clean = run.generate(PROMPTS, n=4, max_new_tokens=6, seed=1)

    def fail(done):
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.generate(PROMPTS, n=4, max_new_tokens=6, seed=1, progress=fail)
    assert_untouched(model, before)
    assert run.generate(PROMPTS, n=4, max_new_tokens=6, seed=1) == clean


def test_dropout_does_not_touch_the_samples():
    model = tiny.make("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    (rollout,) = engine(model).generate([[5, 6, 7]], max_new_tokens=6, seed=1)[0]
    assert rollout.logp == pytest.approx(forward_logp(model.eval(), [5, 6, 7], rollout.tokens).tolist(), abs=1e-4)


def test_the_engine_follows_the_weights():
    model = tiny.make("llama")
    run = engine(model)
    before = run.generate(PROMPTS, n=2, max_new_tokens=5, temperature=0.0)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = run.generate(PROMPTS, n=2, max_new_tokens=5, temperature=0.0)
    assert before != after
    for prompt, group in zip(PROMPTS, after, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert group[0].tokens == whole[0, len(prompt) :].tolist()


# ---- what does not work says so --------------------------------------------------------------------------------------

UNSUPPORTED = {
    "Gemma2ForCausalLM": ("Gemma2Config", {"head_dim": 8}, "softcap"),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None},
        "s_aux",
    ),
    "MambaForCausalLM": ("MambaConfig", {"state_size": 4}, "keys and values"),
    "GPTJForCausalLM": (  # attention of its own
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
        "wrong by",
    ),
    "BloomForCausalLM": ("BloomConfig", {"n_layer": 2, "n_head": 4}, ""),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48},
        "chunks",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_architecture_that_does_not_fit_is_refused_in_one_line(name):
    config, settings, reason = UNSUPPORTED[name]
    model = tiny.make(config=config, **settings)
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=rf"^the native engine cannot run {name}: [^\n]*{reason}[^\n]*$"):
        engine(model)
    assert model.config._attn_implementation == attention


def test_weights_that_are_not_finite_are_named():
    model = tiny.make()
    run = engine(model)
    with torch.no_grad():
        model.lm_head.weight[4] = torch.nan
    with pytest.raises(ValueError, match=r"^the model's logits are not finite[^\n]*$"):
        run.generate(PROMPTS, max_new_tokens=3)


def test_a_model_without_an_end_token_is_refused():
    model = tiny.make()
    model.generation_config.eos_token_id = None
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"^the model has no end token[^\n]*$"):
        NativeEngine(model, tokenizer)


def test_an_empty_prompt_is_refused(llama):
    with pytest.raises(ValueError, match=r"^a prompt is empty[^\n]*$"):
        engine(llama).generate([[3], []])


@pytest.mark.parametrize("name", ["llama", "qwen2-grouped", "gemma3-window"])
def test_the_fused_kernel_agrees_too(name):
    """Other devices and widths of number than the CPU's float32 take it."""
    model = tiny.make(name, dtype=torch.float64)
    found = engine(model, 3).generate(PROMPTS, n=3, max_new_tokens=14, seed=8)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            assert rollout.logp == pytest.approx(forward_logp(model, prompt, rollout.tokens).tolist(), abs=1e-5)
