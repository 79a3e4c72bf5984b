"""Decoding attention against attention written out token by token, and its kernels under Triton's interpreter."""

import functools
import math

import pytest
import torch

from kernels import decode_checks
from kernels.decode_checks import case, double
from kernels.interpreted import interpreted
from rpg.kernels.decode import decode_attention, splits_for

CHECKS = [name for name in vars(decode_checks) if name.startswith("check_")]
run = functools.cache(lambda: interpreted("decode_checks"))


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name):
    assert run()[name] == ""


def written_out(given, window):
    """One row, head and token at a time, in Python's numbers."""
    query = given["query_AHD"]
    heads, groups = query.shape[1], given["key_AGD"].shape[1]
    output = torch.zeros_like(query)
    for a, length in enumerate(given["length_A"].tolist()):
        if length < 0:
            continue
        prompt, tokens, slot = (int(given[name][a]) for name in ("prompt_A", "prompt_length_A", "slot_A"))
        for h in range(heads):
            g = h // (heads // groups)
            rows = [
                (given["prompt_keys_PGMD"][prompt, g, i], given["prompt_values_PGMD"][prompt, g, i])
                for i in range(tokens)
            ]
            rows += [(given["keys_SGRD"][slot, g, i], given["values_SGRD"][slot, g, i]) for i in range(length)]
            rows += [(given["key_AGD"][a, g], given["value_AGD"][a, g])]
            rows = rows if window is None else rows[-window:]
            weights = [math.exp(given["scaling"] * float(query[a, h] @ key)) for key, _ in rows]
            output[a, h] = sum(w * value for w, (_, value) in zip(weights, rows, strict=True)) / sum(weights)
    return output


@pytest.mark.parametrize("window", [None, 1, 6, 30])
@pytest.mark.parametrize("group", [1, 3])
def test_the_reference_is_attention_written_out(group, window):
    given = double(case(group=group))
    want = written_out(given, window)
    torch.testing.assert_close(decode_attention(**given, window=window), want)
    assert not want[0].isnan().any()
    assert (want[1] == 0).all()


def test_the_reference_writes_the_new_token_and_nothing_else():
    given = case()
    before = {name: given[name].clone() for name in ("keys_SGRD", "values_SGRD")}
    decode_attention(**given)
    for name, new in (("keys_SGRD", "key_AGD"), ("values_SGRD", "value_AGD")):
        for a, length in enumerate(given["length_A"].tolist()):
            if length >= 0:
                before[name][int(given["slot_A"][a]), :, length] = given[new][a]
        torch.testing.assert_close(given[name], before[name], rtol=0, atol=0, equal_nan=True)


def test_splits_fill_the_chip_and_no_more():
    assert splits_for(512, 500, 64) == 1
    assert splits_for(2, 130, 64) == 3
    assert splits_for(100, 100_000, 64) == 6
    assert splits_for(1, 10, 64) == 1
