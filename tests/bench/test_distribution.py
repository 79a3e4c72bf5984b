"""The test of the engine's distribution, and errors against float64: both have to notice what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy import stats

from rpg.bench.logp import HEADS, both_ways, errors, exact, make_inputs, plain
from rpg.bench.rollout import (
    PROMPT,
    TOP_P,
    VOCABULARY,
    count_pairs,
    distribution_tests,
    p_value,
    pair_probabilities,
    spread_out,
)
from rpg.bench.synthetic import make_model, make_tokenizer, sizes_for
from rpg.rollout import NativeEngine

SIZES = sizes_for("cpu")


@pytest.fixture(scope="module")
def model():
    return spread_out(make_model("tiny", SIZES, vocab_size=VOCABULARY))


def test_p_is_scipys():
    torch.manual_seed(0)
    probability = torch.rand(30).double().softmax(-1)
    counts = torch.bincount(torch.multinomial(probability, 3000, replacement=True), minlength=30).double()
    right = stats.chisquare(counts.numpy(), (probability * 3000).numpy()).pvalue
    assert p_value(counts, probability) == pytest.approx(right, rel=1e-9)


def test_rare_cells_are_one():
    probability = torch.tensor([0.5, 0.499, *[0.0001] * 10], dtype=torch.float64)
    counts = torch.tensor([510.0, 489.0, 1.0, *[0.0] * 9], dtype=torch.float64)
    right = stats.chisquare([510.0, 489.0, 1.0], [500.0, 499.0, 1.0]).pvalue
    assert p_value(counts, probability) == pytest.approx(right, rel=1e-9)


def test_what_cannot_be_drawn_was_drawn():
    assert p_value(torch.tensor([99.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()) == 0.0


def test_probabilities_of_pairs_are_those_of_the_model(model):
    found = pair_probabilities(model, 1.0).view(VOCABULARY, VOCABULARY)
    assert float(found.sum()) == pytest.approx(1.0)
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([[*PROMPT, 7, 3]])).logits.log_softmax(-1)[0]
    right = logp[len(PROMPT) - 1, 7] + logp[len(PROMPT), 3]
    assert float(found[7, 3].log()) == pytest.approx(float(right), abs=1e-4)


def test_a_sampler_that_does_something_else_is_noticed(model):
    engine = NativeEngine(model, make_tokenizer(VOCABULARY), 512)
    (right,) = engine.generate([PROMPT], 4096, 2, 1.0, 7)
    (warm,) = engine.generate([PROMPT], 4096, 2, 1.3, 7)
    whole = pair_probabilities(model, 1.0)
    assert p_value(count_pairs(right), whole) > 1e-3
    assert p_value(count_pairs(warm), whole) < 1e-9
    assert p_value(count_pairs(right), pair_probabilities(model, TOP_P)) == 0.0


def test_rows_of_the_engine():
    for test in distribution_tests(replace(SIZES, draws=2048)).values():
        assert 1e-3 < test() <= 1
    assert list(distribution_tests(sizes_for("cuda"))) == [
        "rpg, 65,536 pairs, float32",
        "rpg, 65,536 pairs, float32, top-p 0.9",
        "rpg, 65,536 pairs, bfloat16",
    ]


# ---- errors of the head ----------------------------------------------------------------------------------------------


def test_the_exact_gradient_is_autograds():
    inputs = make_inputs(200, 16, 40, SIZES)
    leaves = [t.detach().double().requires_grad_() for t in (inputs.hidden_NH, inputs.weight_VH)]
    logp_NV = (leaves[0] @ leaves[1].T).log_softmax(-1)
    logp_N = logp_NV.gather(-1, inputs.target_N[:, None])[:, 0]
    (logp_N * inputs.upstream_N).sum().backward()
    found = exact(inputs)
    right = (logp_N, -(logp_NV.exp() * logp_NV).sum(-1), leaves[0].grad, leaves[1].grad)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b.detach())


def test_errors_are_small_where_it_is_right_and_large_where_not():
    assert max(errors(partial(both_ways, plain), SIZES).values()) < 1e-4

    def wrong(hidden_NH, weight_VH, target_N):
        logp_N, entropy_N = plain(hidden_NH * 1.01, weight_VH, target_N)
        return logp_N, entropy_N + 0.1

    found = errors(partial(both_ways, wrong), SIZES)
    assert set(found) == {"logp error", "entropy error", "d states error", "d head error"}
    assert min(found.values()) > 1e-3


def test_ligers_loss_is_called_as_meant(monkeypatch):
    """On-policy its gradient is that of −advantage·logp, a mean over tokens."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr("rpg.bench.logp._gpu_only", lambda sizes: None)
    sizes = replace(SIZES, tokens=64)
    inputs = make_inputs(64, 16, 40, sizes)
    torch.manual_seed(3)
    advantage_B = torch.randn(32)
    torch.manual_seed(3)
    with torch.compiler.set_stance("force_eager"):
        run, _ = HEADS["Liger GRPO loss"](inputs, sizes)
        run()
    found = inputs.hidden_NH.grad.clone()
    inputs.hidden_NH.grad = None
    logp_N, _ = plain(inputs.hidden_NH, inputs.weight_VH, inputs.target_N)
    (-(logp_N.view(32, 2) * advantage_B[:, None]).mean()).backward()
    torch.testing.assert_close(found, inputs.hidden_NH.grad)
