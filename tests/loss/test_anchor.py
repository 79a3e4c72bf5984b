"""When the KL's anchor is renewed: by count, or by a moving average that is right from its first number on."""

import math
from types import SimpleNamespace

import pytest

from rpg.loss.anchor import COUNTS, Renewal
from rpg.run.config import ReferenceConfig


def renewal(rule, **settings):
    return Renewal(rule, SimpleNamespace(**{"every": 10, "kl": 0.05, "smoothing": 0.9} | settings))


def renewed_at(rule, calls):
    """Which of the calls of ``due`` were followed by a renewal, counting from 1."""
    found = []
    for i, arguments in enumerate(calls, 1):
        if rule.due(*arguments):
            rule.renewed()
            found.append(i)
    return found


def test_every_third():
    assert renewed_at(renewal("every", every=3), [(i, None) for i in range(1, 8)]) == [3, 6]
    assert renewed_at(renewal("every", every=3), [(None, None)] * 7) == [3, 6]
    assert renewed_at(renewal("every", every=1), [(None, None)] * 3) == [1, 2, 3]


def test_optimiser_steps_that_come_several_at_a_time():
    """Of 4 to an iteration the tenth is in the third, the twentieth ends the fifth; none are made in an empty one."""
    assert renewed_at(renewal("every", every=10), [(None, None, 4)] * 10) == [3, 5, 8, 10]
    assert renewed_at(renewal("every", every=4), [(None, None, 4), (None, None, 0), (None, None, 3)]) == [1]
    assert renewed_at(renewal("every", every=2), [(None, None, 5)] * 2) == [1, 2]  # two were due: one renewal


def test_a_constant_kl_above_the_target_fires_at_once():
    """Uncorrected the average starts at 0: with smoothing 0.9 a KL of 0.051 would pass 0.05 after 38 steps."""
    assert renewed_at(renewal("kl"), [(i, 0.051) for i in range(1, 4)]) == [1, 2, 3]
    assert renewed_at(renewal("kl"), [(i, 0.0499) for i in range(1, 100)]) == []


@pytest.mark.parametrize("updates", [1, 3])
def test_the_average_by_hand(updates):
    rule, kls = renewal("kl", kl=1e9, smoothing=0.8), [0.2, 0.1, None, 0.5, 0.0]
    weights: list[tuple[float, float]] = []
    for kl in kls:
        rule.due(None, kl, updates)
        if kl is not None:
            past = 0.8**updates
            weights = [(w * past, x) for w, x in weights] + [(1 - past, kl)]
        mean = sum(w * x for w, x in weights) / sum(w for w, _ in weights)
        assert rule.average_kl == pytest.approx(mean, rel=1e-12)
    assert rule.updates == 5 * updates
    rule.renewed()
    assert (rule.average_kl, rule.renewals) == (0.0, 1)
    rule.due(None, 0.3)
    assert rule.average_kl == pytest.approx(0.3)  # of before the renewal nothing is left


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_was_not_measured_does_not_stick(bad):
    rule = renewal("kl", smoothing=0.5)
    assert not rule.due(1, bad)
    assert rule.average_kl == 0.0
    assert not rule.due(2, 0.04)
    assert not rule.due(3, bad)
    assert rule.average_kl == pytest.approx(0.04)
    assert rule.due(4, 0.08)


def test_no_smoothing_is_the_last_kl():
    rule = renewal("kl", smoothing=0.0)
    assert [rule.due(None, kl) for kl in (0.1, 0.01, 0.06)] == [True, False, True]


def test_the_state_comes_back_in_its_bits():
    whole, again = renewal("kl", kl=0.2), renewal("kl", kl=0.2)
    for kl in (0.3, 0.1, 0.07):
        whole.due(None, kl, 2)
    whole.renewed()
    whole.due(None, 0.1, 2)
    again.load(whole.state())
    assert vars(again) | {"config": None} == vars(whole) | {"config": None}
    assert whole.state() == {"sum_kl": again.sum_kl, "weight": again.weight, "renewals": 1, "updates": 8}
    assert "updates" not in renewal("every").state()


def test_older_checkpoints():
    """Their average had no weight: it goes on as it was. A NaN in it is dropped."""
    rule = renewal("kl", smoothing=0.5)
    rule.load({"average_kl": 0.04, "renewals": 2})
    assert (rule.average_kl, rule.weight, rule.renewals, rule.updates) == (0.04, 1.0, 2, 0)
    rule.load({"average_kl": 0.0, "renewals": 3, "updates": 7})
    assert (rule.weight, rule.updates) == (0.0, 7)
    assert rule.due(None, 0.06)
    rule.load({"average_kl": math.nan, "renewals": 0})
    assert (rule.average_kl, rule.weight) == (0.0, 0.0)
    assert not rule.due(None, 0.04)


def test_settings_name_what_is_counted():
    assert ReferenceConfig().count == COUNTS[0] == "iterations"
