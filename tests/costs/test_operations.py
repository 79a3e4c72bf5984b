"""Floors and operations, against hand computation and against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rpg.bench.synthetic import SHAPES, Sizes, make_model, make_tokenizer, random_prompts, sizes_for, vocabulary
from rpg.bench.train import make_batch
from rpg.costs.operations import Ceilings, Operations, logp_flops
from rpg.models.policy import Policy

HALF_BILLION = Operations(layers=24, heads=14, key_heads=2, width=64, hidden=896, vocab=151936, body=357_826_560)
LAYER = 896 * 896 + 2 * 896 * 128 + 896 * 896 + 3 * 896 * 4864


def on_meta(name):
    return make_model(name, Sizes(device="meta"))


def test_half_a_billion_is_what_it_says():
    found = Operations.of(on_meta("0.5b"), 2)
    assert found == HALF_BILLION
    assert found.body == 24 * LAYER
    assert found.kv_bytes == 24 * 2 * 2 * 64 * 2 == 12_288


@pytest.mark.parametrize(("name", "low", "high"), [("17m", 16e6, 18e6), ("1.5b", 1.5e9, 1.6e9), ("4b", 3.9e9, 4.1e9)])
def test_shapes_have_their_number_of_weights(name, low, high):
    model = on_meta(name)
    assert low <= sum(p.numel() for p in model.parameters()) <= high
    assert model.config.tie_word_embeddings
    assert set(SHAPES) == {"tiny", "17m", "0.5b", "1.5b", "4b"}


def test_a_decoding_step_by_hand():
    weights = (24 * LAYER + 896 * 151936) * 2
    assert HALF_BILLION.decode_bytes(256, 256 * 338) == weights + 256 * 338 * 12_288 + 2 * 256 * 151936 * 2
    attention = 4 * 24 * 14 * 64 * 256 * 338
    assert HALF_BILLION.decode_flops(256, 338) == 2 * 256 * (24 * LAYER + 896 * 151936) + attention


def test_the_floor_is_the_longer_of_computing_and_reading():
    ceilings = Ceilings(flops=100.0, bytes=10.0)
    assert ceilings.seconds(50, 20) == 2.0
    assert ceilings.seconds(500, 20) == 5.0
    assert ceilings.seconds(500) == 5.0


def test_the_floor_of_a_decoding_step_holds_a_shared_prompt_once():
    reading = Ceilings(flops=1e30, bytes=1.0)
    alone = HALF_BILLION.decode_seconds(reading, 512, 178, 160)
    shared = HALF_BILLION.decode_seconds(reading, 512, 178, 160, groups=64)
    assert alone == HALF_BILLION.decode_bytes(512, 512 * 338)
    assert alone - shared == (512 - 64) * 178 * 12_288
    computing = Ceilings(flops=1.0, bytes=1e30)
    assert HALF_BILLION.decode_seconds(computing, 512, 178, 160, groups=64) == HALF_BILLION.decode_flops(512, 338)


def test_forward_is_what_torch_counts():
    """torch counts every pair of an attention, seen or not."""
    model = make_model("tiny", sizes_for("cpu"))
    model.set_attn_implementation("eager")
    operations = Operations.of(model, 4)
    rows, length = 3, 10
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(rows, length, dtype=torch.long))
    rotary = 2 * length * 4  # the product that makes the angles: of one row, half a head's width
    by_hand = 2 * rows * length * (operations.body + operations.head) + operations._attention(rows * length * length)
    assert counter.get_total_flops() - by_hand in (0, rotary)


@pytest.mark.parametrize("shared", [True, False])
def test_training_by_enumeration(shared):
    groups, samples, prompt, response = 2, 3, 4, 5
    operations = Operations(layers=2, heads=4, key_heads=2, width=8, hidden=32, vocab=64, body=1000)
    tokens = pairs = heads = 0
    for _ in range(groups):
        for sample in range(samples):
            for place in range(prompt + response):
                heads += place >= prompt
                if (place < prompt and shared and sample) or place == prompt + response - 1:  # nothing comes after it
                    continue
                tokens += 1
                pairs += place + 1
    by_hand = 6 * tokens * 1000 + 6 * heads * 32 * 64 + 12 * 2 * 4 * 8 * pairs
    assert operations.train_flops(groups, samples, prompt, response, shared) == by_hand


def test_the_products_of_training_are_those_that_torch_counts():
    """Of the policy's own pass, forward and backward; attention aside, whose masked pairs torch counts too."""
    sizes = sizes_for("cpu")
    model = make_model("tiny", sizes)
    operations, policy = Operations.of(model, 4), Policy(model, make_tokenizer(64))
    batch = make_batch(policy, sizes)
    with FlopCounterMode(display=False) as counter:
        policy.score(batch.ids_BL, batch.start_B, batch.mask_BT, batch.group_B).logp_BT.sum().backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(count for kind, count in found.items() if str(kind) in ("aten.mm", "aten.addmm"))
    shape = sizes.groups, sizes.samples, sizes.prompt_tokens, sizes.new_tokens
    assert products == replace(operations, heads=0).train_flops(*shape, shared=True)


def test_prompts_and_head_by_hand():
    operations = Operations(layers=2, heads=4, key_heads=2, width=8, hidden=32, vocab=64, body=1000)
    assert operations.prefill_flops(3, 4) == 2 * 3 * 4 * 1000 + 2 * 3 * 32 * 64 + 4 * 2 * 4 * 8 * 3 * (1 + 2 + 3 + 4)
    assert logp_flops(2, 3, 5) == 3 * (2 * 2 * 3 * 5)


def test_the_tokenizer_says_numbers_and_its_end_cannot_be_drawn():
    model, tokenizer = make_model("tiny", sizes_for("cpu")), make_tokenizer(64)
    (ids,) = random_prompts(1, 20, vocabulary(model))
    assert tokenizer(" ".join(map(str, ids)))["input_ids"] == ids
    assert tokenizer.decode(ids) == " ".join(map(str, ids))
    assert 0 not in ids
    assert tokenizer.eos_token_id == vocabulary(model)
    assert model.generation_config.eos_token_id is None


def test_sizes_of_devices_and_quick():
    assert (sizes_for("cuda").model, sizes_for("cuda").dtype, sizes_for("cuda").element) == ("0.5b", "bfloat16", 2)
    assert (sizes_for("cpu").model, sizes_for("cpu").dtype, sizes_for("cpu").element) == ("tiny", "float32", 4)
    quick = sizes_for("cuda", True, groups=None, slots=7)
    assert (quick.groups, quick.slots, quick.repeats, quick.quick) == (32, 7, 1, True)
