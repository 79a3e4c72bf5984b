"""A run's folder: which one is taken, that it is the run's own, and what happens when somebody moves or deletes it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rpg
from rpg import api, cli
from rpg.console import own_command
from rpg.report import find_runs
from rpg.run import checkpoint
from rpg.run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig, TaskConfig
from rpg.run.folder import (
    FOLDERS,
    LATEST,
    RunFolder,
    folder_to_resume,
    is_run,
    link_latest,
    next_folder,
    settings_of,
)
from rpg.training import loop, setup
from rpg.training.loop import Failed, Trainer, train
from rpg.trust import of_a_run
from running import assert_same, bits, checkpoints, metrics, summary


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def tiny(output: str = "auto", **changes: Any) -> Config:
    config = Config(
        output=output,
        steps=2,
        rollout=RolloutConfig(prompts=4, samples=4, max_new_tokens=24),
        eval=EvalConfig(every=0, problems=4, k=2),
        optim=OptimConfig(lr=1e-4, warmup=0),
        checkpoint=CheckpointConfig(every=1),
        log=LogConfig(tensorboard=False, report=False, view="plain"),
    )
    return replace(config, **changes)


def opened(path: str, run: str | None = None) -> RunFolder:
    folder = RunFolder(Path(path))
    folder.begin()
    if run is not None:
        folder.mark(run)
    return folder


# ---- what is a run's folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["run.id", "metrics.jsonl", "summary.json", "checkpoints/step-000004/model/x", ""])
def test_what_a_run_has_written_makes_a_folder_a_runs(left: str) -> None:
    """To every command; settings alone are a recipe, and what others have written is not ours."""
    for name in ("config.yaml", "checkpoints/epoch-4/x", "tensorboard/x", "report.html", left):
        Path("run", name or "x").parent.mkdir(parents=True, exist_ok=True)
        Path("run", name or "x").write_text("")
    assert is_run(Path("run")) == of_a_run(Path("run/config.yaml")) == bool(left)
    assert settings_of(Path("run")) == (Path("run/config.yaml") if left else None)
    if left:
        assert find_runs(".") == [Path("run")]
    assert not of_a_run(Path("run/recipe.yaml"))
    Path("run/config.yaml").unlink()
    assert settings_of(Path("run")) is None


def test_there_is_one_list_of_what_makes_a_folder_a_runs() -> None:
    """Other modules ask folder.py."""
    source = Path(rpg.__file__).parent
    asking = [path for path in source.rglob("*.py") if re.search(r'"config\.yaml"', path.read_text(encoding="utf-8"))]
    assert asking == [source / "run" / "folder.py"]


# ---- which folder ----------------------------------------------------------------------------------------------------


def test_a_run_takes_the_next_free_folder() -> None:
    assert next_folder("grpo") == Path("runs/grpo-1")
    for name in ("grpo-1", "grpo-9", "grpo-old", "grpo-10-saved", "gr[p]o-50", "dapo-80"):
        Path("runs", name).mkdir(parents=True)
    assert next_folder("grpo") == Path("runs/grpo-10")  # not grpo-2: a later run has a higher number
    assert next_folder("gr[p]o") == Path("runs/gr[p]o-51")


def test_two_that_begin_at_once_take_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = iter([Path("runs/a-1"), Path("runs/a-1"), Path("runs/a-2")])
    monkeypatch.setattr("rpg.run.folder.next_folder", lambda name: next(wanted))
    one, two = RunFolder(Path()), RunFolder(Path())
    one.begin("a")
    two.begin("a")
    assert (one.path, two.path) == (Path("runs/a-1"), Path("runs/a-2"))
    assert one.run != two.run


def test_latest_is_a_link_and_replaces_nothing_else(home: Path) -> None:
    for name in ("one", "deep/two"):
        Path("runs", name).mkdir(parents=True)
        link_latest(Path("runs", name))
        assert os.readlink(LATEST) == name  # relative: the runs can be moved together
    assert folder_to_resume("auto") == Path("runs/deep/two")
    Path("elsewhere").mkdir()
    for other in (Path("elsewhere"), Path("runs")):
        link_latest(other)
        assert os.readlink(LATEST) == "deep/two"
    assert sorted(os.listdir("runs")) == ["deep", "latest", "one"]
    LATEST.unlink()
    LATEST.mkdir()  # of a version whose runs had this name
    link_latest(Path("runs/one"))
    assert not LATEST.is_symlink()
    for run in (LATEST, Path("runs/one")):
        (run / "config.yaml").touch()
        (run / "run.id").touch()
    os.utime(LATEST / "config.yaml", (1, 1))
    assert folder_to_resume("auto") == Path("runs/one")  # without a link, the newest
    (Path("runs/one") / "summary.json").write_text('{"status": "failed"}')
    assert folder_to_resume("auto") == LATEST  # the newest that has not failed at once
    Path("runs/one/checkpoints/step-000002").mkdir(parents=True)
    assert folder_to_resume("auto") == Path("runs/one")


def test_where_links_are_impossible_runs_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    Path("runs/one").mkdir(parents=True)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_latest(Path("runs/one"))
    assert os.listdir("runs") == ["one"]
    with pytest.raises(ValueError, match=r"nothing to resume: there is no run in runs/; name its folder with --output"):
        folder_to_resume("auto")


def test_train_again_and_resume_the_latest(home: Path) -> None:
    first = train(tiny())
    second = train(tiny(seed=1))
    name = tiny().algorithm
    assert (first["folder"], second["folder"]) == (f"runs/{name}-1", f"runs/{name}-2")
    assert os.readlink(LATEST) == f"{name}-2"
    assert not Path("runs/latest/config.yaml").read_text().count("output: auto")
    config = api.configure(resume=True, settings={"steps": 3})
    assert (config.output, config.seed) == (f"runs/{name}-2", 1)
    assert train(config, resume=True)["step"] == 3
    assert len({path.resolve() for path in find_runs("runs")}) == 2
    assert api.configure(resume=True, settings={"output": f"runs/{name}-1"}).seed == 0
    # a link that is given is what it leads to, also when it leads elsewhere later
    with pytest.raises(Failed, match=rf"^runs/{name}-2 holds a run already \(config.yaml is there\): give --resume"):
        train(tiny("runs/latest"))
    assert api.configure(tiny(), resume=True).output == f"runs/{name}-2"
    assert api.Run().folder.resolve().name == f"{name}-2"


def test_a_file_or_a_dead_link_in_the_way_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "load_task", lambda *_: pytest.fail("loaded"))
    Path("runs").touch()
    Path("link").symlink_to("nowhere/at/all")
    for line, path, what in (
        ([], "runs", "a file"),
        (["--output", "runs/deep/mine"], "runs", "a file"),
        (["--output", "runs"], "runs", "a file"),
        (["--output", "link/mine"], "link", "a link that leads nowhere"),
    ):
        for more in ([], ["--resume"]):
            assert cli.main(["train", "--log.view", "none", "--device", "cpu", *line, *more]) == 2
            said = capsys.readouterr().err
            assert said == f"rpg train: output: {path} is {what}; give a folder with --output\n"
    assert sorted(os.listdir()) == ["link", "runs"]


def test_a_folder_that_may_not_be_written_is_told_before_anything_is_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "load_task", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "closed")  # root may do all
    Path("closed").mkdir()
    text = re.escape(f"output: cannot write into {home / 'closed'}; give another folder with --output")
    for resume in (False, True):
        with pytest.raises(Failed, match=f"^{text}$"):
            train(tiny("closed/deep/run"), resume=resume)
    with pytest.raises(ValueError, match=f"^{text}$"):
        api.configure(resume=True, settings={"output": "closed/run"})


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_where_latest_is_the_users_own_a_run_says_so_before_it_loads(
    make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs").mkdir()
    make(LATEST)
    assert train(tiny(steps=1))["folder"] == f"runs/{tiny().algorithm}-1"
    said = capsys.readouterr().out
    text = "warning: runs/latest is no link, so it stays as it is and will not lead to this run: move it away, or give"
    assert said.index(text) < said.index("step 1/1")
    assert not LATEST.is_symlink()
    train(api.configure(resume=True), resume=True)  # the one that there is
    assert text in capsys.readouterr().out
    train(tiny("elsewhere", steps=1))
    assert text not in capsys.readouterr().out


# ---- what lies there already -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["config.yaml", "metrics.jsonl", *FOLDERS])
def test_a_folder_that_holds_anything_of_a_run_is_refused(left: str) -> None:
    """On the way, too: whatever comes there while the model is loaded."""
    kept = Path("run", left, "step-000004") if left in FOLDERS else Path("run", left)
    kept.parent.mkdir(parents=True)
    kept.write_text("worth keeping")
    text = rf"^run holds a run already \({left} is there\): give --resume to go on with it, or another --output$"
    with pytest.raises(Failed, match=text) as caught:
        train(tiny("run"))
    assert caught.value.setup
    with pytest.raises(ValueError, match=text):
        RunFolder(Path("run")).begin()
    assert [path for path in Path("run").rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == "worth keeping"


def test_a_folder_with_other_things_in_it_is_taken() -> None:
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/notes.txt").write_text("mine")
    Path("run/metrics.jsonl").touch()
    folder = opened("run")
    assert folder.marked() == folder.run != ""
    with pytest.raises(ValueError, match="another process is training in run"):
        RunFolder(Path("run")).begin()
    folder.close()
    RunFolder(Path("run")).begin()


# ---- moved, deleted, replaced ----------------------------------------------------------------------------------------


def move(folder: Path) -> None:
    folder.rename("moved")


def move_and_replace(folder: Path) -> None:
    move(folder)
    replace_by_stranger(folder)


def replace_by_stranger(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    for step in range(1, 9):  # of the same steps, and of later ones
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:06d}" / "weights").write_text("a stranger's")
    (folder / "run.id").write_text("of a stranger\n")
    (folder / "summary.json").write_text("a stranger's")


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def tree(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def disturbed(monkeypatch: pytest.MonkeyPatch, what: Callable[[Path], None], when: int, during: str) -> None:
    """``what`` happens to the run's folder in step ``when``: before it, or in the middle of its checkpoint."""
    step, write = Trainer.step, loop.Policy.save

    def disturbing_step(self: Trainer, number: int, logs: Any) -> None:
        if number == when and during == "step":
            what(Path("run"))
        step(self, number, logs)

    def disturbing_save(self: Any, folder: Path) -> None:
        if folder.parent.name == f".saving-step-{when:06d}" and during == "save" and not Path("run-saved").exists():
            what(Path("run"))
        write(self, folder)

    monkeypatch.setattr(Trainer, "step", disturbing_step)
    monkeypatch.setattr(loop.Policy, "save", disturbing_save)


@pytest.mark.parametrize(("what", "during"), [(move, "save"), (move_and_replace, "step"), (move_and_replace, "save")])
def test_a_folder_that_is_moved_is_followed(
    what: Callable[[Path], None], during: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disturbed(monkeypatch, what, 3, during)
    done = train(tiny("run", steps=4, checkpoint=CheckpointConfig(every=1, keep=2)))
    assert done["folder"] == "moved"
    assert "warning: run was moved to moved: the run goes on there" in capsys.readouterr().out
    assert [row["step"] for row in metrics(Path("moved"))] == [0, 1, 2, 3, 4]
    assert checkpoints(Path("moved"))[-2:] == ["step-000003", "step-000004"]
    assert summary(Path("moved"))["status"] == "finished"
    if what is move:
        assert not Path("run").exists()
    else:
        now = tree(Path("run"))
        shutil.rmtree("run")
        replace_by_stranger(Path("run"))
        assert now == tree(Path("run"))


@pytest.mark.parametrize(
    ("what", "during", "became"),
    [
        (shutil.rmtree, "save", "deleted"),
        (replace_by_stranger, "step", "replaced by another folder"),
        (replace_by_stranger, "save", "replaced by another folder"),
        (empty, "step", "emptied"),
    ],
)
def test_a_folder_that_is_lost_ends_the_run_with_what_can_be_saved(
    what: Callable[[Path], None], during: str, became: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disturbed(patch, what, 2, during)
        with pytest.raises(Failed) as caught:
            train(tiny("run", steps=4, checkpoint=CheckpointConfig(every=2)))
    assert str(caught.value) == (
        f"run was {became} while the run was going on. Step 2 is saved, the metrics are not; "
        f"go on with: {own_command()} train --resume --output run-saved"
    )
    assert not caught.value.setup
    if what is replace_by_stranger:
        now = tree(Path("run"))
        replace_by_stranger(Path("run"))
        assert now == tree(Path("run"))
    assert summary(Path("run-saved"))["status"] == "failed"
    done = train(api.configure(resume=True, settings={"output": "run-saved"}), resume=True)
    assert (done["status"], done["step"]) == ("finished", 4)


def test_without_checkpoints_a_lost_folder_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(monkeypatch, shutil.rmtree, 2, "step")
    with pytest.raises(Failed, match=r"^run was deleted while the run was going on$"):
        train(tiny("run", checkpoint=CheckpointConfig(keep=0)))
    assert not os.listdir()


def test_checkpoints_that_somebody_removed_are_not_missing_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last is made at step 2, when the folder of step 2 is gone."""
    finish = Trainer._finish_step

    def remove(self: Trainer, step: int, *rest: Any) -> None:
        finish(self, step, *rest)
        if step == 2:
            shutil.rmtree("run/checkpoints")

    monkeypatch.setattr(Trainer, "_finish_step", remove)
    train(tiny("run"))
    assert checkpoints(Path("run")) == ["step-000002"]


def test_a_copy_in_its_place_is_another_folder() -> None:
    """The logs that are open are those of the folder that is gone."""
    folder = opened("run")
    shutil.copytree("run", "copy")
    shutil.rmtree("run")
    Path("copy").rename("run")
    assert folder.lost() == "run was replaced by another folder while the run was going on"


def test_links_in_a_folder_lead_nowhere(home: Path) -> None:
    train(tiny("run"))
    Path("precious").write_text("precious\n")
    for name in ("report.html", "report.html.new", "summary.json.new", "metrics.jsonl", "run.id"):
        (home / "run" / name).unlink(missing_ok=True)
        (home / "run" / name).symlink_to(home / "precious")
        if name.startswith("report"):
            rpg.Run("run").report()
        elif name == "summary.json.new":
            assert train(tiny("run", steps=2), resume=True)["status"] == "finished"
        else:
            with pytest.raises(Failed):
                train(tiny("run", steps=3), resume=True)
            (home / "run" / name).unlink()
        assert Path("precious").read_text() == "precious\n"


# ---- checkpoints of other runs ---------------------------------------------------------------------------------------


def test_other_runs_checkpoints_are_neither_resumed_nor_removed(home: Path) -> None:
    root = home / "checkpoints"

    def put(step: int, run: str) -> None:
        checkpoint.save(root, step, lambda folder: (folder / "weights").write_text(run), {}, {"step": step}, run)  # type: ignore[arg-type, func-returns-value]

    for step in (1, 2, 3):
        put(step, "a")
    for step in (2, 5):
        shutil.rmtree(root / f"step-{step:06d}", ignore_errors=True)
        put(step, "b")
    told: list[str] = []
    found = checkpoint.load(root, told.append, "a")
    assert found is not None
    assert (found.step, found.run) == (3, "a")
    assert told == [f"{root / 'step-000005'} is another run's: left as it is"]
    put(4, "a")
    put(5, "a")
    checkpoint.prune(root, 1, newest=5, run="a")
    assert sorted(os.listdir(root)) == ["step-000002", "step-000005", "step-000005-of-b"]
    assert (root / "step-000005-of-b" / "model" / "weights").read_text() == "b"
    assert checkpoint.load(root, pytest.fail).run == "a"  # type: ignore[union-attr]


# ---- what a resume has lost ------------------------------------------------------------------------------------------


def test_a_resume_says_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny("run", steps=3, checkpoint=CheckpointConfig(every=1, keep=9)))
    metrics_bytes, samples_bytes = (Path("run", name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl"))
    samples = samples_bytes.count(b"\n")

    def resumed(**damage: Callable[[Path], object]) -> str:
        shutil.copytree("run", "damaged")
        for name, do in damage.items():
            do(Path("damaged", name.replace("_", ".")))
        capsys.readouterr()
        train(api.configure(resume=True, settings={"output": "damaged"}), resume=True)
        printed = capsys.readouterr().out
        shutil.rmtree("damaged")
        return printed

    def later(folder: Path) -> None:
        for step in (2, 3):
            shutil.rmtree(folder / f"step-{step:06d}")

    def cut(path: Path) -> None:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b'{"step": 2, "lo')

    assert "lost" not in resumed()
    assert "metrics.jsonl has 0 of the 4 rows that it had at step 3: the others are lost" in resumed(
        metrics_jsonl=Path.unlink
    )
    said = resumed(metrics_jsonl=cut, samples_jsonl=Path.unlink)
    assert "metrics.jsonl has 2 of the 4 rows that it had at step 3: the others are lost" in said
    assert f"samples.jsonl has 0 of the {samples} rows that it had at step 3: the others are lost" in said

    shutil.copytree("run", "kept")
    later(Path("kept/checkpoints"))
    capsys.readouterr()
    train(api.configure(resume=True, settings={"output": "kept"}), resume=True)
    assert (
        "warning: resumed from step 1 (kept/checkpoints/step-000001); steps 2 to 3 are done again, as there is no "
        "later checkpoint; what they had written is kept in metrics-to-step-000003.jsonl and "
        "samples-to-step-000003.jsonl"
    ) in capsys.readouterr().out
    assert Path("kept/metrics-to-step-000003.jsonl").read_bytes() == metrics_bytes
    assert Path("kept/samples-to-step-000003.jsonl").read_bytes() == samples_bytes
    assert_same(bits(Path("run")), bits(Path("kept")))


def test_data_that_has_changed_is_not_resumed_with() -> None:
    rows = [{"prompt": f"{a}+{b}\n", "answer": a + b} for a in range(1, 6) for b in range(1, 6)]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", rows[:20])
    write("test.jsonl", rows[20:])
    config = tiny("run", steps=1, task=TaskConfig(name="train.jsonl", test="test.jsonl"))
    train(config)
    more = replace(config, steps=2)
    way = r"\. Put it back as it was, or begin a new run from the weights: --model run/checkpoints/step-000001/model$"
    changed = r"^cannot resume run: the data of train\.jsonl has changed since: "
    for name, new, told in (
        ("train.jsonl", rows[:19], r"problems to train on \(20 then, 19 now\)"),
        ("train.jsonl", [*rows[:19], rows[20]], r"problems to train on \(20, and others now\)"),
        ("train.jsonl", rows[:20][::-1], r"problems to train on \(20, and others now\)"),  # the order counts
        ("test.jsonl", rows[21:], r"test set 'test' \(5 then, 4 now\)"),
    ):
        before = Path(name).read_bytes()
        write(name, new)
        with pytest.raises(Failed, match=changed + told + way) as caught:
            train(more, resume=True)
        assert caught.value.setup
        Path(name).write_bytes(before)
    assert train(replace(more, eval=EvalConfig(every=0, problems=2, k=2)), resume=True)["step"] == 2
