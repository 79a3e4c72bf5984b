"""Sampling against enumerated probabilities."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from rpg.kernels.sample_torch import sample_kept, truncate
from rpg.rollout import Sampling, sample, uniforms

LOGITS = torch.tensor([1.5, -0.3, 0.2, -2.0, 0.9, -torch.inf, 0.21, -1.0])
LAST = 1 - 2.0**-53  # the largest that a generator of uniform numbers gives


def enumerated(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The distribution to be drawn from, in plain Python."""
    logits = [float(x) / temperature for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[:top_k] if top_k else order
    order = [i for i in order if math.exp(logits[i] - max(logits)) >= min_p]
    weights = {i: math.exp(logits[i]) for i in order}
    kept, reached = [], 0.0
    for i in order:
        if reached >= top_p * sum(weights.values()):
            break
        kept.append(i)
        reached += weights[i]
    return np.array([weights[i] / reached if i in kept else 0.0 for i in range(len(logits))])


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"temperature": 1.7, "top_p": 0.8, "top_k": 5},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_p": 0.9, "top_k": 6, "min_p": 0.25},
]


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_frequencies_and_logp_are_those_of_the_enumerated_distribution(how):
    p = enumerated(LOGITS, **how)
    count = 50_000
    u = torch.from_numpy(uniforms(7, 0, 0, count))
    token, logp = sample(LOGITS.expand(count, -1), u, **how)
    drawn = np.bincount(token.numpy(), minlength=len(p))
    assert not drawn[p == 0].any()
    assert np.allclose(logp.double().exp(), p[token.numpy()], rtol=1e-5)
    if (p > 0).sum() > 1:
        assert stats.chisquare(drawn[p > 0], count * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_the_measure_of_the_uniform_numbers_that_give_a_token_is_its_probability(how):
    """Exact, without statistics: token changes at the cumulative probabilities and nowhere else."""
    p = enumerated(LOGITS, **how)
    edges = np.concatenate([[0.0], p.cumsum()])
    for i in p.nonzero()[0]:
        inside = torch.tensor([edges[i] + 1e-6, (edges[i] + edges[i + 1]) / 2, edges[i + 1] - 1e-6], dtype=torch.double)
        assert sample(LOGITS.expand(3, -1), inside, **how)[0].tolist() == [i] * 3


@pytest.mark.parametrize("edge", [0.0, LAST])
@pytest.mark.parametrize("vocabulary", [2, 3, 1000, 50_000])
def test_edges_of_the_uniform_numbers_give_tokens_that_have_probability(edge, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(16, vocabulary, generator=generator) * 3
    logits[:, 0] = logits[:, -1] = -torch.inf  # both ends cannot be drawn
    logits[1, :] = -torch.inf
    logits[:, 1] = 0.5
    token, logp = sample(logits, torch.full((16,), edge, dtype=torch.double))
    assert logp.isfinite().all()
    possible = logits.isfinite()
    assert possible[torch.arange(16), token].all()
    if edge == 0:
        assert token.tolist() == [int(row.nonzero()[0]) for row in possible]


def test_temperature_zero_is_the_most_probable_token_with_probability_one():
    token, logp = sample(LOGITS.expand(3, -1), torch.tensor([0.0, 0.5, LAST]), temperature=0.0)
    assert token.tolist() == [0, 0, 0]
    assert logp.tolist() == [0.0, 0.0, 0.0]


def test_half_precision_logits_are_raised_first():
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    u = torch.from_numpy(uniforms(0, 0, 0, 64))
    half, full = sample(logits, u), sample(logits.float(), u)
    assert torch.equal(half[0], full[0])
    assert torch.equal(half[1], full[1])


def test_tokens_tied_with_the_last_one_kept_are_kept():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.5, 2.0]])
    for how in ((1.0, 2), (0.6, 0), (0.5, 3)):
        assert truncate(logits, *how)[0].isfinite().tolist() == [True, False, True, True, False, True]
    assert truncate(logits, 0.4, 3)[0].isfinite().tolist() == [True] + [False] * 5
    assert truncate(torch.zeros(2, 7), 0.1, 1).isfinite().all()


def kept_by_sorting(row, top_p, top_k, min_p):
    """In plain Python, with ties: all that are no less probable than the last one that is needed."""
    row = [float(x) for x in row]
    if 0 < top_k < len(row):
        row = [x if x >= sorted(row)[-top_k] else -math.inf for x in row]
    row = [x if x >= max(row) + (math.log(min_p) if min_p else -math.inf) else -math.inf for x in row]
    weights = sorted((math.exp(x - max(row)) for x in row), reverse=True)
    reached, needed = 0.0, 0
    while needed < len(weights) and (top_p == 1 or reached < top_p * sum(weights)):
        reached, needed = reached + weights[needed], needed + 1
    last = sorted(row, reverse=True)[needed - 1]
    return [i for i, x in enumerate(row) if x >= last and x > -math.inf]


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    "how", [(0.8, 0, 0.0), (1.0, 6, 0.0), (1.0, 0, 0.1), (0.85, 9, 0.02), (0.6, 0, 0.15), (0.99, 30, 0.0)]
)
def test_kept_sets_are_those_of_a_plain_sort(how, coarse):
    logits = torch.randn(60, 23, generator=torch.Generator().manual_seed(5)) * 2
    logits = logits.round() if coarse else logits  # whole numbers: ties in every row
    token, logp, kept = sample_kept(logits, torch.from_numpy(uniforms(3, 0, 0, 60)), 1.0, *how)
    for i in range(60):
        ids = kept_by_sorting(logits[i], *how)
        assert kept[i].nonzero()[:, 0].tolist() == ids
        assert int(token[i]) in ids
        over = logits[i, ids].double().log_softmax(-1)[ids.index(int(token[i]))]
        assert float(logp[i]) == pytest.approx(float(over), abs=1e-5)


def test_rows_do_not_see_each_other():
    logits = torch.randn(20, 11, generator=torch.Generator().manual_seed(1))
    u = torch.from_numpy(uniforms(3, 0, 0, 20))
    token, logp = sample(logits, u, 0.8, 0.9, 7)
    for i in range(20):
        one = sample(logits[i : i + 1], u[i : i + 1], 0.8, 0.9, 7)
        assert one[0].item() == token[i]
        assert one[1].item() == pytest.approx(logp[i].item(), abs=1e-6)


def test_logits_that_are_nan_give_logp_nan_and_no_crash():
    token, logp = sample(torch.full((2, 5), torch.nan), torch.tensor([0.1, 0.9]))
    assert ((token >= 0) & (token < 5)).all()
    assert logp.isnan().all()


def test_uniform_numbers_depend_on_seed_prompt_sample_and_nothing_else():
    rows = {key: tuple(uniforms(*key, 8)) for key in itertools.product((0, 1, 2**63 + 5), range(3), range(3))}
    assert len(set(rows.values())) == len(rows)
    assert tuple(uniforms(0, 1, 2, 3)) == rows[0, 1, 2][:3]  # asking for more changes none of the first
    flat = np.concatenate([uniforms(0, i, j, 50) for i in range(20) for j in range(20)])
    assert stats.kstest(flat, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(flat[:-50], flat[50:])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(settings, name):
    with pytest.raises(ValueError, match=f"^{name} must be [^\n]*$"):
        Sampling(**{"max_new_tokens": 4, **settings})


def test_whole_says_whether_every_token_can_be_drawn():
    assert Sampling(4).whole
    assert Sampling(4, temperature=0.3).whole
    cut = ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})
    assert not any(Sampling(4, **how).whole for how in (*cut, {"temperature": 0.0}))
    assert all(Sampling(4, **how, kept=True).gives_kept for how in cut)
    assert not any(Sampling(4, **how).gives_kept for how in cut)
    assert not any(Sampling(4, **how, temperature=0.0, kept=True).gives_kept for how in cut)
