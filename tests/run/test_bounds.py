"""Values that no run can mean are one line, whatever the setting; files are refused before they unfold."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpg.run import checkpoint, settings
from rpg.run.config import Config
from rpg.tasks import Problem
from rpg.training.setup import pick_device
from rpg.training.update import forget_the_middle
from running import Job, assert_one_line

NUMBERS = ["-1", "0", "1e300", "-1e300", "1e-320", "inf", "-inf", "nan", "9" * 400, "-" + "9" * 400, "1_0", "0x1"]
OTHERS = [
    "",
    " ",
    "true",
    "None",
    "null",
    "[",
    "{",
    "&a [*a]",
    "*a",
    "!!python/name:os.system",
    "\x00",
    "\ud800",
    "\udcff",
]
VALUES: list[Any] = [None, True, False, -1, 0, 10**400, -(10**400), 1e300, 1e-320, math.inf, -math.inf, math.nan]
VALUES += ["", "x", "\udcff", [], [1], [[]], {}, {"a": 1}, {1: 2}, (), (1, 2, 3), b"x", object()]
ENDS = ("safetensors", "json")
PATHS = list(settings.leaves(Config))


def outcome(make: Callable[[], Config]) -> Config | str:
    """What is made, or the one line that says why not."""
    try:
        return make()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("path", PATHS)
def test_any_value_is_taken_or_refused_in_one_line(path: str) -> None:
    """Of flags and from Python; and what is taken can be written down."""
    is_dict = settings.leaves(Config)[path].open
    key = f"{path}.key" if is_dict else path
    made = [outcome(lambda: settings.build(Config, flags={key: text})) for text in (*NUMBERS, *OTHERS)]
    made += [outcome(lambda: settings.change(Config(), {key: value})) for value in VALUES]
    for found in made:
        if isinstance(found, str):
            assert "\n" not in found
            assert len(found) < 300
            assert path in found
        elif not is_dict:
            value = settings.flat(found)[path]
            assert isinstance(value, float) or not isinstance(value, int) or abs(value) <= settings.LARGEST
            settings.to_yaml(found).encode()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"steps": "9" * 400}, "steps must be a whole number; got '999"),
        ({"steps": "2000000000"}, "steps must be at most 1,000,000,000; got 2000000000"),
        ({"task.timeout": "1e300"}, "task.timeout must be at most 1,000,000; got 1e+300"),
        ({"task.memory_gb": "inf"}, "task.memory_gb must be at most 1,000,000; got inf"),
        ({"output": "runs/\udcff"}, r"output must be UTF-8 text; got 'runs/\udcff'"),
        ({"task.name": "\udcff.jsonl"}, r"task.name must be UTF-8 text; got '\udcff.jsonl'"),
    ],
)
def test_values_that_had_a_traceback(flags: dict[str, str], message: str) -> None:
    text = outcome(lambda: settings.build(Config, flags=flags))
    assert isinstance(text, str)
    assert message in text
    assert len(text) < 120


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10))


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "loss: &a {b: *a}", "loss: {b: &a [*a]}"])
def test_aliases_that_unfold_without_end_are_refused_before_they_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"run.yaml: line \d+: more than 20,000 values"):
        settings.build(Config, file=tmp_path / "run.yaml")
    assert time.monotonic() - begin < 2


def test_aliases_in_moderation_are_yaml(tmp_path: Path) -> None:
    text = "rollout: &sizes {prompts: 4, samples: 2}\nloss: {names: [&x 1, *x], more: {<<: *sizes, prompts: 5}}\n"
    (tmp_path / "run.yaml").write_text(text)
    made = settings.build(Config, file=tmp_path / "run.yaml")
    assert made.loss == {"names": [1, 1], "more": {"prompts": 5, "samples": 2}}


@pytest.mark.parametrize("name", ["meta", "meta:0", "cuda:999", "", "xla", "vulkan", "privateuseone"])
def test_devices_that_cannot_compute(name: str) -> None:
    with pytest.raises(ValueError, match=r"device .* is not to be had: [^\n]+$"):
        pick_device(name)


def test_half_a_surrogate_in_a_prompt_is_named() -> None:
    for text in ({"prompt": "a\ud800"}, {"prompt": "a", "system": "\udfff"}):
        with pytest.raises(ValueError, match="no tokenizer reads half a surrogate pair"):
            Problem(**{"answer": "", **text})
    Problem("🙂 é", "\ud800")


# ---- what a run leaves, or finds -------------------------------------------------------------------------------------


def test_the_first_batches_that_went_wrong_stay_and_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3, 999_999, 1_000_000):
        for number in range(4):
            for ending in ("safetensors", "json"):
                (tmp_path / f"step-{step:06d}-{number}.{ending}").touch()
    (tmp_path / "mine.txt").touch()
    forget_the_middle(tmp_path)
    kept = [f"step-{step}-{number}.{end}" for step in ("000001", "1000000") for number in range(4) for end in ENDS]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "mine.txt"])


def test_a_checkpoint_of_another_version_is_one_line(train: Callable[..., Job], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--steps", 1).code == 0
    newest = folder / "checkpoints" / "step-000001"
    file = newest / "trainer" / "state.json"
    state = json.loads(file.read_text())
    for name, other in {"cursor": {"place": 3}, "reference": {}, "dtype": "float8"}.items():
        file.write_text(json.dumps(state | {name: other}))
        (newest / checkpoint.MANIFEST).unlink()
        checkpoint._seal(newest, 1, (folder / "run.id").read_text().strip())
        job = train(folder, "--steps", 2, "--resume")
        assert_one_line(job, 2, "step-000001 is of another version of rpg", "resume with that version")
