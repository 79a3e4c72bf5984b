"""Runs of a study as processes: in their order, killed and resumed, failed, refused; a stand-in trains."""

from __future__ import annotations

import json
import time

import pytest
import torch
from made import begun, stand_in

from rpg.costs.memory import GPU_SHARE, SHARE, available_bytes
from rpg.study.results import FILE, read_results

TEXT = "compare: [dapo, grpo]\nbudget: {steps: 4}\nseeds: 2\ntune: {optim.lr: [x1, x2]}\nset: {device: cpu}\n"


@pytest.fixture
def start(server, tmp_path):
    """``rpg study`` on a file of this text; how the stand-in behaves is named."""

    def go(text=TEXT, *argv, **how):
        (tmp_path / "s.yaml").write_text(text)
        before = stand_in(tmp_path, **how)
        return server.start("study", tmp_path / "s.yaml", "-o", tmp_path / "study", *argv, before=before)

    return go


def rows(tmp_path):
    return {row["run"]: row for row in read_results(tmp_path / "study")[1]}


def test_tuned_then_seed_by_seed_with_what_tuning_chose(start, tmp_path):
    job = start().wait()
    assert job.code == 0, job.text
    names = [line.split()[0] for line in begun(tmp_path)]
    tuned = [f"tune/{arm}/{i}-seed-1000" for i in (0, 1) for arm in ("dapo", "grpo")]
    assert names == tuned + [f"runs/{arm}/seed-{i}" for i in (0, 1) for arm in ("dapo", "grpo")]
    assert "dapo ends higher than grpo (+25.0" in job.out
    assert (tmp_path / "study" / "study.html").is_file()
    again = start().wait()
    assert (again.code, again.out) == (0, job.out), "all is done, and the same is said"
    assert len(begun(tmp_path)) == 8, "and nothing made twice"


@pytest.mark.parametrize("jobs", [1, 3])
def test_killed_outright_and_resumed(start, tmp_path, jobs):
    """By SIGKILL, which only the study gets: its runs stop by themselves, and the next call waits for their folders."""
    job = start(TEXT, "--jobs", jobs, pause=0.1, saving=1.0)
    assert job.until(lambda: len(begun(tmp_path)) >= jobs + 1)
    time.sleep(0.15)
    job.kill()
    assert job.wait().code == -9
    done = set(rows(tmp_path))
    before = len(begun(tmp_path))
    again = start(TEXT, "--jobs", jobs, pause=0.1, saving=1.0).wait()
    assert again.code == 0, again.text
    after = begun(tmp_path)
    assert not [line for line in after if line.endswith("TWICE")], "two in one folder"
    assert not [line for line in after[before:] if line.split()[0] in done], "a run that had ended was made again"
    assert [line for line in after[before:] if "resumed at" in line], "those under way go on"
    assert all(row["step"] == 4 and row["status"] == "finished" for row in rows(tmp_path).values())
    assert len(rows(tmp_path)) == 8


def test_the_minutes_are_over_and_it_goes_on(start, tmp_path):
    job = start(TEXT, "--minutes", "0.01", pause=0.3).wait()
    assert job.code == 3, job.text
    assert "minutes are over" in job.err
    assert start(TEXT).wait().code == 0


def test_results_alone_are_gone_on_with(start, tmp_path):
    """results.jsonl is what travels: no run folder is needed."""
    first = start().wait()
    lines = (tmp_path / "study" / FILE).read_text().splitlines(keepends=True)
    (tmp_path / "study").rename(tmp_path / "elsewhere")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / FILE).write_text("".join(line for line in lines if "runs/grpo/seed-1" not in line))
    again = start().wait()
    assert (again.code, again.out) == (0, first.out)
    assert [line.split()[0] for line in begun(tmp_path)[8:]] == ["runs/grpo/seed-1"]


def test_a_failed_run_is_a_result(start, tmp_path):
    job = start(fails="runs/grpo/seed-1").wait()
    assert job.code == 0, job.text
    assert "grpo, seed 1, optim.lr 5.0e-4: failed at step 1: the gradient is not finite" in job.out
    assert rows(tmp_path)["runs/grpo/seed-1"]["status"] == "failed"
    again = start(TEXT, "--retry-failed").wait()
    assert again.code == 0, again.text
    assert rows(tmp_path)["runs/grpo/seed-1"]["status"] == "finished"


def test_a_rate_that_fails_is_not_chosen(start, tmp_path):
    job = start(fails="tune/dapo/0-").wait()
    assert job.code == 0, job.text
    assert rows(tmp_path)["runs/dapo/seed-0"]["tried"] == {"optim.lr": 1e-3}
    again = start(TEXT, "--retry-failed").wait()
    assert again.code == 0, "tuning is over: its failure stays"
    assert len(begun(tmp_path)) == 8


def test_a_run_that_the_system_kills_is_resumed_and_then_failed(start, tmp_path):
    job = start(dies="runs/dapo/seed-0").wait()
    assert job.code == 0, job.text
    assert "ended by SIGKILL, 2 times" in rows(tmp_path)["runs/dapo/seed-0"]["message"]
    assert [line for line in begun(tmp_path) if "runs/dapo/seed-0" in line] == [
        "runs/dapo/seed-0 begun",
        "runs/dapo/seed-0 resumed at 1",
    ]


def test_a_first_run_that_cannot_be_set_up_ends_all(start, tmp_path):
    job = start(refused="tune/dapo/0-").wait()
    assert job.code == 2
    assert "could not be set up" in job.err
    assert not begun(tmp_path)


def test_a_later_one_leaves_the_others_alone_and_is_no_result(start, tmp_path):
    job = start(refused="runs/dapo/seed-1").wait()
    assert job.code == 2
    assert "dapo, seed 1, optim.lr 5.0e-4 could not be set up" in job.err
    assert len(rows(tmp_path)) == 7
    assert start().wait().code == 0


def test_other_settings_are_refused_and_lines_of_other_runs_kept(start, tmp_path):
    assert start().wait().code == 0
    job = start(TEXT.replace("steps: 4", "steps: 5")).wait()
    assert job.code == 2
    assert "was made with other settings" in job.err
    more = start(TEXT.replace("seeds: 2", "seeds: 3")).wait()
    assert more.code == 0, more.text
    assert len(begun(tmp_path)) == 10, "two more, of the third seed"
    fewer = start(TEXT.replace("[dapo, grpo]", "[dapo]")).wait()
    assert fewer.code == 0, fewer.text
    kept = (tmp_path / "study" / "results-before.jsonl").read_text().splitlines()
    assert len(kept) == 11
    assert json.loads(kept[0])["methods"] == ["dapo", "grpo"]


def test_runs_on_one_gpu_plan_with_a_share_of_its_memory_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80_000, 100_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
    assert available_bytes(torch.device("cuda")) == int(SHARE * 85_000)
    monkeypatch.setenv(GPU_SHARE, "0.25")
    assert available_bytes(torch.device("cuda")) == int(SHARE * 25_000)
