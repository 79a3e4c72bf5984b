"""What the mutants of the code that stores and cuts kept sets are shown: sets in any order, back with their tokens.

No fixtures: the mutation check calls these functions by themselves (tests/loss/mutations.py).
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from rpg.rollout import kept as stored
from rpg.rollout.kept import KeptIds, KeptPool, KeptStore, TooManyKept
from rpg.training import batch as batch_module
from rpg.training.batch import Batch

CPU = torch.device("cpu")
V = 6
SETS = [  # of three responses, token by token
    [[0, 2], [1]],
    [[5], [0, 1, 2, 3, 4, 5], [3, 4]],
    [[1, 2, 3]],
]
LENGTHS = [len(sets) for sets in SETS]


def kept_ids(sets):
    return KeptIds(np.array([i for ids in sets for i in ids], np.int32), np.array([len(ids) for ids in sets], np.int32))


def mask(ids):
    return torch.isin(torch.arange(V), torch.tensor(ids))


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_sets_come_back_with_the_tokens_they_were_drawn_for(at_once):
    store = KeptStore(3, 4, CPU)
    drawn = [[(2, 0), (0, 0)], [(1, 0)], [(0, 1), (1, 1)], [(1, 2)]]  # (response, token) of each step
    for step in drawn:
        request, t = (torch.tensor(column) for column in zip(*step, strict=True))
        store.put(request, t, torch.stack([mask(SETS[r][i]) for r, i in step]))
    with mock.patch.object(stored, "AT_ONCE", at_once):
        assert store.read(LENGTHS) == [kept_ids(sets) for sets in SETS]
    assert store.chunks == []


def test_equal_are_sets_of_equal_ids_and_counts():
    one = kept_ids(SETS[0])
    assert one == kept_ids(SETS[0])
    assert one != kept_ids([[0], [2, 1]])
    assert one != kept_ids([[0, 3], [1]])
    assert one != SETS[0]


def test_too_many_are_refused_and_no_fewer():
    with mock.patch.object(stored, "HOST_BYTES", 4 * 5):
        store = KeptStore(1, 1, CPU)
        store.add(torch.arange(5))
        with pytest.raises(TooManyKept, match=r"rollout\.top_k"):
            store.add(torch.arange(1))


def test_a_pool_goes_to_the_host_when_a_quarter_is_used():
    with mock.patch.object(stored, "POOL", 12):
        pool = KeptPool(1, 1, CPU)
    store, cursor = KeptStore(1, 1, CPU), pool.pool.cursor_2
    pool.pool.ids_P.copy_(torch.arange(12))
    cursor[0] = 3
    pool.spill(store)
    assert (store.total, cursor.tolist()) == (0, [3, 0])
    cursor[0] = 4
    pool.spill(store)
    assert (store.chunks[0].tolist(), cursor.tolist()) == ([0, 1, 2, 3], [0, 4])
    pool.pool.ids_P.zero_()  # what was spilled is a copy
    assert store.chunks[0].tolist() == [0, 1, 2, 3]
    cursor[0] = 12
    pool.spill(store, last=True)
    assert (store.total, cursor.tolist()) == (16, [0, 16])
    cursor[0] = 13
    with pytest.raises(TooManyKept):
        pool.spill(store)
    pool.reset()
    assert cursor.tolist() == [0, 0]


def made(sets=SETS):
    mask_BT = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    count_BT, ids_K = batch_module._kept([None if one is None else kept_ids(one) for one in sets], mask_BT)
    numbers_B = torch.arange(3)
    logp_BT = torch.zeros(3, 3)
    return Batch(
        ids_BL=torch.zeros(3, 5, dtype=torch.long),
        start_B=torch.full((3,), 2),
        mask_BT=mask_BT,
        old_logp_BT=logp_BT,
        reward_B=numbers_B.float(),
        group_B=numbers_B,
        kept_count_BT=count_BT,
        kept_ids_K=ids_K,
    )


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1], [1, 1, 0]])
def test_some_rows_have_their_sets_in_their_order(rows):
    part = made().rows(torch.tensor(rows))
    assert part.kept.ids_K.tolist() == [i for r in rows for ids in SETS[r] for i in ids]
    assert part.kept.count_N.tolist() == [len(ids) for r in rows for ids in SETS[r]]
    again = part.rows(torch.arange(len(rows)).flip(0))
    assert again.kept.ids_K.tolist() == [i for r in rows[::-1] for ids in SETS[r] for i in ids]


def test_sizes_are_reported_and_sets_are_of_all_or_none():
    metrics = made().kept_metrics()
    assert (metrics["kept/mean"], metrics["kept/max"]) == (15 / 6, 6.0)
    for whole in (made([None, None, None]), replace(made(), kept_ids_K=None)):
        assert (whole.kept, whole.kept_metrics(), whole.rows(torch.tensor([1])).kept) == (None, {}, None)
    with pytest.raises(ValueError, match="1 of 3 responses do not tell"):
        made([SETS[0], None, SETS[2]])
