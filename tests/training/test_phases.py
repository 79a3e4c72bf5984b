"""What lies on the host while responses are sampled: the run is the same, and each phase is told its own memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rpg.run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, PeftConfig, RolloutConfig
from rpg.run.folder import RunFolder
from rpg.run.logs import NoLogs
from rpg.run.view import View
from rpg.training import phases
from rpg.training.loop import Trainer, train
from rpg.training.phases import Phases, pinned
from running import assert_same, bits


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(folder: Path, offload: bool | None, name: Any = "adamw", **changes: Any) -> Config:
    config = Config(
        output=str(folder),
        steps=4,
        rollout=RolloutConfig(prompts=4, samples=4, max_new_tokens=24),
        eval=EvalConfig(every=2, problems=4, k=2),  # a checkpoint is written from either phase
        checkpoint=CheckpointConfig(every=1, keep=9),
        optim=OptimConfig(name=name, lr=1e-3, warmup=0, schedule="constant", minibatches=2, offload=offload),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )
    return replace(config, **changes)


# ---- the run is the same ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "adapter"),
    [
        ("adamw", "float32", None),
        ("adamw", "bfloat16", None),
        ("schedule-free", "float32", None),
        ("schedule-free", "bfloat16", None),
        ("schedule-free", "bfloat16", "lora"),
    ],
)
def test_what_was_moved_comes_back_bit_for_bit(tmp_path: Path, name: Any, dtype: Any, adapter: str | None) -> None:
    """With evaluations between the phases, and resumed from a checkpoint that was written while sampling."""
    how: dict[str, Any] = {"dtype": dtype, "peft": PeftConfig(adapter)}
    train(tiny(tmp_path / "stays", None, name, **how))
    train(tiny(tmp_path / "moves", True, name, **how))
    train(tiny(tmp_path / "cut", True, name, **how, steps=2))
    train(tiny(tmp_path / "cut", True, name, **how), resume=True)
    stays, moves, cut = (bits(tmp_path / folder, card=False) for folder in ("stays", "moves", "cut"))
    assert_same(stays, moves)
    assert_same(moves, cut)


def test_a_run_goes_on_with_offload_or_without(tmp_path: Path) -> None:
    train(tiny(tmp_path / "moves", True, dtype="bfloat16"))
    train(tiny(tmp_path / "cut", None, dtype="bfloat16", steps=2))
    train(tiny(tmp_path / "cut", True, dtype="bfloat16"), resume=True)
    assert_same(bits(tmp_path / "moves"), bits(tmp_path / "cut"))


def test_they_lie_where_their_phase_wants_them(tmp_path: Path) -> None:
    config = tiny(tmp_path, True, dtype="bfloat16")
    with Trainer(config, RunFolder(tmp_path), View()) as trainer:
        masters = list(trainer.optimizer.masters.values())
        places = []
        for phase in ("sampling", "training", "sampling"):
            before = [master.clone() for master in masters]
            getattr(trainer.phases, phase)()
            getattr(trainer.phases, phase)()  # a phase begins once
            assert all(torch.equal(x, was) for x, was in zip(masters, before, strict=True))
            places.append([master.data_ptr() for master in masters])
        assert places[0] == places[2]  # host memory is taken once
        assert not set(places[0]) & set(places[1])
        assert trainer.phases.spent()["offload"] > 0
        assert trainer.phases.spent() == {"offload": 0.0}


def test_what_is_sharded_is_gathered_on_the_device(tmp_path: Path) -> None:
    """For a checkpoint after an evaluation: by then the engine has given its cache back."""
    with Trainer(tiny(tmp_path, True), RunFolder(tmp_path), View()) as trainer:
        trainer.phases.sampling()
        seen: list[str | None] = []
        trainer.state = SimpleNamespace(tensors=lambda: seen.append(trainer.phases.now))  # type: ignore[assignment]
        trainer.world = SimpleNamespace(sharded=True, on_rank0=lambda work: None)  # type: ignore[assignment]
        trainer.save(NoLogs())
        assert seen == ["training"]


def test_places_in_host_memory_do_not_overlap() -> None:
    cpu = torch.device("cpu")
    sizes = [(3,), (phases.SLAB // 8 + 1, 2), (5, 7), (1,)]  # the second is larger than a slab
    tensors = {(Parameter(torch.zeros(1)), str(i)): torch.zeros(size) for i, size in enumerate(sizes)}
    found = pinned(tensors, cpu)
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in found.values())
    assert [tuple(x.shape) for x in found.values()] == sizes
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(x.data_ptr() % phases.ALIGNED == 0 for x in found.values())


# ---- memory ----------------------------------------------------------------------------------------------------------


class Gpu:
    """What torch would count on a device on which things come and go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(phases, "_highest", {})
        for name, fake in {
            "max_memory_allocated": lambda *_: self.peak,
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak", self.now),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def hold(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)


def test_each_phase_is_told_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gone before a phase begins is none of its memory: masters of sampling, the cache of training."""
    gpu, moves = Gpu(monkeypatch), itertools.cycle([-48, 48])  # to the host and back
    monkeypatch.setattr(Phases, "_move", lambda *_: gpu.hold(next(moves) * 2**30))
    engine = SimpleNamespace(release=lambda: gpu.hold(-100 * 2**30))
    optimizer = SimpleNamespace(idle_in_sampling=dict)
    run = Phases(optimizer, engine, torch.device("cuda"), offload=True)  # type: ignore[arg-type]
    gpu.hold(56 * 2**30)  # weights, masters and moments
    for _ in range(2):
        run.sampling()
        gpu.hold(100 * 2**30)  # the cache
        run.training()
        gpu.hold(24 * 2**30)  # gradients
        gpu.hold(-24 * 2**30)
    assert run.metrics()["memory/gpu_sampling_gb"] == 108
    assert run.metrics()["memory/gpu_training_gb"] == 80
    assert run.metrics()["memory/gpu_peak_gb"] == 108
