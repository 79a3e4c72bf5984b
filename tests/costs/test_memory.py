"""The estimate against numbers counted by hand, and what is made of too little memory."""

from dataclasses import replace

import pytest
import torch
import transformers

import tiny
from rpg.bench.synthetic import Sizes, make_model
from rpg.costs.devices import DEVICES
from rpg.costs.memory import (
    READ_TOKENS,
    SHARE,
    Layout,
    available_bytes,
    calls,
    choose,
    estimate,
    lay_out,
    read_tokens,
)
from rpg.distributed.context import RunContext
from rpg.kernels.head_with_loss import block_bytes, rows_at_once
from rpg.models.meta import shell
from rpg.models.policy import Policy
from rpg.run.config import Config, EvalConfig, OptimConfig, ReferenceConfig, RolloutConfig
from rpg.training.batch import make_batch, micro_batches
from rpg.training.oom_retry import OomRetry, make_oom_retry

GIB = 2**30


@pytest.fixture(scope="module")
def half_billion():
    """Qwen2 of 494 M parameters, without their bytes."""
    config = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


CONFIG = Config(rollout=RolloutConfig(slots=256, max_prompt_tokens=512, max_new_tokens=1024))
FULL = Layout(256)


def test_the_parts_counted_by_hand(half_billion):
    n = 494_032_768
    assert sum(p.numel() for p in half_billion.parameters()) == n
    found = estimate(half_billion, CONFIG, FULL, 8192, recompute=False, reference=True, logits=False)
    assert found.weights == found.reference == 2 * n
    assert found.masters == 4 * n
    assert found.moments == 8 * n
    assert found.gradients == 6 * n
    assert found.cache == 256 * 1536 * 24 * 2 * 2 * 64 * 2
    layer = 2 * 896 * (4 + 2 + 2) + (896 + 128 + 128 + 896) * 2 + 4 * 4864 * 2
    assert found.activations == 8192 * (26 * layer + 896 * 8)
    assert found.reading == 32768 * layer
    whole = found.weights + found.masters + found.moments + found.reference
    assert found.sampling == whole + found.cache + found.reading
    assert found.training == found.peak == whole + found.gradients + found.cache + found.activations
    with torch.device("meta"):
        full = estimate(half_billion.to(torch.float32), CONFIG, FULL, 8192, False, reference=False, logits=False)
    half_billion.to(torch.bfloat16)
    assert (full.masters, full.moments, full.gradients, full.reference) == (0, 8 * n, 4 * n, 0)


def test_recomputation_keeps_the_inputs_of_layers(half_billion):
    def activations(**how):
        how = {"micro_tokens": 8192, "recompute": False, "reference": False, "logits": False} | how
        return estimate(half_billion, CONFIG, FULL, **how).activations

    assert activations(recompute=True) < activations() / 6
    assert activations(micro_tokens=16384) == 2 * activations()
    assert activations(micro_tokens=1) == activations(micro_tokens=1536)  # a sequence is not cut
    assert activations(logits=True) - activations() == 8192 * 151936 * 14  # logits


def test_what_fused_layers_keep_counted_by_hand(half_billion):
    """On a GPU: see kernels/fused.py and merged.py."""
    n, how = 494_032_768, {"reference": False, "logits": False, "gpu": True}
    layer = (4 * 896 + 3 * 896 + 4 * 128 + 2 * 4864) * 2
    found = estimate(half_billion, CONFIG, FULL, 8192, recompute=False, **how)
    assert found.activations == 8192 * (24 * layer + layer + 896 * 8)
    assert found.gradients == 4 * n  # those in half precision are there when the activations are gone
    assert found.reading == 32768 * (2 * (896 + 896 + 128) + 3 * 4864) * 2
    assert found.cache == (256 * 1024 + 2 * 32 * 512 + 8 * 512) * 24 * 2 * 2 * 64 * 2
    again = estimate(half_billion, CONFIG, FULL, 1536, recompute=True, **how)
    kept = 1536 * (24 * 896 * 2 + 896 * 8)
    assert again.activations == kept + 1536 * 2 * layer
    assert again.gradients == 4 * n + 2 * n - kept
    assert again.training - again.cache - 14 * n == 4 * n + 2 * n + 1536 * 2 * layer + again.head


def test_what_a_call_needs_is_what_is_held(half_billion):
    """Rows, prompts and tokens to read of a step or an evaluation, whichever are more."""
    rollout = RolloutConfig(prompts=3, samples=4, max_prompt_tokens=100, max_new_tokens=130, dynamic=False)
    config = Config(rollout=rollout, eval=EvalConfig(problems=5, k=1))
    assert Layout(1024).held(config, True) == 64 * 192 + 5 * 128  # in pages of 64 tokens
    assert Layout(4).held(config, True) == 4 * 192 + 4 * 128
    assert Layout(4, 1000).held(config, True) == 1000
    assert Layout(4).held(config, False) == 4 * 230
    assert read_tokens(config) == 500
    more = replace(config, rollout=replace(rollout, dynamic=True))  # others are sampled for groups without signal
    assert read_tokens(more) == 1200
    assert Layout(1024).held(more, True) == 64 * 192 + 12 * 128
    ahead = replace(config, rollout=replace(rollout, ahead=1.0))
    assert Layout(16).held(ahead, True) == 16 * (192 + 128)
    assert read_tokens(ahead) == READ_TOKENS
    for name in ("gpg", "grpo"):
        assert calls(replace(more, algorithm=name, rollout=replace(rollout, dynamic=None)))[0] == (
            (12, 4) if name == "gpg" else (3, 4)
        )


def test_a_block_of_the_head_counts_where_it_is_more_than_a_layers_backward_pass(half_billion):
    """Which comes after it."""
    how = {"recompute": False, "reference": False, "logits": False, "gpu": True}
    layer = (4 * 896 + 3 * 896 + 4 * 128 + 2 * 4864) * 2
    found = estimate(half_billion, CONFIG, FULL, 8192, **how)
    assert found.head == block_bytes(rows_at_once(151936, 2), 151936, 2) - 8192 * layer > 0
    assert found.training == found.weights + found.masters + found.moments + found.gradients + found.cache + (
        found.activations + found.head
    )
    assert "head" not in found.during("sampling")
    assert estimate(half_billion, CONFIG, FULL, 32768, **how).head == 0
    assert estimate(half_billion, CONFIG, FULL, 8192, **{**how, "gpu": False}).head == 0
    assert estimate(half_billion, CONFIG, FULL, 8192, **{**how, "logits": True}).head == 0


# ---- against an H200 -------------------------------------------------------------------------------------------------


def near(planned, measured):
    assert [planned.sampling / 1e9, planned.training / 1e9] == pytest.approx(measured, rel=0.1)


def test_both_phases_of_4_billion_weights_as_measured():
    """python benchmarks/long_responses.py --parts d"""
    config = Config(
        rollout=RolloutConfig(prompts=16, samples=16, max_prompt_tokens=256, max_new_tokens=512, dynamic=False),
        optim=OptimConfig(offload=True, minibatches=2),
        eval=EvalConfig(problems=1),
    )
    model, available = make_model("4b", Sizes(device="meta")), int(SHARE * DEVICES["h200"].memory)
    layout = lay_out(model, config, available, False)
    assert choose(model, config, layout, available, False, False) == (8192, False)
    near(estimate(model, config, layout, 8192, False, False, False, gpu=True), [27.85, 99.48])


def test_both_phases_of_7_billion_weights_in_4_bits_as_measured():
    """python benchmarks/four_bits.py --parts a, with the rows and the cache that an earlier version chose."""
    config = Config(
        algorithm="grpo",
        rollout=RolloutConfig(prompts=144, samples=4, max_prompt_tokens=512, max_new_tokens=128),
        eval=EvalConfig(problems=1, k=1),
    )
    model = shell("Qwen/Qwen2.5-7B-Instruct", torch.bfloat16, {}, "lora", "{}", 4).model
    near(estimate(model, config, Layout(576, 117_186), 8192, True, False, False, gpu=True), [18.68, 16.55])


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_moving_average_of_half_precision_is_held_in_float32_too(half_billion):
    config = replace(CONFIG, reference=ReferenceConfig(update="ema"))
    assert estimate(half_billion, config, FULL, 8192, False, True, False).reference == 6 * 494_032_768
    assert estimate(half_billion, config, FULL, 8192, False, False, False).reference == 0


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_every_architecture_has_an_estimate(name):
    found = estimate(tiny.make(name), CONFIG, FULL, 1024, recompute=False, reference=False, logits=False)
    assert all(value > 0 for value in (found.weights, found.moments, found.gradients, found.cache, found.activations))


def test_experts_count_as_often_as_they_are_used():
    config = transformers.Qwen3MoeConfig(
        **{**tiny.COMMON, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    dense = tiny.make("qwen3")  # of 48 = 2 × 24
    one, other = (estimate(m, CONFIG, FULL, 1024, False, False, False).activations for m in (model, dense))
    assert one == other


def test_an_adapter_is_all_that_is_trained_and_copied():
    from rpg.models.adapters import attach

    model = attach(tiny.make("qwen2-grouped", dtype=torch.bfloat16), "lora", {"r": 4}, "tiny")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    assert 0 < trained < frozen
    found = estimate(model, CONFIG, FULL, 1024, False, True, False)
    assert found.weights == 2 * (frozen + trained)
    assert (found.masters, found.moments, found.gradients) == (4 * trained, 8 * trained, 6 * trained)
    for update, held in {"auto": 0, "frozen": 0, "every": 2 * trained, "kl": 2 * trained, "ema": 6 * trained}.items():
        config = replace(CONFIG, reference=ReferenceConfig(update=update))
        assert estimate(model, config, FULL, 1024, False, True, False).reference == held
        assert estimate(model, config, FULL, 1024, False, False, False).reference == 0
    whole = estimate(tiny.make("qwen2-grouped", dtype=torch.bfloat16), CONFIG, FULL, 1024, False, True, False)
    assert whole.reference == whole.weights == 2 * frozen
    assert (whole.cache, whole.activations) == (found.cache, found.activations)


def test_what_a_copy_holds_is_what_was_estimated():
    """Of an adapter, and of a whole model: the tensors that Reference keeps."""
    from rpg.models.adapters import attach
    from rpg.training.reference import Reference

    for adapter in (True, False):
        for update in ("frozen", "every", "ema"):
            policy = Policy(tiny.make("qwen2-grouped", dtype=torch.bfloat16), tiny.tokenizer())
            if adapter:
                policy = Policy(attach(policy.model, "lora", {"r": 4}, "tiny"), tiny.tokenizer())
                policy.fresh = True
            how = ReferenceConfig(update=update)
            kept = Reference(policy, update, how)
            own = kept.adapter or {} if adapter else dict(kept.policy.model.named_parameters())
            held = sum(x.nbytes for x in own.values()) + sum(x.nbytes for x in kept.averages.values())
            found = estimate(policy.model, replace(CONFIG, reference=how), FULL, 1024, False, True, False)
            assert found.reference == pytest.approx(held, rel=2e-3)  # buffers aside


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (140, (32768, False)),
        (40, (32768, False)),
        (28, (16384, False)),
        (20, (8192, False)),
        (15, (16384, True)),
        (1, (1024, True)),
    ],
)
def test_the_largest_that_fits(half_billion, gib, expected):
    tokens, recompute = choose(half_billion, CONFIG, FULL, gib * GIB, reference=False, logits=False)
    assert (tokens, recompute) == expected
    if gib > 1:
        sizes = tokens, 2 * tokens
        used = [estimate(half_billion, CONFIG, FULL, n, recompute, False, False, gpu=True).training for n in sizes]
        assert used[0] <= gib * GIB
        assert tokens == 32768 or used[1] > gib * GIB


def test_what_is_set_is_kept(half_billion):
    def chosen(gib, **optim):
        return choose(half_billion, replace(CONFIG, optim=OptimConfig(**optim)), FULL, gib * GIB, False, False)

    assert chosen(140, micro_tokens=3000) == (3000, False)
    assert chosen(15, micro_tokens=7000) == (7000, True)
    assert chosen(15, micro_tokens=7000, recompute=False) == (7000, False)
    assert chosen(140, recompute=True) == (32768, True)
    assert chosen(15, recompute=False)[0] < 8192


def test_on_a_cpu():
    policy = Policy(tiny.make(), tiny.tokenizer())
    assert make_oom_retry(policy, Config()).state() == {"tokens": 1024, "recompute": False, "released": True}
    room = make_oom_retry(policy, Config(optim=OptimConfig(micro_tokens=7, recompute=True)), release=lambda: None)
    assert room.state() == {"tokens": 7, "recompute": True, "released": False}


# ---- out of memory ---------------------------------------------------------------------------------------------------


def needs(most, seen):
    def work(tokens):
        seen.append(tokens)
        if tokens > most:
            raise torch.OutOfMemoryError("no room")
        return tokens

    return work


@pytest.fixture(scope="module")
def batch():
    policy = Policy(tiny.make(), tiny.tokenizer())
    return make_batch(tiny.groups(policy), 0, policy.device)


def test_first_the_engine_gives_then_the_size(batch):
    said, seen, order = [], [], []
    room = OomRetry(64, release=lambda: order.append("release"), context=RunContext(warn=said.append))
    assert room.run(batch, needs(64, seen)) == 64
    assert not order
    assert not room.released
    assert room.run(batch, needs(16, seen), undo=lambda: order.append("undo")) == 16
    assert seen == [64, 64, 64, 32, 16]
    assert order == ["undo", "release"] * 3
    assert said == [f"out of memory: micro-batches of {n} tokens from here on" for n in (32, 16)]
    again = OomRetry(64)
    again.load(room.state())
    assert again.state() == room.state() == {"tokens": 16, "recompute": False, "released": True}


def test_a_size_that_no_batch_reaches_is_not_halved_in_vain(batch):
    seen = []
    OomRetry(2**20).run(batch, needs(128, seen))
    assert len(seen) == 2
    assert [len(micro_batches(batch, n)) for n in (seen[0], 2 * seen[1], seen[1])] == [1, 1, 2]


def test_sizes_that_are_padded_are_halved_as_such(batch):
    """Three groups of 12 rows are more, and cut earlier, where every row has its prompt and its padding."""
    packed, padded = [], []
    OomRetry(2**20).run(batch, needs(128, packed))
    room = OomRetry(2**20, packs=False)
    room.run(batch, needs(128, padded))
    assert padded[1] > packed[1] or len(micro_batches(batch, packed[1], packs=False)) > 2
    assert [len(micro_batches(batch, n, packs=False)) for n in (padded[0], 2 * padded[1], padded[1])] == [1, 1, 2]


def test_the_error_holds_no_tensor(batch):
    """What the failed attempt had is gone before the next one begins."""
    import weakref

    held = []

    def work(tokens):
        if held:
            assert held[0]() is None
            return tokens
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no room")

    OomRetry(64).run(batch, work)


def test_a_process_that_was_given_a_share_of_a_gpu_plans_with_that(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 140))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    for fraction, expected in ((1.0, 108), (0.5, 63)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, x=fraction: x)
        assert available_bytes(torch.device("cuda", 0)) == expected
    assert available_bytes(torch.device("cpu")) is None
