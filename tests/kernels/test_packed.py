"""Attention over a pack against each sequence attended to alone, with gradients, and what stands where in a pack."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpg.kernels.packed import Packing, _spread, attend, pack

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
ROWS = [  # prompt number, prompt length, response length
    (7, 5, 6),
    (3, 3, 1),
    (7, 5, 1),
    (3, 3, 4),
    (5, 1, 1),
    (7, 5, 3),
    (9, 3, 2),
]
SHARED = {True: torch.tensor([number for number, _, _ in ROWS]), False: None}
LAYOUT = max(n + t for _, n, t in ROWS) + 2


def layout(rows=ROWS):
    start = torch.tensor([n for _, n, _ in rows])
    mask = torch.arange(max(t for *_, t in rows) + 1)[None] < torch.tensor([t for *_, t in rows])[:, None]
    return start, mask


def packing(shared: bool) -> Packing:
    return pack(*layout(), LAYOUT, SHARED[shared])


def tensors(count, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH), (HEADS, WIDTH)]
    made = [torch.randn(count, *shape, generator=g, dtype=dtype) for shape in shapes]
    return [x.requires_grad_() for x in made[:3]], made[3]


def alone(query, key, value, window):
    """Attention of the last len(query) tokens of a sequence, written out."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    gap = at - torch.arange(len(key))[None]
    hidden = (gap < 0) | (gap >= (window or len(key)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def by_sequence(query, key, value, packing, window):
    """What a kernel for sequences of different lengths does with a pack: bounds, and keys that are spread out."""
    places = packing.key_K, packing.own_N, packing.again
    key, value = _spread(key, places), _spread(value, places)
    queries, keys = (itertools.pairwise(ends.tolist()) for ends in (packing.query_ends, packing.key_ends))
    bounds = zip(queries, keys, strict=True)
    return torch.cat([alone(query[a:b], key[c:d], value[c:d], window) for (a, b), (c, d) in bounds])


def by_position(query, key, value, packing, window):
    """From the meaning of a pack: a token sees its row's response so far and the prompt, wherever they stand."""
    row_N, position_N = packing.token_N // LAYOUT, packing.position_N
    out = []
    for i in range(len(row_N)):
        number, start, _ = ROWS[row_N[i]]
        if packing.again is None:
            same = row_N == row_N[i]
        else:
            numbers = torch.tensor([ROWS[r][0] for r in row_N])
            same = (row_N == row_N[i]) | ((numbers == number) & (position_N < start))
        seen = same & (position_N <= position_N[i])
        order = position_N[seen].argsort()
        assert position_N[seen][order].tolist() == list(range(int(position_N[i]) + 1))
        out.append(alone(query[i : i + 1], key[seen][order], value[seen][order], window))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("how", [attend, by_sequence])
def test_attention_is_that_of_each_sequence_alone(how, shared, window):
    about = packing(shared)
    inputs, upstream = tensors(len(about.token_N))
    found = attend(*inputs, about, 0.3, window) if how is attend else how(*inputs, about, window)
    grads = torch.autograd.grad(found, inputs, upstream)
    expected = by_position(*inputs, about, window)
    assert torch.allclose(found, expected, atol=1e-12)
    for grad, right in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert torch.allclose(grad, right, atol=1e-12)
    assert all(grad.abs().max() > 0.01 for grad in grads[0 if window != 1 else 2 :])  # one key: nothing to choose


def test_a_prompt_stands_in_the_pack_once_and_a_last_token_never():
    about = packing(shared=True)
    row, column = about.token_N // LAYOUT, about.token_N % LAYOUT
    assert torch.equal(column, about.position_N)
    found = list(zip(row.tolist(), column.tolist(), strict=True))
    own = [(1, range(3)), (3, range(3, 6)), (4, range(1)), (0, range(10)), (5, range(5, 7)), (6, range(4))]
    assert found == [(r, c) for r, columns in own for c in columns]  # rows 1 and 2 have one token, which is the last
    assert (about.queries, about.keys) == (10, 10)
    alone = packing(shared=False)
    assert len(alone.token_N) == sum(n + t - 1 for _, n, t in ROWS)
    assert alone.again is None
    assert torch.equal(alone.key_K, torch.arange(len(alone.token_N)))


@pytest.mark.parametrize("shared", [True, False])
def test_states_targets_and_places_are_those_of_the_response_tokens(shared):
    start, mask = layout()
    mask[0, 2] = mask[3, 0] = False  # tokens that do not count, in the middle and first
    about = pack(start, mask, LAYOUT, SHARED[shared])
    row, t = mask.nonzero(as_tuple=True)
    assert torch.equal(about.place_R, row * mask.shape[1] + t)
    assert torch.equal(about.target_R, row * LAYOUT + start[row] + t)
    assert torch.equal(about.position_N[about.state_R], start[row] + t - 1)
    holder = about.token_N[about.state_R] // LAYOUT
    numbers = torch.tensor([number for number, _, _ in ROWS])
    assert torch.equal(numbers[holder], numbers[row])
    assert torch.equal(holder[t > 0], row[t > 0])


def test_rows_without_a_response_token_are_left_out():
    start, mask = layout()
    mask[0] = mask[4] = False
    about = pack(start, mask, LAYOUT, SHARED[True])
    assert set((about.token_N // LAYOUT).tolist()) == {1, 2, 3, 5, 6}
    assert len(about.state_R) == int(mask.sum())


def test_prompts_of_different_lengths_cannot_be_the_same():
    with pytest.raises(ValueError, match=r"^prompt_B: rows of prompt 4 have prompts of 5 and 3 tokens$"):
        pack(*layout(ROWS[:2]), LAYOUT, torch.tensor([4, 4]))


class Sums(TorchDispatchMode):
    """The precision of every sum over copies."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.index_add_:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


def test_gradients_of_many_copies_are_summed_in_single_precision():
    """In bfloat16 a sum of ones stays at 256, on a GPU at least."""
    copies = 400
    about = pack(
        torch.tensor([1]).repeat(copies), torch.ones(copies, 2, dtype=torch.bool), 3, torch.zeros(copies).long()
    )
    x = torch.zeros(len(about.token_N), 1, 1, dtype=torch.bfloat16, requires_grad=True)
    spread = _spread(x, (about.key_K, about.own_N, about.again))
    with Sums() as sums:
        spread.backward(torch.ones_like(spread))
    assert sums.dtypes == [torch.float32]
    assert x.grad[0].item() == copies
    assert torch.equal(x.grad[1:], torch.ones_like(x.grad[1:]))
