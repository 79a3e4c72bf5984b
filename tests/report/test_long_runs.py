"""Runs of many steps: the page and what it takes to make it stay small, and nothing that stands out is lost."""

import json
import random
import tracemalloc

import numpy as np
import pytest

from rpg import report
from rpg.report import responses
from rpg.report.charts import CHARTS
from rpg.report.metrics import Metrics
from rpg.report.payload import EVALS, curves, extremes, sampled
from rpg.report.runs import RunData
from rpg.run.folder import read_rows

STEPS = 6_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng, made = random.Random(0), tmp_path_factory.mktemp("runs") / "long"
    made.mkdir()
    with (made / "metrics.jsonl").open("w") as metrics, (made / "samples.jsonl").open("w") as samples:
        for step in range(1, STEPS + 1):
            row = {"step": step, "entropy": 9.0 if step == 5432 else 1.0, "eval/m/mean@8": float(step == 4321)}
            metrics.write(json.dumps(row | {f"metric/{i}": rng.random() for i in range(20)}) + "\n")
            for i in range(8):
                about = {"step": step, "split": "train", "group": i // 4, "prompt": f"{step} {i // 4}", "answer": "7"}
                samples.write(json.dumps(about | {"response": "word " * 25, "reward": 1.0, "length": 25}) + "\n")
    return made


def test_memory_is_bounded_and_the_page_is_small(folder):
    """All rows as Python objects would be 80 MB; the files have 12 MB."""
    tracemalloc.start()
    run = report.read_run(folder)
    page = report.page([run])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15e6, f"{peak / 1e6:.0f} MB"
    assert len(page.encode()) < 600_000
    assert "of the 48,000 responses" in page
    assert "of more than 2,000, the lowest and the highest of neighbours are drawn" in page


def test_what_stands_out_is_kept(folder):
    run = report.read_run(folder)
    made = curves(run, CHARTS, 10, True)
    assert max(made["highest"]["entropy"]) == 9
    held_out = made["evals"]["m"]
    assert len(held_out["x"]["step"]) <= EVALS
    assert held_out["x"]["step"][held_out["columns"]["mean@8"].index(1)] == 4321
    assert (held_out["x"]["step"][0], held_out["x"]["step"][-1]) == (1, STEPS)


def test_responses_are_whole_groups_from_the_first_to_the_last(folder):
    run = report.read_run(folder)
    shown, count, total = sampled([run])
    assert {len(group["responses"]) for group in shown} == {4}
    assert (total, 500 <= count <= 700) == (8 * STEPS, True)
    steps = [group["step"] for group in shown]
    assert (steps[0], steps[-1]) == (1, STEPS)
    assert max(np.diff(steps)) < 4 * STEPS / len(steps)


def test_a_large_file_with_one_line_or_broken_ones_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "WHOLE", 0)
    path, sample = tmp_path / "samples.jsonl", {"step": 1, "prompt": "p", "response": "r"}
    for text in (json.dumps(sample) + "\n", "{broken\n" + json.dumps(sample) + "\n[1]\n" + json.dumps(sample)[:9]):
        path.write_text(text)
        assert responses.read_responses(path, [])[0] == [sample]
    path.write_text("\n" * 50)
    assert responses.read_responses(path, []) == ([], 50)


def test_rows_are_read_one_at_a_time(folder):
    tracemalloc.start()
    count = sum(1 for _ in read_rows(folder / "metrics.jsonl", []))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == STEPS
    assert peak < 1e6


def test_extremes():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_001)
    values[[17, 5000]] = np.nan, np.inf
    kept = extremes(values, 100)
    assert len(kept) <= 100
    assert set(kept) >= {0, 10_000, int(np.nanargmin(values)), int(np.nanargmax(np.where(np.isinf(values), 0, values)))}
    assert extremes(values[:100], 100).tolist() == list(range(100))


def test_a_file_of_many_names_is_cut(tmp_path):
    rows = Metrics({"step": i, f"name{i}": 1.0} for i in range(2000))
    assert len(rows.columns) == 500
    report.page([RunData("r", tmp_path, rows=rows)])
