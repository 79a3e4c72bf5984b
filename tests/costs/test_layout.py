"""What lies on the device in each phase, and how many rows, tokens of cache and which phases that makes."""

from dataclasses import replace

import pytest
import torch

import tiny
from rpg.bench.synthetic import Sizes, make_model
from rpg.costs.devices import DEVICES, host_memory, physical_memory
from rpg.costs.memory import PARTS, SHARE, Layout, Memory, Shape, choose, estimate, lay_out, row_tokens, smallest, used
from rpg.costs.operations import Operations
from rpg.costs.seconds import StepSizes, Work, offload_seconds, rollout_seconds
from rpg.distributed.ranks import World
from rpg.models.policy import Policy
from rpg.run.config import Config, EvalConfig, OptimConfig, RolloutConfig
from rpg.training.oom_retry import pick_layout

LONG = RolloutConfig(prompts=512, samples=16, max_prompt_tokens=2048, max_new_tokens=8192)
ROW, LONGEST = 2048 // 16 + 4096, 10240
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of a token's keys and values
FP8_TOKEN = 36 * 2 * 8 * (128 + 4)
N = 4_022_468_096
NOTHING = Layout(0)
H200 = int(SHARE * DEVICES["h200"].memory)


@pytest.fixture(scope="module")
def four_billion():
    return make_model("4b", Sizes(device="meta"))


def config(**optim):
    return Config(rollout=LONG, optim=OptimConfig(**optim))


def parts(model, layout=NOTHING, settings=None):
    return estimate(model, settings or config(), layout, 8192, True, False, False, gpu=True)


# ---- phases ----------------------------------------------------------------------------------------------------------


def test_each_part_is_there_when_it_is_needed():
    memory = Memory(*(10**i for i in range(8)))
    #                  activations, reading, cache, reference, gradients, moments, masters, weights
    assert (memory.sampling, memory.training, memory.peak) == (1110111, 10111111, 10111111)
    assert memory.moved == 0
    moved = replace(memory, offload=True)
    assert (moved.sampling, moved.training, moved.moved) == (1110001, 10011111, 110)
    assert replace(moved, cache=10**9).peak == replace(moved, cache=10**9).sampling
    assert set(memory.during("sampling")) | set(memory.during("training")) == set(PARTS)


def test_tokens_of_the_cache_are_counted_by_hand(four_billion):
    assert Shape.of(four_billion.config).cache_bytes(2) == TOKEN
    assert Shape.of(four_billion.config).cache_bytes(2, "fp8") == FP8_TOKEN
    assert parts(four_billion, Layout(3)).cache == 3 * LONGEST * TOKEN  # a prompt each
    assert parts(four_billion, Layout(128)).cache == (128 * 8192 + 40 * 2048) * TOKEN  # evaluated with 8 to a prompt
    long = estimate(four_billion, config(), Layout(128), 8192, True, False, False)  # a CPU shares no prompts
    assert long.cache == 128 * LONGEST * TOKEN
    assert parts(four_billion, Layout(3, 1000)).cache == 1000 * TOKEN
    rounded = replace(config(), rollout=replace(LONG, cache_dtype="fp8"))
    assert parts(four_billion, Layout(3, 1000), rounded).cache == 1000 * FP8_TOKEN


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_the_papers_long_recipe_on_one_gpu(four_billion):
    """Each phase has the device for itself, as the masters and moments of 4 billion weights lie idle while sampling."""
    layout = lay_out(four_billion, config(), H200, False)
    assert layout.offload
    assert layout.slots == 128
    assert layout.cache_tokens == (H200 - 2 * N - parts(four_billion).reading) // TOKEN
    tokens, recompute = choose(four_billion, config(), layout, H200, False, False)
    planned = estimate(four_billion, config(), layout, tokens, recompute, False, False, gpu=True)
    assert (tokens, recompute) == (8192, False)
    assert planned.sampling <= H200
    assert planned.training <= H200
    assert planned.moved == 12 * N
    assert planned.training == 2 * N + 16 * N + planned.activations  # when the gradients are there, those are gone
    rounded = replace(config(), rollout=replace(LONG, cache_dtype="fp8"))
    assert lay_out(four_billion, rounded, H200, False).slots == 320


def test_without_offload_the_cache_takes_what_a_micro_batch_leaves(four_billion):
    layout = lay_out(four_billion, config(offload=False), H200, False)
    assert layout == Layout(64, 64 * ROW, False)
    for available in (H200, H200 - 15 * 10**9):
        layout = lay_out(four_billion, config(offload=False), available, False)
        tokens, recompute = choose(four_billion, config(), layout, available, False, False)
        assert tokens >= 8192
        assert recompute
        assert estimate(four_billion, config(), layout, tokens, recompute, False, False, gpu=True).peak <= available
    assert layout.slots < 64


def test_half_goes_to_the_cache_where_that_is_many_rows():
    model = tiny.make("qwen2-grouped", dtype=torch.bfloat16)
    short = Config(rollout=RolloutConfig(max_prompt_tokens=512, max_new_tokens=1024), optim=OptimConfig(offload=False))
    memory = estimate(model, short, NOTHING, 8192, True, False, False, gpu=True)
    fixed = memory.training - memory.activations
    each = Shape.of(model.config).cache_bytes(2)
    row = row_tokens(short)
    assert row == 512 // 8 + 512
    gap = max(0, memory.sampling - memory.training)  # reading prompts takes more than a micro-batch
    for rows, slots in ((2000, 1024), (700, 640), (100, 64)):
        found = lay_out(model, short, fixed + 2 * rows * row * each + gap, False)
        assert found.slots == slots
        assert not found.offload
    assert lay_out(model, short, 0, False) == lay_out(model, short, -5, False) == Layout(2, 1536, False)
    assert lay_out(model, short, 10**15, False) == Layout(1024)  # enough for all at full length


def test_offload_has_to_pay(four_billion):
    """1.5 times the rows that a step would use."""

    def chosen(prompts, samples=16, **more):
        rollout = replace(LONG, prompts=prompts, samples=samples, **more)
        return lay_out(four_billion, replace(config(minibatches=1), rollout=rollout), H200, False)

    assert chosen(512).offload
    assert not chosen(4).offload  # 64 rows in all: they fit as it is
    assert chosen(6).offload  # 96
    assert not chosen(5).offload  # 80
    assert not chosen(512, max_prompt_tokens=64, max_new_tokens=128).offload  # 1024 rows either way
    assert chosen(512, slots=128).offload
    assert not chosen(512, slots=64).offload


def test_what_is_asked_is_done(four_billion):
    assert not lay_out(four_billion, config(offload=False), H200, False).offload
    short = replace(config(offload=True), rollout=replace(LONG, max_new_tokens=64))
    assert lay_out(four_billion, short, H200, False).offload
    assert lay_out(four_billion, config(offload=True), None, False) == Layout(256, None, True)  # a CPU
    assert lay_out(four_billion, config(), None, False) == Layout(256)
    assert not lay_out(four_billion, config(offload=True), H200, False, trained=False).offload


def test_the_host_has_to_have_room(four_billion):
    need = 12 * N
    assert lay_out(four_billion, config(), H200, False, host=2 * need).offload
    assert not lay_out(four_billion, config(), H200, False, host=2 * need - 2).offload
    assert lay_out(four_billion, config(offload=True), H200, False, host=need).offload
    text = r"^optim\.offload needs 48\.3 GB of host memory, and this machine has 32\.0: leave it out$"
    with pytest.raises(ValueError, match=text):
        lay_out(four_billion, config(offload=True), H200, False, host=32 * 10**9)


def test_others_are_not_offloaded_by_themselves(four_billion):
    vllm = replace(config(), rollout=replace(LONG, engine="vllm"))
    assert not lay_out(four_billion, vllm, H200, False).offload

    class Sharded(World):
        sharded, size = True, 2

    world = Sharded.__new__(Sharded)
    assert not lay_out(four_billion, config(), H200, False, world=world).offload
    assert lay_out(four_billion, config(offload=True), H200, False, world=world).offload


def test_what_cannot_be_trained_anyway_is_not_moved(four_billion):
    assert not lay_out(four_billion, config(), 70 * 10**9, False).offload


def test_an_evaluation_has_the_device_for_itself(four_billion):
    """Else a model that can be evaluated but not trained would be decoded one response at a time."""
    settings = replace(config(), eval=EvalConfig(k=2))
    layout = lay_out(four_billion, settings, 40 * 10**9, False, trained=False)
    tokens = (40 * 10**9 - 2 * N - parts(four_billion).reading) // TOKEN
    assert layout == Layout(tokens // (1024 + 4096), tokens, False)


def test_settings_and_ranks():
    policy = Policy(tiny.make(), tiny.tokenizer())
    assert pick_layout(policy, Config(), False) == Layout(256)
    assert pick_layout(policy, Config(rollout=RolloutConfig(slots=7)), False) == Layout(7)
    assert smallest([Layout(64, None), Layout(128, 900), Layout(192, 1000)]) == Layout(64, 900)
    assert smallest([Layout(64, offload=True)] * 2).offload


def test_rows_that_a_cache_holds():
    settings = Config(rollout=LONG)
    assert used(Layout(128), settings) == 128
    assert used(Layout(512, 64 * ROW), settings) == 64
    assert used(Layout(512, 1), settings) == 1


# ---- seconds ---------------------------------------------------------------------------------------------------------


def work(model, **changes):
    how = {"slots": 128, "frozen": False, "recompute": True, "micro_tokens": 8192, "trained": N, "activation": 1}
    return Work(**how | {"operations": Operations.of(model, 2)} | changes)


def test_seconds_of_moving(four_billion):
    """There and back, and five graphs of 36 layers: of 8, 16, 32, 64 and 128 rows."""
    found = offload_seconds(work(four_billion), DEVICES["h200"], 50 * 10**9)
    assert found == pytest.approx(2 + 5 * 36 * 4e-3)
    assert offload_seconds(work(four_billion), DEVICES["rtx4090"], 50 * 10**9) > found + 1.9


def test_a_small_cache_holds_fewer_rows(four_billion):
    sizes = StepSizes(512, 16, 256, 4096, 8192)
    few, many, full = (
        rollout_seconds(work(four_billion, cache_tokens=n), DEVICES["h200"], sizes)
        for n in (64 * (16 + 2731), 128 * (16 + 2731), None)
    )
    assert few > many == pytest.approx(full, rel=0.01)
    assert few == pytest.approx(rollout_seconds(work(four_billion, slots=64), DEVICES["h200"], sizes), rel=0.01)
    halved = Operations.of(four_billion, 2)
    rounded = rollout_seconds(work(four_billion, operations=replace(halved, cache=FP8_TOKEN)), DEVICES["h200"], sizes)
    assert rounded < 0.7 * full


def test_the_memory_of_a_container(tmp_path):
    (limit := tmp_path / "memory.max").write_text("max\n")
    assert host_memory(limit) == host_memory(tmp_path / "none") == physical_memory()
    limit.write_text("1000000\n")
    assert host_memory(limit) == 10**6
