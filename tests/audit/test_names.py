"""Planted mistakes are caught, and called by their names; what is exact is neither accused nor named."""

import functools
import math
from dataclasses import replace

import planted_bugs
import pytest
import torch

from rpg import PolicyLoss, algorithm, algorithms, audit
from rpg.audit.names import NO_MIN, Recogniser, wrong_side
from rpg.audit.summary import bias_text

BUGS, EXACT = planted_bugs.BUGS, planted_bugs.EXACT
DRIFT = 0.05


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def found(losses):
    """All in one audit, as by one command; by name."""
    subjects = [audit.resolve(loss, divergence) for loss, divergence in losses]
    result = audit.run(subjects, seeds=1, drift=DRIFT)
    return {line.name: line for line in audit.Checked.of(result, subjects, "rpg audit").lines}


def bug(loss):
    return found(tuple((loss, "rkl") for loss in BUGS))[loss.__name__]


@pytest.mark.parametrize("loss", BUGS, ids=lambda loss: loss.__name__)
def test_a_planted_mistake_is_caught_and_named(loss):
    line = bug(loss)
    assert line.failed
    assert (BUGS[loss] in line.names) if BUGS[loss] else not line.names


def test_most_of_twenty_and_more_are_named():
    assert len(BUGS) >= 20
    assert sum(bool(name) for name in BUGS.values()) >= 0.8 * len(BUGS)


def test_each_says_one_thing():
    """But for the clip that turns the weight into a constant of 0.2: the KL then counts five times as much."""
    long = {loss.__name__: bug(loss).names for loss in BUGS if len(bug(loss).names) > 1}
    assert list(long) == ["clip_bounds_the_ratio_itself"]
    assert long["clip_bounds_the_ratio_itself"][1] == "the KL counts 5 times"


@pytest.mark.parametrize("loss", EXACT, ids=lambda loss: loss.__name__)
def test_an_exact_loss_is_not_accused(loss):
    line = found(tuple(EXACT.items()))[loss.__name__]
    assert (line.failed, line.names) == ([], ())


def names_at(drift, loss, divergence=None):
    return recogniser(drift).names(audit.resolve(loss, divergence))


recogniser = functools.cache(functools.partial(Recogniser, 0.1))
RPG = [name for name in algorithms() if name.startswith("rpg-")]


@pytest.mark.parametrize("drift", [DRIFT, 0.5])
def test_no_exact_preset_fits_a_name(drift):
    """Asked directly, without the question whether it is off."""
    losses = [*RPG, "ppo", "dapo", "dr-grpo", "gspo", "gmpo", "distill", PolicyLoss("rkl", 0.1, level="sequence")]
    assert {str(loss): names for loss in losses if (names := names_at(drift, loss))} == {}


def test_published_methods_are_called_by_what_they_leave_out():
    length, weight = "each response is divided by its own length", "the weight w is missing on the KL"
    unweighted = "the importance weight w is missing on the reward"
    expected = {
        "grpo": [length, f"{weight} (k3, as GRPO was published)"],
        "grpo-corrected": [length],
        "reinforce++-baseline": [f"{weight} (k2)"],
        "rloo": [unweighted],
        "cpgd": [unweighted],
        "sapo": [],
    }
    assert {name: names_at(0.5, name) for name in expected} == expected


def test_what_only_the_clip_does_wrong_is_said_to_be_the_clips():
    """As TRL's default of cispo, whose bound on the ratio is below 1."""
    constant = replace(audit.resolve("ppo"), clipped=audit.resolve("reinforce").coefficients)
    names = ["with its clip on, the importance weight w is missing on the reward"]
    assert recogniser(0.5).names(constant) == names


def clipped(pick):
    def loss(logp, old_logp, advantages, mask, ref_logp, beta):
        w, a = (logp - old_logp).exp(), advantages[:, None]
        return ((beta * w * (logp - ref_logp) - pick(w * a, w.clamp(0.8, 1.2) * a)) * mask).sum() / mask.sum()

    return loss


@pytest.mark.parametrize(
    ("pick", "names", "biased"),
    [
        (torch.min, [], []),
        (torch.max, ["the clip cuts on the wrong side: min and max are swapped"], ["clip"]),
        (lambda _, cut: cut, [NO_MIN], []),  # which may be meant
    ],
    ids=["right", "swapped", "no min"],
)
def test_the_side_that_a_clip_cuts_on_is_seen_where_no_ratio_leaves_it(pick, names, biased):
    result = audit.check(clipped(pick), "rkl", seeds=1, drift=0.02)
    assert (result.names, result.biased) == (names, biased)
    assert all(name in str(result) for name in names)
    assert "The clip itself is not checked here, but for the side it cuts on: no ratio leaves ±20 %." in str(result)
    assert "not checked" not in str(audit.check("ppo", seeds=1))


def test_no_preset_and_no_exact_loss_is_said_to_clip_on_the_wrong_side():
    subjects = [audit.resolve(name) for name in algorithms()] + [audit.resolve(*each) for each in EXACT.items()]
    sides = {s.name: wrong_side(s.clipped or s.coefficients, 0.1) for s in subjects}
    assert {name: side for name, side in sides.items() if side} == {}


@pytest.mark.parametrize("extreme", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_said_to_be(extreme):
    result = audit.check(lambda logp, old_logp, advantages, mask: (logp * mask).sum() + extreme, seeds=1)
    assert result.names == ["the loss is not finite"]
    assert result.biased


def test_a_wrong_divergence_stated_is_named_by_the_one_it_is():
    for has, said, names in (
        ("urkl", "fkl", ["this is urkl's gradient (and rkl's), not fkl's"]),
        ("fkl", "rkl", ["this is ufkl's gradient (and fkl's), not rkl's"]),
        ("rkl", "none", ["there is a KL term, though none was stated"]),
        ("none", "rkl", ["the KL has no gradient (is it detached, or left out?)"]),
    ):
        assert names_at(0.5, PolicyLoss(has, 0.1 if has != "none" else 0), said) == names


def test_a_mixture_of_two_mistakes_that_fits_none_has_no_name():
    def mixed(**given):
        return planted_bugs.k2_without_weight(**given, beta=0.1) + planted_bugs.k1_in_the_loss(**given, beta=0.1)

    assert names_at(DRIFT, mixed, "rkl") == []


# ---- from Python -----------------------------------------------------------------------------------------------------


def test_the_result_in_python_prints_as_the_table_and_says_what_is_wrong():
    result = audit.check(planted_bugs.nomask, "rkl", seeds=1, drift=DRIFT)
    assert result.biased == ["six settings"]
    assert result.names == ["padding counts"]
    assert repr(result) == str(result)
    assert "nomask" in str(result)
    assert "✗ padding counts" in str(result)
    assert max(map(len, str(result).splitlines())) <= 100
    assert result.as_dict()["subjects"][0]["names"] == ["padding counts"]
    html = result._repr_html_()
    assert "<li>padding counts</li>" in html
    assert html.count("<tr>") == 2
    assert f">{bias_text(result.lines[0].worst_variable)}</td>" in html
    right = audit.check(algorithm("rpg-urkl"), seeds=1)
    assert (right.biased, right.names) == ([], [])
    assert "What is wrong" not in str(right)
