"""Checks of the sampling kernels, run under Triton's interpreter (test_sample.py)."""

from __future__ import annotations

import math

import torch

from rpg.kernels.sample import Pool, fused_sample, launch
from rpg.kernels.sample_torch import sample, truncate
from rpg.kernels.step import DEAD, LENGTH, SLOT

LAST = 1 - 2.0**-53
MIN_P = [(1.0, 1.0, 0, 0.1), (0.8, 0.9, 6, 0.05), (1.3, 0.7, 0, 0.2), (1.0, 1.0, 9, 1.0)]
HOW = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 1.0, 5), (1.0, 0.8, 0), (0.6, 0.95, 0), (1.3, 0.9, 7), (1.0, 0.3, 40)]


def draw(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    return logits, torch.rand(rows, generator=generator, dtype=torch.double)


def agree(logits: torch.Tensor, u: torch.Tensor, how: tuple[float, ...], **settings: int) -> set[int]:
    """Tokens and log-probabilities of the kernels are those of sample(); which tokens."""
    want_token, want_logp = sample(logits, u, *how)
    token, logp = launch(logits, u, *how, **settings)  # type: ignore[arg-type]
    assert token.dtype == torch.int64
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, want_logp, rtol=1e-5, atol=3e-6, msg=lambda text: f"{how}: {text}")
    assert torch.equal(token, want_token), (how, token, want_token)
    return set(token.tolist())


def check_sizes() -> None:
    for vocabulary, hows in ((8, HOW[::5]), (130, HOW), (1000, HOW[::5])):
        for how in hows:
            agree(*draw(2, vocabulary, vocabulary), how)


def check_min_p() -> None:
    for how in MIN_P:
        agree(*draw(3, 130, 7), how)
        agree(*draw(3, 130, 7), how, room=4)


def pool(slots: int, tokens: int, size: int) -> Pool:
    table = torch.full((slots, tokens), -1)
    return Pool(torch.full((size,), -1, dtype=torch.int32), torch.tensor([3, 1000]), table, table.clone().int())


def state(rows: int) -> torch.Tensor:
    """Rows 1, 4, … are dead; the others have drawn so many tokens."""
    found = torch.zeros(5, rows + 2, dtype=torch.int32)[:, :rows]
    found[SLOT] = torch.arange(rows).flip(0)
    found[LENGTH] = torch.arange(rows) % 3 - 1
    found[LENGTH, 1::3] = DEAD
    return found


def kept_of(pool: Pool, slot: int, t: int) -> list[int]:
    begin, size = int(pool.start_SR[slot, t]) - 1000, int(pool.size_SR[slot, t])
    return pool.ids_P[begin : begin + size].tolist()


def check_kept_sets() -> None:
    """Those of truncate(), in order, of live rows only; a pool without room is not written beyond its end."""
    rows = 7
    for half, how, settings in [
        *((False, (*how, 0.0), {}) for how in HOW[2:]),
        *((True, how, {"room": 8}) for how in MIN_P),
        (False, (1.0, 0.9, 0, 0.01), {"room": 8, "search": (128, 8, 4)}),
        (False, (1.0, 0.95, 0, 0.0), {"search": (128, 8, 4)}),
    ]:
        logits, u = draw(rows, 300, 8, scale=1.0)
        logits[0, :250] = -torch.inf
        logits = logits.bfloat16() if half else logits
        want = truncate(logits.float() / how[0], *how[1:]).isfinite()
        sets, books = pool(rows, 3, 4000), state(rows)
        token, logp = launch(logits, u, *how, kept=(sets, books), **settings)  # type: ignore[arg-type]
        again = launch(logits, u, *how, **settings)  # type: ignore[arg-type]
        assert torch.equal(token, again[0])
        assert torch.equal(logp, again[1])
        alive = [row for row in range(rows) if books[LENGTH, row] > DEAD]
        for row in alive:
            found = kept_of(sets, int(books[SLOT, row]), int(books[LENGTH, row]) + 1)
            assert found == want[row].nonzero()[:, 0].tolist(), (how, row)
        total = int(want[alive].sum())
        assert sets.cursor_2.tolist() == [3 + total, 1000]
        assert (sets.size_SR >= 0).sum() == len(alive)
        assert (sets.ids_P >= 0).sum() == total
        full = pool(rows, 3, 3 + total - 1)
        launch(logits, u, *how, kept=(full, books), **settings)  # type: ignore[arg-type]
        assert int(full.cursor_2[0]) == 3 + total > len(full.ids_P)


def check_rows_with_no_room_for_the_tokens_collected() -> None:
    for how in HOW[2:]:
        agree(*draw(2, 700, 1), how, room=4)


def check_several_blocks() -> None:
    for how in (HOW[0], *HOW[4:]):
        for room in (4, 8192):
            token, logp = launch(*draw(2, 300, 2), *how, room=room, block=128, search=(128, 8, 4))
            want = sample(*draw(2, 300, 2), *how)
            assert torch.equal(token, want[0])
            torch.testing.assert_close(logp, want[1], rtol=1e-5, atol=3e-6)


def check_half_precision_rows_with_strides_and_float32_uniforms() -> None:
    logits, u = draw(4, 401, 3)
    logits = logits.bfloat16()  # 8 bits: ties by the dozen
    wide = torch.full((4, 500), torch.nan, dtype=torch.bfloat16)
    wide[:, :401] = logits
    for how in HOW:
        agree(wide[:, :401], torch.stack([u, u], 1).float()[:, 0], how)
    for how in HOW[2::2]:
        agree(wide[:, :401], u, how, room=16)


def check_ties_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.5, 2.0, -1.0, 0.0, -0.0]]).expand(8, -1)
    u = (torch.arange(8, dtype=torch.double) + 0.5) / 8
    assert agree(logits, u, (1.0, 1.0, 2)) == {0, 2, 3, 5}
    assert agree(logits, u, (1.0, 0.6, 0)) == {0, 2, 3, 5}
    assert agree(logits, u, (1.0, 0.5, 3)) == {0, 2, 3, 5}
    assert agree(logits[:2], u[[0, -1]], (1.0, 0.4, 3)) == {0}
    zeros = torch.tensor([[0.0, -0.0, 1.0, -1.0]]).expand(4, -1)
    assert agree(zeros, u[::2], (1.0, 1.0, 2)) == {0, 1, 2}
    agree(torch.zeros(3, 300), u[:3] + 1e-4, (1.0, 0.5, 3))


def check_impossible_tokens_are_not_drawn() -> None:
    logits, _ = draw(2, 300, 4)
    logits[:, ::3] = -torch.inf
    logits[:, 128:] = -torch.inf
    logits[:, :5] = -torch.inf
    logits[1] = -torch.inf
    logits[1, 77] = -3.0
    edges = torch.tensor([0.0, 1 - 2.0**-24, LAST, 1.0], dtype=torch.double).repeat_interleave(2)
    for how in (HOW[0], HOW[5], (1.0, 1.0, 250)):
        for room in (8, 8192):
            token, logp = launch(logits.repeat(4, 1), edges, *how, room=room)
            assert logits.repeat(4, 1)[torch.arange(8), token].isfinite().all(), (how, token)
            assert logp.isfinite().all(), (how, logp)
            assert (token[1::2] == 77).all()


def check_nan_and_infinite_logits() -> None:
    logits, u = draw(6, 150, 5)
    logits[0] = torch.nan
    logits[1, 70] = torch.nan
    logits[2, 0] = -torch.nan
    logits[3, 149] = torch.inf
    logits[4] = -torch.inf
    for how in (HOW[0], HOW[2], HOW[3]):
        for room in (8, 8192):
            token, logp = launch(logits, u, *how, room=room)
            assert ((token >= 0) & (token < 150)).all(), (how, token)
            assert logp[:5].isnan().all(), (how, logp)
            want = sample(logits[5:], u[5:], *how)
            assert token[5] == want[0][0]


def check_measure_of_the_uniform_numbers_of_a_token_is_its_probability() -> None:
    """A dense grid of numbers, 150 words: each is drawn as often as its probability says, to within one number."""
    logits = draw(1, 150, 6)[0]
    for how, count in (((1.0, 1.0, 0), 70), ((1.0, 0.9, 30), 30)):
        u = (torch.arange(count, dtype=torch.double) + 0.5) / count
        token, logp = launch(logits.expand(count, -1), u, *how)
        p = truncate(logits.double(), *how[1:]).softmax(-1)[0]
        drawn = torch.bincount(token, minlength=150)
        assert ((drawn - count * p).abs() <= 1).all()
        assert torch.equal(token, token.sort().values)
        torch.testing.assert_close(logp.double().exp(), p[token], rtol=1e-5, atol=0)


def check_small_probabilities_far_from_the_first_word() -> None:
    """Tokens of probability 1e-9 behind one of nearly 1: float32 sums could not tell them apart."""
    logits = torch.full((3, 200), -20.0)
    logits[:, 3] = 0.0
    weight = math.exp(-20.0)
    u = (1 + torch.tensor([70.5, 100.5, 190.5], dtype=torch.double) * weight) / (1 + 199 * weight)
    agree(logits, u, (1.0, 1.0, 0))
    assert fused_sample(logits, u)[0].tolist() == [71, 101, 191]


def check_temperature_zero_and_no_rows() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    token, logp = fused_sample(logits, torch.tensor([0.9]), 0.0)
    assert (token.tolist(), logp.tolist()) == ([1], [0.0])
    token, logp = fused_sample(logits[:0], torch.zeros(0))
    assert (token.shape, logp.shape, token.dtype) == ((0,), (0,), torch.int64)
