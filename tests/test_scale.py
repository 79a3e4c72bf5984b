"""docs/scale: the plan's formulas against facts that do not come from it, and its page against what it prints."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from math import exp, log
from pathlib import Path

import pytest

from rpg.costs.devices import DEVICES
from rpg.costs.seconds import StepSizes, Work, decode_seconds
from rpg.models.known_shapes import KNOWN

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
sys.path.insert(0, str(PAGE.parent / "scale"))

import calculator  # noqa: E402
import pieces  # noqa: E402
from pieces import DENSE, MIXTURE, SMALL, Job, Lengths  # noqa: E402
from schedule import Layout, Plan, Rollout, Training, best, engines, fastest  # noqa: E402
from settings import overrides  # noqa: E402

H100, H200 = DEVICES["h100"], DEVICES["h200"]
JOB = Job(Lengths(8192))


def test_page_shows_what_the_calculator_prints():
    shown = PAGE.read_text(encoding="utf-8")
    assert shown == calculator.filled(shown), "run: python docs/scale/calculator.py --write"
    assert len(calculator.TABLES) == 9


def test_page_states_the_constants():
    """Its formulas are written by hand."""
    shown = PAGE.read_text(encoding="utf-8")
    assert f"samples {64 / JOB.kept:.0f}/64 of that" in shown
    assert f"token: {pieces.drift(1, 3e-6):.1e}".replace("e-0", "e-") in shown
    assert "512 × 16 responses, 16 optimiser steps" in shown
    assert (JOB.prompts, JOB.samples, JOB.optimiser_steps, JOB.steps) == (512, 16, 16, 400)


@pytest.mark.parametrize(
    ("model", "parameters", "card", "active"),
    [
        (SMALL, 4_022_468_096, "4.0", "4.0"),  # of the weights published, and of the model cards
        (DENSE, 32_762_123_264, "32.8", "32.0"),
        (MIXTURE, 235_093_634_560, "235.1", "21.6"),  # "235B, 22B activated"
    ],
)
def test_parameters_are_the_published_ones(model, parameters, card, active):
    assert model.parameters == parameters
    assert (f"{model.parameters / 1e9:.1f}", f"{(model.counts.body + model.counts.head) / 1e9:.1f}") == (card, active)


@pytest.mark.parametrize("model", [SMALL, pieces.QWEN25_7B])
def test_shapes_are_those_of_rpg(model):
    config = next(config for name, (_, config) in KNOWN.items() if name.startswith(f"Qwen/{model.name}"))
    shape = [config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")]
    shape += [config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "tie_word_embeddings")]
    assert [model.layers, model.heads, model.key_heads, model.hidden, model.ffn, model.vocab, model.tied] == shape
    assert model.width == config.get("head_dim", model.hidden // model.heads)


def test_keys_and_values_by_hand():
    assert SMALL.counts.kv_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert DENSE.counts.kv_bytes == 2 * 64 * 8 * 128 * 2 == 262_144
    assert MIXTURE.counts.kv_bytes == 2 * 94 * 4 * 128 * 2 == 192_512
    room = 0.85 * 141e9 - 2 * SMALL.parameters
    assert Rollout(SMALL, H200, 1, 1, JOB).sequences(8192) == int(room / (8192 * 147_456)) == 92


def test_operations_are_six_a_weight_and_token_and_attention():
    tokens = 8192
    attention = 12 * 36 * 32 * 128 * tokens * (tokens - 1) / 2
    rows = {row[0]: row for row in calculator.models(H200)}
    assert float(rows["Qwen3-4B"][4]) == pytest.approx(6 * SMALL.parameters / 1e9 + attention / tokens / 1e9, abs=0.5)
    chosen = 6 * 21.57 + 12 * 94 * 64 * 128 * 8192 / 2 / 1e9  # of the mixture's experts only those
    assert float(rows["Qwen3-235B-A22B"][4]) == pytest.approx(chosen, abs=0.5)


def test_experts_touched():
    assert MIXTURE.touched(1).body == MIXTURE.counts.body
    assert MIXTURE.touched(2).body < 2 * MIXTURE.counts.body
    assert MIXTURE.touched(1e6).body == pytest.approx(MIXTURE.body(128))
    assert SMALL.touched(7) == SMALL.counts


def test_one_gpu_does_not_communicate():
    alone = Training(SMALL, H200, Layout(1, 1), JOB)
    assert alone.shards() == alone.replicas() == alone.exchanges() == 0.0
    assert Plan(Rollout(SMALL, H200, 1, 1, JOB), alone, "together").sync == 0.0
    assert alone.update() == alone.compute() > 0


def test_gathers_by_hand():
    held = 8e9
    assert pieces.gather(held, 8) == pytest.approx(held * 7 / 8 / 360e9 + 7e-6)
    assert pieces.gather(held, 64) == pytest.approx(held * 56 / 64 / 320e9 + 63e-6 + 7 * 10e-6)
    sizes = [pieces.gather(held, size) for size in (1, 2, 8, 64, 1024)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0.0


def test_memory_by_hand():
    layers = 2 * 2 * SMALL.body(1) / 36
    assert Layout(8, 8).state(SMALL) == pytest.approx(16 * 4_022_468_096 / 8 + layers + 2 * 2560 * 151_936)
    experts = 94 * 128 * 3 * 4096 * 1536
    local = (experts / 8 + MIXTURE.parameters - experts) / 4
    layout = Layout(64, None, expert=8, pipeline=4)
    assert layout.state(MIXTURE) == pytest.approx(6 * local + 12 * MIXTURE.parameters / 64)
    assert not Layout(8, 8).fits(DENSE, H100, 8370)
    assert Layout(8, 8).fits(DENSE, H200, 8370)
    logits = SMALL.activation(logits=True) - SMALL.activation()
    assert logits == 14 * 151_936


def test_decoding_is_rpgs_estimate_on_one_gpu():
    even = Job(Lengths(10_000, median=500, spread=1e-4))
    work = Work(SMALL.counts, 0, 0, False, False, 1, 64)
    theirs = decode_seconds(work, H200, StepSizes(1, 1, 178, 500, 500), 64)
    assert Rollout(SMALL, H200, 1, 1, even).step(64) == pytest.approx(theirs, rel=1e-3)


def test_lengths():
    lengths = Lengths(8192)
    rng = random.Random(0)
    drawn = [min(8192.0, rng.lognormvariate(log(6500), 1.0)) for _ in range(40_000)]
    mean = sum(drawn) / len(drawn)
    assert lengths.mean == pytest.approx(mean, rel=0.01)
    assert lengths.age == pytest.approx(sum(x * x for x in drawn) / len(drawn) / 2 / mean, rel=0.01)
    assert lengths.longest(1) == pytest.approx(lengths.mean, rel=1e-3)  # of one: the mean
    fours = [max(drawn[i : i + 4]) for i in range(0, len(drawn), 4)]
    assert lengths.longest(4) == pytest.approx(sum(fours) / len(fours), rel=0.01)
    assert lengths.longest(1) < lengths.longest(2) < lengths.longest(1000) <= 8192.001
    medians = zip((4096, 8192), calculator.MEDIANS, strict=True)
    assert [round(Lengths(limit, median).mean) for limit, median in medians] == [3206, 5671]


def test_drift_by_drawing():
    kl, rng = 0.02, random.Random(0)
    weights = [exp(rng.gauss(-kl, (2 * kl) ** 0.5)) for _ in range(40_000)]
    first, second = sum(weights), sum(w * w for w in weights)
    assert first / len(weights) == pytest.approx(1, abs=0.01)  # a ratio of probabilities has mean 1
    assert pieces.ess(kl) == pytest.approx(first**2 / second / len(weights), abs=0.005)
    assert pieces.clipped(kl) == pytest.approx(sum(not 0.8 < w < 1.28 for w in weights) / len(weights), abs=0.007)
    assert pieces.ess(kl, 50) == pytest.approx(pieces.ess(kl) ** 50)  # of independent tokens
    assert pieces.ess(kl, pieces.reach(kl)) == pytest.approx(0.5)
    assert pieces.drift(4) < pieces.drift(4, straight=True) == pytest.approx(16 * pieces.drift(1))


def test_more_gpus_and_shorter_responses_are_faster():
    steps = [fastest(SMALL, H200, gpus, JOB, "together").seconds for gpus in (64, 128, 256, 512, 1024)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] / steps[-1] < 16  # and never better than in proportion
    limits = [fastest(DENSE, H200, 256, Job(Lengths(n)), "together").seconds for n in (8192, 16384, 32768)]
    assert limits == sorted(limits)
    assert fastest(SMALL, H100, 64, JOB, "together").seconds > steps[0]
    assert best(MIXTURE, H100, 64, JOB) is None


def test_parts_of_a_step():
    whole = fastest(SMALL, H200, 64, JOB, "together")
    assert whole.seconds == pytest.approx(whole.rollout.seconds() + whole.training.seconds() + whole.sync)
    assert 0 < whole.idle < 1
    apart = fastest(SMALL, H200, 1024, JOB, "streaming")
    assert apart.rollout.gpus + apart.training.layout.gpus == 1024
    assert apart.seconds < fastest(SMALL, H200, 1024, JOB, "one-off").seconds  # the tail is what streaming saves
    assert 0.5 < apart.lag(JOB.lengths.mean, 0.5) < apart.lag(apart.rollout.longest, 1)


def test_slots_without_a_row():
    """Four rows, a slot each: every slot is there until the longest ends, and in use for the mean."""
    alone = Rollout(SMALL, H200, 1, 1, Job(JOB.lengths, prompts=1, samples=4, kept=1.0))
    longest = JOB.lengths.longest(4)
    assert alone.idle() == pytest.approx(1 - JOB.lengths.mean / longest)
    decoding = longest * alone.step(4 * JOB.lengths.mean / longest)
    assert alone.seconds() == pytest.approx(alone.prefill() + decoding)


def test_more_ranks_than_sequences_wait_for_the_longest():
    """512 sequences a minibatch: at 1,024 ranks a rank has half of one, and waits for a whole one."""
    wide = Training(SMALL, H200, Layout(1024, 64), JOB)
    assert wide.rows == pytest.approx((178 + JOB.lengths.longest(512)) / (178 + JOB.lengths.mean), rel=1e-6)
    assert Training(SMALL, H200, Layout(64, 64), JOB).rows == 512 / 64


def test_plan_beside_published_numbers():
    """The factors that the page states: never slower than what was measured, and not more than 2.7 times too fast."""
    factors = [published / plan for _, published, plan in calculator.comparisons()]
    assert len(factors) == 6
    assert all(0.95 < factor < 2.7 for factor in factors), factors


def test_settings_say_what_was_planned():
    plan = fastest(DENSE, H100, 128, Job(Lengths(32768)), "together")
    lines = dict(line.lstrip("+").split("=", 1) for line in overrides(plan, "m"))
    layout, actor = plan.training.layout, "actor_rollout_ref.actor"
    assert int(lines["trainer.nnodes"]) * int(lines["trainer.n_gpus_per_node"]) == 128
    sharing = int(lines[f"{actor}.fsdp_config.ulysses_sequence_parallel_size"])
    assert sharing == layout.sequence
    assert int(lines[f"{actor}.ppo_max_token_len_per_gpu"]) * sharing >= 32768 + 178
    assert layout.gpus % int(lines[f"{actor}.fsdp_config.fsdp_size"]) == 0
    apart = fastest(MIXTURE, H200, 1024, JOB, "one-off")
    lines = dict(line.lstrip("+").split("=", 1) for line in overrides(apart, "m"))
    rollout = "actor_rollout_ref.rollout"
    assert 8 * (int(lines["trainer.nnodes"]) + int(lines[f"{rollout}.nnodes"])) == 1024
    pair = int(lines[f"{rollout}.tensor_model_parallel_size"]), int(lines[f"{rollout}.data_parallel_size"])
    assert pair[0] * pair[1] == int(lines[f"{rollout}.expert_parallel_size"])  # verl wants it so
    sync = int(lines["trainer.v1.separate_async.parameter_sync_step"]) * int(lines[f"{actor}.ppo_mini_batch_size"])
    assert sync == int(lines["data.train_batch_size"])  # likewise
    assert (94 + 2) % int(lines[f"{actor}.megatron.pipeline_model_parallel_size"]) == 0
    assert engines(MIXTURE, H200, 64, JOB).split <= 4  # key heads


def test_verl_can_fill_what_was_planned():
    """verl hands out a batch of prompts a step on top of those it begins with; vLLM counts rows for each DP rank."""
    rollout, asynchronous = "actor_rollout_ref.rollout", "trainer.v1.separate_async"
    for model in (SMALL, MIXTURE):
        plan = fastest(model, H200, 1024, Job(Lengths(32768)), "streaming")
        engine, lines = plan.rollout, dict(line.lstrip("+").split("=", 1) for line in overrides(plan, "m"))
        ranks = int(lines.get(f"{rollout}.data_parallel_size", 1))
        rows = int(lines[f"{rollout}.max_num_seqs"]) * ranks
        assert engine.slots - ranks < rows <= engine.slots
        replicas = 8 * int(lines[f"{rollout}.nnodes"]) // (ranks * int(lines[f"{rollout}.tensor_model_parallel_size"]))
        begun = int(lines[f"{asynchronous}.num_warmup_batches"]) * int(lines["data.train_batch_size"])
        assert 0 <= begun * int(lines[f"{rollout}.n"]) - replicas * rows < 8192 + replicas * ranks  # a batch at most
        assert int(lines["actor_rollout_ref.actor.optim.lr_warmup_steps"]) == 160  # apart, the rate's steps: updates
        assert int(lines["trainer.v1.sampler.max_off_policy_threshold"]) >= plan.lag(engine.longest, 1) + 1
    off = dict(x.lstrip("+").split("=", 1) for x in overrides(fastest(SMALL, H200, 1024, JOB, "one-off"), "m"))
    assert off[f"{asynchronous}.num_warmup_batches"] == "1"
    together = fastest(DENSE, H200, 256, Job(Lengths(16384)), "together")  # 776 prompts have a slot, 1,040 are sampled
    lines = dict(line.lstrip("+").split("=", 1) for line in overrides(together, "m"))
    assert lines["algorithm.filter_groups.max_inflight_gen_batches"] == "2"
    assert lines["actor_rollout_ref.actor.optim.lr_warmup_steps"] == "10"


def test_copies_are_summed_for_each_micro_batch():
    eight = Training(SMALL, H200, Layout(64, 8), JOB)  # 8 sequences a GPU: more than one micro-batch
    assert eight.micro_batches > 1.2
    once = 8 * SMALL.parameters / 8 * 7 / 8 / 40e9
    assert eight.replicas() == pytest.approx(eight.micro_batches * once)
    assert Training(SMALL, H200, Layout(64, 64), JOB).replicas() == 0.0


COMPOSE = """
import importlib.util, json, os, sys
from hydra import compose, initialize_config_dir
folder = os.path.join(importlib.util.find_spec("verl").submodule_search_locations[0], "trainer", "config")
with initialize_config_dir(folder, version_base=None):
    made = [compose("ppo_trainer", lines) for lines in json.load(sys.stdin)]
actors = [config.actor_rollout_ref.actor for config in made]
assert all(config.algorithm.filter_groups.metric for config in made)  # verl stops without it
print(json.dumps([[a.strategy, a.policy_loss.loss_mode, a.policy_loss.rpg.beta, a.optim.lr] for a in actors]))
"""


def test_verl_has_these_settings():
    """hydra refuses a key that verl's config does not have."""
    python = os.environ.get("RPG_VERL_PYTHON", str(PAGE.parents[1] / ".venv-verl" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip("no interpreter with verl: set RPG_VERL_PYTHON")
    lines = [overrides(plan, "m") for _, plan in calculator.plans()][1:]  # the first has the keys of the second
    run = subprocess.run([python, "-c", COMPOSE], input=json.dumps(lines), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    beta, rate = 1e-4, 1e-6
    assert json.loads(run.stdout.splitlines()[-1]) == [
        ["fsdp2", "rpg-reinforce-urkl", beta, rate],
        ["megatron", "rpg-reinforce-urkl", beta, rate],
    ]
