"""A run that is made again with the same settings and seed is no seed more."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rpg import report
from rpg.report.metrics import Metrics
from rpg.report.runs import RunData
from rpg.report.scores import averages, group_by_experiment


def made(name, seed, last, started):
    return RunData(
        name,
        Path(name),
        config={"algorithm": "grpo", "seed": seed},
        summary={"status": "finished", "started": started},
        rows=Metrics([{"step": 0, "eval/math/mean@8": 0.2}, {"step": 10, "eval/math/mean@8": last}]),
    )


@pytest.fixture
def runs():
    four = [made("a", 0, 0.5, "2026-01-02"), made("b", 0, 0.6, "2026-01-01"), made("c", 1, 0.7, "2026-01-01")]
    return [*four, replace(four[0], name="d", folder=Path("d"), rows=Metrics([]))]


def test_the_latest_that_was_evaluated_counts_wherever_it_stands(runs):
    (grpo,) = group_by_experiment(runs)
    last, _ = averages(grpo, "math")
    assert (last.mean, last.n) == (pytest.approx(0.6), 2)
    without = [replace(run, config={"algorithm": "grpo"}) for run in runs[:3]]
    assert averages(*group_by_experiment(without), "math")[0].n == 3, "where no seed is known, each is one"


def test_the_page_says_which_are_repeats(runs):
    text = report.page(runs)
    assert "<li>a repeats d and b: counted once</li>" in text
    assert '<td class="number">2</td>' in text.split('<table class="results">')[1]
    data = json.loads(re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', text, re.S)[1])
    assert data["groups"][0]["runs"] == [0, 2], "the others are in no mean that is drawn"
    assert [run["name"] for run in data["runs"]] == ["a", "b", "c", "d"]
    assert "repeats" not in report.page(runs[1:3])
