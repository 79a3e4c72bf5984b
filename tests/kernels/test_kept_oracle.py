"""What the mutants of the kept sets' code are shown: sets drawn from, cut and scored over, each written out by hand.

No fixtures: the mutation check calls these functions by themselves (tests/loss/mutations.py).
"""

import math
import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import rpg.kernels.logp  # noqa: F401
from rpg.kernels import kept as kept_module
from rpg.kernels import linear_logp
from rpg.kernels.kept import Kept
from rpg.kernels.sample_torch import sample_kept, truncate

logp_module = sys.modules["rpg.kernels.logp"]
SETS = [[0, 3, 4], [2], [1, 2, 5, 6, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], [7, 8]]
TARGET = [3, 2, 8, 0, 7]
N, V, H = len(SETS), 9, 3
# tokens and bytes of a chunk of logits (None: all at once, the definition), numbers gathered at once (None: none are)
WAYS = {
    "definition": (None, None),
    "gathered": ((N, 4 * N * V), 2**20),
    "gathered two at a time": ((N, 4 * N * V), 2 * H),
    "gathered where one is too many": ((N, 4 * N * V), 1),
    "one chunk": ((N, 4 * N * V), None),
    "columns by three": ((N, 4 * N * 3), None),
    "columns by four": ((N, 4 * N * 4), None),
    "tokens by two, columns by five": ((2, 4 * 2 * 5), None),
}


def kept(sets=SETS):
    ids = torch.tensor([i for one in sets for i in one], dtype=torch.int32)
    return Kept(ids, torch.tensor([len(one) for one in sets]))


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64).to(dtype) for n in (N, V))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.tensor(TARGET)


def by_hand(hidden, weight, temperature):
    """A state at a time: log-probability of the target and entropy, over its set."""
    logps, entropies = [], []
    for n, (ids, target) in enumerate(zip(SETS, TARGET, strict=True)):
        z = (weight[ids] * hidden[n]).sum(-1) / temperature
        logp = z - z.exp().sum().log()
        logps.append(logp[ids.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logps), torch.stack(entropies)


def computing(way):
    chunk, gathered = WAYS[way]
    stack = ExitStack()
    if chunk is not None:
        stack.enter_context(mock.patch.object(logp_module, "WHOLE_ELEMENTS", 0))
        stack.enter_context(mock.patch.dict(logp_module.CHUNK, cpu=chunk))
        stack.enter_context(mock.patch.dict(kept_module.WORTH, cpu=0 if gathered else 10**9))
        stack.enter_context(mock.patch.dict(kept_module.CHUNK, cpu=gathered or 1))
    return stack


@pytest.mark.parametrize("way", WAYS)
def test_scored_over_the_set_and_nothing_else(way):
    a, b = torch.linspace(1, 2, N, dtype=torch.float64), torch.linspace(-1, 0.5, N, dtype=torch.float64)
    for temperature, (of_logp, of_entropy) in ((1.0, (a, b)), (0.6, (a, b)), (0.6, (a, None)), (1.3, (None, b))):
        for frozen in (None, 0, 1):
            hidden, weight, target = inputs()
            leaves = [x for i, x in enumerate((hidden, weight)) if i != frozen]
            if frozen is not None:
                (hidden, weight)[frozen].requires_grad_(False)
            with computing(way):
                found = linear_logp(hidden, weight, target, temperature, kept())
                wanted = by_hand(hidden, weight, temperature)
                for x, y in zip(found, wanted, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
                slopes = []
                for logp, entropy in (found, wanted):
                    parts = [x * c for x, c in ((logp, of_logp), (entropy, of_entropy)) if c is not None]
                    slopes.append(torch.autograd.grad(sum(x.sum() for x in parts), leaves))
                for x, y in zip(*slopes, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_in_single_precision_the_types_are_those_of_the_inputs(way):
    hidden, weight, target = inputs(torch.float32)
    with computing(way):
        logp, entropy = linear_logp(hidden, weight, target, 0.8, kept())
        d_hidden, d_weight = torch.autograd.grad((logp + entropy).sum(), (hidden, weight))
    assert {x.dtype for x in (logp, entropy, d_hidden, d_weight)} == {torch.float32}
    torch.testing.assert_close(logp, by_hand(hidden.double(), weight.double(), 0.8)[0].float(), rtol=1e-5, atol=1e-6)
    assert (d_weight[[i for i in range(V) if not any(i in ids for ids in SETS)]] == 0).all()


def test_without_sets_it_is_the_whole_vocabulary():
    for way in WAYS:
        hidden, weight, target = inputs()
        with computing(way):
            for x, y in zip(
                linear_logp(hidden, weight, target, 0.8),
                linear_logp(hidden, weight, target, 0.8, kept([list(range(V))] * N)),
                strict=True,
            ):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
            for temperature in (0.0, -0.5):
                with pytest.raises(ValueError, match="temperature"):
                    linear_logp(hidden, weight, target, temperature, kept())


def test_large_logits_do_not_overflow():
    for way in WAYS:
        hidden, weight, target = inputs()
        with computing(way):
            found = linear_logp(hidden * 500, weight, target, 1.0, kept())
        torch.testing.assert_close(found[0][1], torch.zeros((), dtype=torch.float64))
        assert all(x.isfinite().all() for x in found)


def test_the_sets_themselves():
    sets = kept()
    assert sets.size == N
    assert sets.row_K.tolist() == [n for n, ids in enumerate(SETS) for _ in ids]
    assert sets.to(torch.device("cpu")) is sets
    outside = sets.outside(V)
    assert [[i for i in range(V) if not outside[n, i]] for n in range(N)] == SETS
    for rows in (1, 2, 5):
        parts = sets.split(rows)
        assert [part.size for part in parts] == [len(SETS[i : i + rows]) for i in range(0, N, rows)]
        for i, part in enumerate(parts):
            assert part.ids_K.tolist() == kept(SETS[rows * i : rows * (i + 1)]).ids_K.tolist()
    with mock.patch.dict(kept_module.WORTH, cpu=9):  # 20 tokens of 5 states
        assert sets.few(36)
        assert not sets.few(35)


# ---- which tokens are kept -------------------------------------------------------------------------------------------

ROW = [2.0, 1.0, 0.0, 1.0, -1.0, -torch.inf]  # probabilities .521, .191, .070, .191, .026, 0
CASES = [  # top_p, top_k, min_p -> kept
    ((1.0, 0, 0.0), [0, 1, 2, 3, 4]),
    ((1.0, 1, 0.0), [0]),
    ((1.0, 2, 0.0), [0, 1, 3]),  # tied with the second
    ((1.0, 4, 0.0), [0, 1, 2, 3]),
    ((1.0, 6, 0.0), [0, 1, 2, 3, 4]),
    ((1.0, 9, 0.0), [0, 1, 2, 3, 4]),
    ((0.5, 0, 0.0), [0]),
    ((0.6, 0, 0.0), [0, 1, 3]),
    ((0.9, 0, 0.0), [0, 1, 3]),
    ((0.95, 0, 0.0), [0, 1, 2, 3]),
    ((0.99, 0, 0.0), [0, 1, 2, 3, 4]),
    ((1.0, 0, 0.3), [0, 1, 3]),  # e⁻¹ = 0.37 of the largest
    ((1.0, 0, 0.4), [0]),
    ((1.0, 0, 1.0), [0]),
    ((1.0, 0, 0.1), [0, 1, 2, 3]),
    ((0.95, 4, 0.0), [0, 1, 3, 2]),  # of what top-k left, the first three are .927
    ((0.9, 3, 0.0), [0, 1, 3]),
    ((0.57, 3, 0.0), [0]),  # of what top-k left, the first is .576
    ((0.57, 0, 0.0), [0, 1, 3]),  # of all, .521
    ((0.57, 0, 0.3), [0]),
    ((1.0, 4, 0.3), [0, 1, 3]),
]


@pytest.mark.parametrize(("how", "wanted"), CASES)
def test_which_tokens_are_kept(how, wanted):
    rows = torch.tensor([ROW, ROW[::-1]])
    for temperature in (1.0, 0.5, 2.0):
        token, logp, inside = sample_kept(rows * temperature, torch.tensor([0.0, 0.999]), temperature, *how)
        assert token.shape == logp.shape == (2,)
        for r, row in enumerate((ROW, ROW[::-1])):
            ids = sorted(wanted if r == 0 else [5 - i for i in wanted])
            assert inside[r].nonzero()[:, 0].tolist() == ids
            total = sum(math.exp(row[i]) for i in ids)
            assert int(token[r]) == (ids[0] if r == 0 else ids[-1])  # the ends of the cumulative distribution
            assert float(logp[r]) == pytest.approx(row[int(token[r])] - math.log(total), abs=1e-5)
    cut = truncate(rows, *how)
    assert torch.equal(cut[inside], rows[inside])
    assert (cut[~inside] == -torch.inf).all()


def test_a_mass_that_is_reached_exactly_needs_no_more():
    halves = torch.tensor([[1.0, 0.5, 0.25, 0.25]], dtype=torch.float64).log()
    for top_p, wanted in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4)):
        assert int(truncate(halves, top_p).isfinite().sum()) == wanted
    assert truncate(torch.tensor([[0.0, -60.0]])).isfinite().all()  # however small, without a top-p
    quarters = torch.tensor([[1.0, 0.25, 0.125]], dtype=torch.float64).log()
    assert [int(truncate(quarters, min_p=p).isfinite().sum()) for p in (0.25, 0.26, 0.1)] == [2, 1, 3]


def test_a_draw_follows_the_cumulative_distribution():
    row = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    for u, token in ((0.0, 0), (0.6, 0), (0.64, 2), (0.9, 2)):  # over 0 and 2: 0.625 and 0.375
        found, logp, inside = sample_kept(row, torch.tensor([u]), 1.0, 0.75, 0, 0.0)
        assert inside.tolist() == [[True, False, True, False]]
        assert int(found) == token
        assert float(logp) == pytest.approx(math.log(0.625 if token == 0 else 0.375), abs=1e-5)
