"""Decoding attention against attention written out token by token, and its kernels under Triton's interpreter."""

import math

import pytest
import torch

from kernels import decode_checks, shared_checks
from kernels.decode_checks import case, double
from kernels.interpreted import interpreted
from rpg.kernels.decode import PromptSettings, decode_attention, in_8_bits, shared_samples, splits_for

CHECKS = [name for name in vars(decode_checks) if name.startswith("check_")]
SHARED_CHECKS = [name for name in vars(shared_checks) if name.startswith("check_")]


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name):
    assert interpreted("decode_checks", name) == ""


@pytest.mark.parametrize("name", SHARED_CHECKS)
def test_the_kernel_of_prompts(name):
    assert interpreted("shared_checks", name) == ""


def written_out(given, window):
    """One row, head and token at a time, in Python's numbers."""
    query = given["query_AHD"]
    heads, groups = query.shape[1], given["key_AGD"].shape[1]
    output, cache = torch.zeros_like(query), given["cache"]

    def at(page, place, g):
        """Key and value of one token."""
        scales = [1.0 if x is None else x[page, g, place] for x in (cache.key_scale_CGT, cache.value_scale_CGT)]
        stores = cache.keys_CGTD, cache.values_CGTD
        return [store[page, g, place].double() * scale for store, scale in zip(stores, scales, strict=True)]

    for a, length in enumerate(given["length_A"].tolist()):
        if length < 0:
            continue
        prompt, tokens, slot = (int(given[name][a]) for name in ("prompt_A", "prompt_length_A", "slot_A"))
        for h in range(heads):
            g = h // (heads // groups)
            rows = [at(given["prompt_page_QM"][prompt, i // cache.page], i % cache.page, g) for i in range(tokens)]
            rows += [at(given["page_SR"][slot, i // cache.page], i % cache.page, g) for i in range(length)]
            new = given["key_AGD"][a, g], given["value_AGD"][a, g]
            rows.append(new if cache.key_scale_CGT is None else [rounded(x) for x in new])
            rows = rows if window is None else rows[-window:]
            weights = [math.exp(given["scaling"] * float(query[a, h] @ key)) for key, _ in rows]
            output[a, h] = sum(w * value for w, (_, value) in zip(weights, rows, strict=True)) / sum(weights)
    return output


def rounded(x):
    """In 8 bits, and back."""
    scale = float(x.abs().max()) / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "8 bits"])
@pytest.mark.parametrize("window", [None, 1, 6, 30])
@pytest.mark.parametrize("group", [1, 3])
def test_the_reference_is_attention_written_out(group, window, fp8):
    given = double(case(group=group, fp8=fp8))
    want = written_out(given, window)
    torch.testing.assert_close(decode_attention(**given, window=window), want)
    assert not want[0].isnan().any()
    assert (want[1] == 0).all()


def test_the_reference_writes_the_new_token_and_nothing_else():
    given = case()
    before = [x.clone() for x in given["cache"].parts]
    decode_attention(**given)
    for found, was, new in zip(given["cache"].parts, before, ("key_AGD", "value_AGD"), strict=True):
        for a, length in enumerate(given["length_A"].tolist()):
            if length >= 0:
                page = int(given["page_SR"][int(given["slot_A"][a]), length // 16])
                was[page, :, length % 16] = given[new][a]
        torch.testing.assert_close(found, was, rtol=0, atol=0, equal_nan=True)


def test_8_bits_are_near_what_they_round():
    """A vector's error is at most a sixteenth of each number, or of the smallest that 8 bits tell apart."""
    x = torch.randn(100, 32) * torch.logspace(-6, 6, 100)[:, None]
    x[0] = 0
    rounded_x, scale = in_8_bits(x)
    error = (rounded_x.float() * scale[:, None] - x).abs()
    assert (error <= (x.abs() / 16).clamp(min=0) + scale[:, None] * 2**-10).all()
    assert not error[0].any()


def test_splits_fill_the_chip_and_no_more():
    assert splits_for(512, 500, 64) == 1
    assert splits_for(2, 130, 64) == 3
    assert splits_for(100, 100_000, 64) == 6
    assert splits_for(1, 10, 64) == 1


def test_prompts_are_shared_where_that_saves_much_reading():
    small, large = 512, 4096  # bytes of a token
    assert shared_samples(8, 1024, 600, small) == 8
    assert shared_samples(16, 128, 2048, large) == 16
    assert shared_samples(8, 1024, 178, small) == 1  # it was slower there
    assert shared_samples(8, 64, 178, small) == 1  # few rows
    assert shared_samples(8, 1024, 10, small) == 1  # short prompts
    assert shared_samples(1, 4096, 8192, large) == 1
    assert shared_samples(2, 4096, 8192, large) == 1


def test_tiles_hold_a_group_and_are_split_where_they_are_few():
    small, large = 128, 256  # bytes of a key
    assert PromptSettings.tuned(8, 1024, 14, 2, 192, small) == PromptSettings(8, 64)
    assert PromptSettings.tuned(16, 1024, 14, 2, 192, small).rows == 8  # of 7 query heads each
    assert PromptSettings.tuned(12, 1024, 8, 8, 192, small).rows == 8
    assert PromptSettings.tuned(16, 128, 32, 8, 2048, large) == PromptSettings(16, 64, stages=2, splits=4)
    assert PromptSettings.tuned(8, 8, 16, 1, 64, 1024) == PromptSettings(4, 16, stages=2)
