"""The time left: what it ignores, and what it follows."""

from __future__ import annotations

import pytest

from rpg.run.rows import StepTimer


def test_time_left_ignores_one_slow_step_and_counts_evaluations() -> None:
    timer = StepTimer(60)
    now = timer.last
    timer.step({"step": 0, "eval/a/mean@8": 0.1, "time/eval": 4.0}, now := now + 4)
    for step in range(1, 21):
        evaluated = {"eval/a/mean@8": 0.1, "time/eval": 4.0} if step % 10 == 0 else {}
        now += (60.0 if step == 3 else 1.0) + (4.0 if evaluated else 0.0)
        timer.step({"step": step, **evaluated}, now)
    assert timer.left(now) == pytest.approx(40 * 1.0 + 4 * 4.0)
    assert timer.left(now + 0.5) == pytest.approx(55.5)
    assert timer.left(now + 600) == pytest.approx(55.0)  # the step under way takes no time from the others
    assert StepTimer(5).left() is None


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_time_left_follows_a_machine_that_changes_its_speed(factor: float) -> None:
    timer = StepTimer(60)
    now = timer.last
    for step in range(41):
        slower = factor if step > 35 else 1.0
        evaluated = {"eval/a/mean@8": 0.1, "time/eval": 4.0 * slower} if step % 2 == 0 else {}
        timer.step({"step": step, **evaluated}, now := now + slower * (5.0 if evaluated else 1.0))
    assert timer.left(now) == pytest.approx(factor * (20 * 1.0 + 10 * 4.0))
