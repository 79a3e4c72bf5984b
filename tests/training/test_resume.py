"""What a run that goes on is told, and what its config.yaml says of the steps that are done."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rpg.run.config import Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig
from rpg.run.view import View
from rpg.training.loop import train


class Notes(View):
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str, style: Any = "info") -> None:
        self.said.append(text)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    notes, threads = Notes(), torch.get_num_threads()
    monkeypatch.setattr("rpg.training.loop.opening", lambda *args, **named: contextlib.nullcontext(notes))
    torch.set_num_threads(1)
    yield notes.said
    torch.set_num_threads(threads)


def tiny(folder: Path, **changes: Any) -> Config:
    config = Config(
        output=str(folder),
        steps=1,
        rollout=RolloutConfig(prompts=2, samples=2, max_new_tokens=24),
        eval=EvalConfig(every=0, problems=2, k=1),
        optim=OptimConfig(lr=1e-4, warmup=0),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )
    return replace(config, **changes)


def test_settings_stay_where_nothing_is_left_to_train(tmp_path: Path, said: list[str]) -> None:
    assert train(tiny(tmp_path))["eval"]["arithmetic"]["last_step"] == 1
    before = (tmp_path / "config.yaml").read_bytes()
    faster = OptimConfig(lr=1e-3, warmup=0)
    train(tiny(tmp_path, optim=faster), resume=True)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert "nothing to do: 1 of 1 steps are done (--steps N trains on)" in said
    train(tiny(tmp_path, steps=9, minutes=1e-9), resume=True)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert "nothing to do: its 1e-09 minutes are over (--minutes N trains on)" in said
    said.clear()
    train(tiny(tmp_path, steps=2, optim=faster), resume=True)
    assert "optim.lr: 0.0001 → 0.001 from step 2" in said
    assert not [text for text in said if "nothing to do" in text or text.startswith(("steps:", "output:"))]
    assert "\n  lr: 0.001\n" in (tmp_path / "config.yaml").read_text()
    said.clear()
    train(tiny(tmp_path, steps=3, optim=faster), resume=True)
    assert not [text for text in said if "→" in text]
