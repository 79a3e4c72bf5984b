"""vLLM's samples and log-probabilities beside those of transformers and of the native engine."""

import pytest
import torch
import transformers

from engine_vllm.small_models import (
    CLOSE,
    ENDS,
    PROMPTS,
    VOCABULARY,
    flat,
    forward_logp,
    make,
    needs_vllm,
    starting,
    tokens,
    worst,
)
from rpg.kernels.sample_torch import truncate
from rpg.rollout import NativeEngine

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def engine(model):
    with starting() as start:
        yield start(model)


class Tokenizer:
    eos_token_id = ENDS[0]


def native(model):
    model.generation_config = transformers.GenerationConfig(eos_token_id=ENDS)
    return NativeEngine(model, Tokenizer())


# ---- what is sampled from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"top_k": 9, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_logp_is_that_of_the_distribution_sampled_from(model, engine, how):
    found = engine.generate(PROMPTS, n=4, max_new_tokens=12, seed=3, **how)
    assert [len(group) for group in found] == [4] * 5
    assert worst(model, PROMPTS, found, **how) < CLOSE
    if how:
        assert worst(model, PROMPTS, found) > 0.1  # of the plain distribution it is not


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_k": 70, "top_p": 0.9}, {"top_k": 9, "min_p": 0.1}], ids=str)
def test_kept_sets_are_those_of_the_native_engine(model, engine, how):
    found = engine.generate(PROMPTS, n=3, max_new_tokens=12, temperature=1.2, seed=3, kept=True, **how)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for rollout in group:
            ids = torch.tensor([prompt + rollout.tokens])
            with torch.no_grad():
                logits_TV = model(ids).logits[0, len(prompt) - 1 : -1] / 1.2
            kept_TV = truncate(logits_TV, **how).isfinite()
            assert rollout.kept.counts.tolist() == kept_TV.sum(-1).tolist()
            assert rollout.kept.ids.tolist() == kept_TV.nonzero()[:, 1].tolist()
    assert worst(model, PROMPTS, found, temperature=1.2, **how) < CLOSE
    assert all(r.kept is None for r in flat(engine.generate(PROMPTS, n=1, max_new_tokens=4, **how)))


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000}], ids=str)
def test_a_set_that_vllm_cannot_tell_is_refused_in_one_line(engine, how):
    with pytest.raises(ValueError, match=r"^rollout.engine=vllm tells which tokens were kept only[^\n]*native$"):
        engine.generate(PROMPTS, kept=True, **how)


def test_greedy_is_the_native_engine_token_by_token(model, engine):
    expected = native(model).generate(PROMPTS, max_new_tokens=30, temperature=0.0)
    assert engine.generate(PROMPTS, max_new_tokens=30, temperature=0.0) == expected
    assert engine.generate(PROMPTS, max_new_tokens=30, temperature=0.0, top_p=0.5, top_k=3) == expected
    assert all(r.logp == [0.0] * len(r.tokens) for r in flat(expected))


def test_first_tokens_have_their_exact_probabilities(model, engine):
    from scipy import stats

    prompt, count, how = [5, 9, 7], 4000, {"temperature": 1.2, "top_p": 0.9}
    p_V = torch.stack([forward_logp(model, prompt, [v], **how)[0] for v in range(VOCABULARY)]).double().exp()
    assert float(p_V.sum()) == pytest.approx(1, abs=1e-6)
    (group,) = engine.generate([prompt], count, 1, seed=11, **how)
    drawn_V = torch.bincount(torch.tensor([r.tokens[0] for r in group]), minlength=VOCABULARY)
    assert not drawn_V[p_V == 0].any()
    common_V = p_V * count >= 5
    observed, expected = drawn_V[common_V].double(), count * p_V[common_V]
    assert common_V.sum() > 10
    assert float(expected.sum()) > 0.98 * count  # of all that is left by the truncation
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_responses(engine):
    first = engine.generate(PROMPTS, n=4, max_new_tokens=10, seed=5)
    torch.manual_seed(123)
    again = engine.generate(PROMPTS, n=4, max_new_tokens=10, seed=5)
    assert tokens(again) == tokens(first)
    assert sum(a == b for a, b in zip(tokens(engine.generate(PROMPTS, 4, 10, seed=6)), tokens(first), strict=True)) < 3


def test_sample_j_of_a_prompt_does_not_depend_on_its_place_nor_on_n(engine):
    whole = engine.generate(PROMPTS, n=4, max_new_tokens=10, seed=5)
    back = engine.generate(PROMPTS[::-1], n=2, max_new_tokens=10, seed=5)[::-1]
    assert [[r.tokens for r in group] for group in back] == [[r.tokens for r in group[:2]] for group in whole]
    twice = engine.generate([PROMPTS[2], PROMPTS[0], PROMPTS[2]], n=2, max_new_tokens=10, seed=5)
    assert [r.tokens for r in twice[0] + twice[2]] == [r.tokens for r in whole[2]]  # not the same two again
    assert len({tuple(r.tokens) for r in whole[2]}) == 4


# ---- end tokens, limits, progress ------------------------------------------------------------------------------------


def test_every_end_token_ends_a_response_and_is_part_of_it(model, engine):
    told = []
    found = flat(engine.generate(PROMPTS, n=40, max_new_tokens=60, seed=2, progress=told.append))
    assert told == sorted(told)
    assert told[-1] == 200
    assert {r.tokens[-1] for r in found if r.finished} == set(ENDS)
    assert any(not r.finished for r in found)
    for r in found:
        assert len(r.tokens) == len(r.logp) <= 60
        assert r.finished == (r.tokens[-1] in ENDS)
        assert r.finished or len(r.tokens) == 60
        assert not set(r.tokens[:-1]) & set(ENDS)


def test_an_end_token_as_the_very_last_one_counts_as_finished(engine):
    whole = flat(engine.generate(PROMPTS, n=40, max_new_tokens=60, seed=2))
    at = next(i for i, r in enumerate(whole) if r.finished and 2 < len(r.tokens) < 60)
    length = len(whole[at].tokens)
    assert flat(engine.generate(PROMPTS, n=40, max_new_tokens=length, seed=2))[at].finished
    assert not flat(engine.generate(PROMPTS, n=40, max_new_tokens=length - 1, seed=2))[at].finished


def test_an_interrupted_call_leaves_nothing_behind(engine):
    clean = engine.generate(PROMPTS, n=4, max_new_tokens=20, seed=1)

    def fail(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, n=40, max_new_tokens=20, seed=9, progress=fail)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert tokens(engine.generate(PROMPTS, n=4, max_new_tokens=20, seed=1)) == tokens(clean)


def test_what_cannot_be_asked_for(engine):
    assert engine.generate([]) == []
    assert engine.generate([[3]], n=0) == [[]]
    with pytest.raises(ValueError, match="a prompt is empty"):
        engine.generate([[3], []])
    with pytest.raises(ValueError, match=r"205 tokens do not fit into rollout.vllm.max_model_len=200"):
        engine.generate([[3] * 200], max_new_tokens=5)


def test_release_and_on(model, engine):
    found = engine.generate(PROMPTS, n=2, max_new_tokens=8, seed=1)
    engine.release()
    assert tokens(engine.generate(PROMPTS, n=2, max_new_tokens=8, seed=1)) == tokens(found)
