"""Estimates of time against what was measured on an H200: docs/speed-table.md, docs/long-responses.md."""

from dataclasses import replace

import pytest

from rpg.bench.synthetic import Sizes, make_model
from rpg.costs.devices import CPU_OVERHEAD, DEVICES, Device
from rpg.costs.memory import Shape
from rpg.costs.operations import Operations
from rpg.costs.seconds import StepSizes, Work, decode_seconds, rollout_seconds, train_seconds
from rpg.plan.plan import plan
from rpg.run.config import Config, RolloutConfig

H200 = DEVICES["h200"]
MADE = {}


def work(name, recompute=False, slots=512, micro_tokens=32768):
    name, _, bits = name.partition(", ")
    if name not in MADE:
        MADE[name] = make_model(name, Sizes(device="meta"))
    model = MADE[name]
    cache = Shape.of(model.config).cache_bytes(2, "fp8" if bits else "auto")
    return Work(
        operations=replace(Operations.of(model, 2), cache=cache),
        activation=Shape.of(model.config).moved_bytes(2),
        trained=sum(p.numel() for p in model.parameters()),
        frozen=False,
        recompute=recompute,
        micro_tokens=micro_tokens,
        slots=slots,
    )


@pytest.mark.parametrize(
    ("name", "rows", "length", "ms"),
    [
        ("0.5b", 64, 512, 1.26),
        ("0.5b", 256, 512, 1.88),
        ("0.5b", 512, 512, 2.64),
        ("0.5b", 64, 2048, 1.67),
        ("0.5b", 64, 8192, 2.75),
        ("17m", 64, 512, 0.39),
        ("1.5b", 64, 512, 2.36),
        ("4b", 64, 512, 5.29),
        ("4b", 128, 512, 6.06),
        ("4b", 128, 1714, 10.41),
        ("4b", 128, 3000, 16.41),
        ("4b, 8 bits", 128, 512, 5.01),
        ("4b, 8 bits", 128, 1714, 7.43),
        ("4b, 8 bits", 128, 3000, 10.40),
        ("0.5b", 256, 178, 1.46),
        ("0.5b", 256, 338, 1.60),
        ("0.5b", 256, 498, 1.72),
    ],
)
def test_a_decoding_step(name, rows, length, ms):
    """Rows of different prompts, the last tokens of a length: all of the row is a prompt to the estimate."""
    batch = StepSizes(rows, 1, length - 16, mean=32, longest=32)
    assert decode_seconds(work(name), H200, batch, rows) * 1e3 == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize(
    ("name", "responses", "recompute", "ms"),
    [
        ("0.5b", 64, False, 195.49),
        ("0.5b", 256, False, 741.32),
        ("0.5b", 512, False, 1501.41),
        ("0.5b", 512, True, 1806),
        ("17m", 64, False, 64.55),
        ("1.5b", 64, False, 491.48),
        ("4b", 64, True, 1440.38),
    ],
)
def test_training(name, responses, recompute, ms):
    batch = StepSizes(responses // 8, 8, 178, mean=320, longest=320)
    assert train_seconds(work(name, recompute), H200, batch) * 1e3 == pytest.approx(ms, rel=0.2)


def test_training_as_measured_later():
    """512 responses; and 4 billion weights, 256 responses of 512 tokens: benchmarks/long_responses.py --parts d."""
    batch = StepSizes(64, 8, 178, mean=320, longest=320)
    assert train_seconds(work("0.5b"), H200, batch) == pytest.approx(1.291, rel=0.25)
    batch = StepSizes(16, 16, 32, mean=512, longest=512)
    assert train_seconds(work("4b", micro_tokens=8192), H200, batch, 2) == pytest.approx(8.57, rel=0.25)


def test_the_rollout_and_the_whole_step():
    """256 prompts, one response each: 134,074 tokens/s; 64 × 8 responses: 0.802 s of sampling, 1.487 s of training."""
    alone = StepSizes(256, 1, 178, mean=320, longest=320)
    assert 256 * 320 / rollout_seconds(work("0.5b"), H200, alone) == pytest.approx(134_074, rel=0.2)
    batch = StepSizes(64, 8, 178, mean=320, longest=320)
    sampled, trained = rollout_seconds(work("0.5b"), H200, batch), train_seconds(work("0.5b"), H200, batch)
    assert sampled == pytest.approx(0.802, rel=0.25)
    assert 2.396 / 1.5 < sampled + trained < 2.396 * 1.5


def test_the_built_in_run_on_two_cores(monkeypatch):
    """README, `rpg bench` on a CPU: 0.298 s of sampling, 0.460 s of training, responses of 14.9 tokens on average."""
    device = Device("two cores", 2**34, 156e9, 50e9, *CPU_OVERHEAD, source="measured beside it", cpu=True)
    monkeypatch.setitem(DEVICES, "two-cores", device)
    config = Config(dtype="float32", rollout=RolloutConfig(dynamic=False))
    seconds = plan(config, "two-cores", shares=(14.9 / 80,) * 3).middle.seconds
    assert 0.767 / 1.5 < seconds.step < 0.767 * 1.5


def test_what_makes_it_longer():
    one = StepSizes(64, 8, 178, mean=160, longest=320)
    twice = StepSizes(128, 8, 178, mean=160, longest=320)
    w = work("0.5b", slots=512)
    # as many rows again wait for slots: steps with all slots in use come on top of the last ones
    assert rollout_seconds(w, H200, twice) - rollout_seconds(w, H200, one) == pytest.approx(
        160 * decode_seconds(w, H200, one, 512)
        + rollout_seconds(w, H200, one)
        - 320 * decode_seconds(w, H200, one, 256),
        rel=1e-6,
    )
    assert train_seconds(w, H200, twice) > 1.9 * train_seconds(w, H200, one)
    assert 0.3 < train_seconds(w, H200, one, forward=True) / train_seconds(w, H200, one) < 0.36
    adapted = Work(**{**vars(w), "frozen": True, "trained": 10**6})
    assert 0.6 < train_seconds(adapted, H200, one) / train_seconds(w, H200, one) < 0.7
    sixteen = train_seconds(w, H200, one, optimiser_steps=16) - train_seconds(w, H200, one, optimiser_steps=1)
    assert sixteen == pytest.approx(15 * 30 * w.trained / 4.268e12)
