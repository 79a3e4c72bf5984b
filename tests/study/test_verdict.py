"""The verdict of a study: known values, and how often it is right where the truth is known."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from made import Drawn, row

from rpg.study.outcome import NOTHING_SEEN
from rpg.study.page import html
from rpg.study.statistics import estimated, holm, mean_and_error, t_quantile, t_tails
from rpg.study.text import markdown

TWO = "compare: [dapo, grpo]\nbudget: {steps: 20}\n"
REPEATS = 100


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234)]
)
def test_student_t_is_as_tables_have_it(freedom, quantile):
    assert t_quantile(0.95, freedom) == pytest.approx(quantile, rel=1e-5)
    assert t_tails(quantile, freedom) == pytest.approx(0.05, rel=1e-4)
    assert t_tails(0.0, freedom) == 1


def test_holm_is_as_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == []


def test_where_problems_do_not_matter_it_is_the_paired_t_test():
    by_seed = np.array([0.02, 0.05, 0.03, 0.06, 0.04])
    found = estimated(np.repeat(by_seed[:, None], 50, axis=1))
    error = by_seed.std(ddof=1) / 5**0.5
    assert found.mean == pytest.approx(0.04)
    assert found.error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((0.04 - 2.77645 * error, 0.04 + 2.77645 * error), rel=1e-5)
    assert found.p == pytest.approx(0.004813, rel=1e-3)


def test_problems_count_as_a_sample_too():
    """All seeds agree, but the difference is made by a few of the problems."""
    x_SP = np.zeros((4, 100))
    x_SP[:, :10] = 1.0
    assert estimated(x_SP).error == pytest.approx(0.3 / 99**0.5, rel=1e-6)


def test_the_variance_is_that_of_seeds_and_problems_together():
    rng, seeds, problems = np.random.default_rng(0), 5, 40
    draws = (
        rng.normal(0, 0.3, (4000, seeds, 1))
        + rng.normal(0, 1, (4000, 1, problems))
        + rng.normal(0, 2, (4000, seeds, problems))
    )
    mean, error = mean_and_error(draws)
    assert (error**2).mean() == pytest.approx(mean.var(), rel=0.12)


def test_one_seed_has_no_interval():
    assert estimated(np.array([[0.0, 1.0]])).p == 1


def test_equal_methods_under_two_names_show_no_difference(tmp_path):
    rng = np.random.default_rng(0)
    two = Drawn(tmp_path / "two.yaml", TWO)
    told = [two.result(two.rows(rng)) for _ in range(REPEATS)]
    silent = [x for x in told if x["verdict"][0].startswith(NOTHING_SEEN)]
    assert len(silent) >= 95, f"{len(silent)} of {REPEATS}"


def test_a_difference_of_5_points_is_seen_with_5_seeds(tmp_path):
    rng = np.random.default_rng(1)
    two = Drawn(tmp_path / "two.yaml", TWO)
    told = [two.result(two.rows(rng, grpo=0.05)) for _ in range(REPEATS)]
    seen = [x for x in told if x["verdict"][0].startswith("grpo ends higher than dapo (+")]
    assert len(seen) >= 80, f"{len(seen)} of {REPEATS}"
    covered = sum(x["differences"][0]["low"] <= 0.05 <= x["differences"][0]["high"] for x in told)
    assert covered >= 93


def test_of_many_equal_methods_none_stands_out(tmp_path):
    """The chance of any false difference is kept over the 10 comparisons of a study."""
    rng = np.random.default_rng(2)
    text = "compare: [dapo, grpo, gspo, cispo, rloo]\nbudget: {steps: 20}\nseeds: 3\n"
    five = Drawn(tmp_path / "five.yaml", text, problems=128)
    told = [five.result(five.rows(rng)) for _ in range(REPEATS)]
    assert sum(x["verdict"][0].startswith(NOTHING_SEEN) for x in told) >= 95


@pytest.fixture
def small(tmp_path):
    return lambda text: Drawn(tmp_path / "small.yaml", text, problems=60)


def test_a_failed_run_counts_with_what_it_had(small):
    study = small(TWO + "target: 0.4")
    runs = study.rows(np.random.default_rng(3), grpo=0.1)
    before = study.result(runs)["arms"][1]
    broken = next(i for i, x in enumerate(runs) if x["arm"] == "grpo" and x["seed"] == 2)
    runs[broken] |= {"status": "failed", "message": "the loss is not finite", "last": {}, "first": {}, "evals": []}
    result = study.result(runs)
    arm = result["arms"][1]
    assert (arm["failed"], arm["last"]["seeds"], arm["target"]["of"]) == (1, 5, 5), "it is not left out"
    start = 0.25  # one of four right: the model that it began with
    assert arm["last"]["mean"] == pytest.approx(before["last"]["mean"] - (before["runs"][2]["last"] - start) / 5)
    assert "grpo, seed 2: failed at step 20: the loss is not finite" in markdown(result)
    assert "the loss is not finite" in html(result)


def test_comparisons_are_within_a_condition_and_with_one_where_it_is_named(small):
    text = "compare: [dapo, grpo, gspo]\ngrid: {optim.minibatches: [1, 4]}\nbudget: {steps: 20}\nseeds: 2\n"
    rng = np.random.default_rng(3)
    study = small(text)
    names = [(x["condition"], x["a"], x["b"]) for x in study.result(study.rows(rng))["differences"]]
    pairs = [(b, a) for a, b in itertools.combinations(("dapo", "grpo", "gspo"), 2)]
    assert names == [(where, a, b) for where in ("minibatches 1", "minibatches 4") for a, b in pairs]
    study = small(text + "against: grpo\n")
    names = [(x["a"], x["b"]) for x in study.result(study.rows(rng))["differences"]]
    assert names == 2 * [("dapo", "grpo"), ("gspo", "grpo")]


def test_time_and_tokens_to_a_target_are_medians_over_all_runs(small):
    study = small(TWO + "target: 0.6\nseeds: 3")
    runs = study.rows(np.random.default_rng(3))
    for x in runs:
        late = {"dapo": (10, 10, 20), "grpo": (10, 99, 99)}[x["arm"]][x["seed"]]
        x["evals"] = [[step, 10 * step, step / 2, {"test": 0.7 if step >= late else 0.1}] for step in (0, 10, 20)]
    dapo, grpo = (arm["target"] for arm in study.result(runs)["arms"])
    assert dapo == {"reached": 3, "of": 3, "step": 10, "tokens": 100, "seconds": 5.0}
    assert grpo == {"reached": 1, "of": 3, "step": None, "tokens": None, "seconds": None}


def test_a_result_of_nothing_is_told_as_that(small):
    result = small(TWO).result([])
    assert result["verdict"] == ["nothing to compare yet."]
    assert "0 of 10 runs so far" in markdown(result)
    assert "so this is no final result" in html(result)
    json.dumps(result, allow_nan=False)


def test_names_of_others_are_text_on_the_page(small):
    nasty = "</title><script>alert(1)</script>"
    study = small(f"compare: {{dapo: null, '{nasty}': {{algorithm: grpo}}}}\nbudget: {{steps: 2}}\n")
    assert "<script" not in html(study.result(study.rows(np.random.default_rng(3))))


def test_a_curve_keeps_the_last_value_of_a_run_that_ended(small):
    study = small(TWO + "seeds: 2")
    runs = [row(run, [1, 1]) for run in study.runs if run.arm.name == "dapo"]
    runs[0]["evals"] = [[0, 0, 0.0, {"t": 0.2}], [10, 100, 5.0, {"t": 0.1}]]
    runs[1]["evals"] = [[0, 0, 0.0, {"t": 0.4}], [10, 100, 5.0, {"t": 0.6}], [20, 200, 9.0, {"t": 0.7}]]
    curve = study.result(runs)["arms"][0]["curve"]
    assert [point["mean"] for point in curve] == pytest.approx([0.3, 0.35, 0.4])
    assert [(point["low"], point["high"]) for point in curve] == [(0.2, 0.4), (0.1, 0.6), (0.1, 0.7)]
