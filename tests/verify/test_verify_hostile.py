"""No answer makes verify raise, wait or die, from any process or thread."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rpg.rewards import worker
from rpg.rewards.scoring import Scores
from rpg.tasks import Scorer, verify
from rpg.verify.judge import SECONDS, compared, judged, verdict
from rpg.verify.mathematics import refusal

SPEC = importlib.util.spec_from_file_location("bench", Path(__file__).parents[2] / "benchmarks" / "verification.py")
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)

EQUAL = ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")  # needs sympy
SLOW = "\\sin(e^{e^{25}})"  # needs billions of digits of a number


@pytest.fixture(autouse=True)
def no_cache():
    judged.cache_clear()


def test_fuzzed_answers():
    assert verify(*EQUAL)  # the worker is up
    start = time.monotonic()
    for response, truth in bench.fuzzed(1, 1500):
        begun = time.monotonic()
        assert verify(response, truth) in (True, False)
        assert time.monotonic() - begun < 8, (response, truth)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("answer", bench.HOSTILE, ids=lambda text: ascii(text[:30]))
def test_hostile_answers(answer):
    start = time.monotonic()
    assert not verify(f"\\boxed{{{answer}}}", "\\sqrt{2}")
    assert time.monotonic() - start < 8
    assert verify(*EQUAL)


def test_the_reason_says_that_it_gave_up():
    assert verdict(f"\\boxed{{{SLOW}}}", "\\sqrt{2}") == (False, f"gave up after {SECONDS:g} s")
    assert verdict(*EQUAL) == (True, "equal, worked out")


def test_what_was_given_up_is_not_remembered(monkeypatch):
    module = sys.modules["rpg.verify.judge"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ask", lambda *_: module.LATE)
        found = verdict(*EQUAL)
        assert found.gave_up
        assert not found.right
    assert verdict(*EQUAL) == (True, "equal, worked out")
    assert not verdict(*EQUAL).gave_up


@pytest.mark.parametrize(
    ("deaths", "reason"), [(1, "equal, worked out"), (2, "gave up as the worker died twice (worker died: SIGKILL)")]
)
def test_after_the_death_of_a_worker_another_is_asked_once(monkeypatch, deaths, reason):
    module = sys.modules["rpg.verify.judge"]
    assert verify(*EQUAL)
    judged.cache_clear()
    score, calls = module._scorer.score, []

    def dying(items):
        calls.append(items)
        if len(calls) > deaths:
            return score(items)
        return Scores([module.LATE], {"raised": 1}, ["worker died: SIGKILL"], [False])

    with monkeypatch.context() as patch:
        patch.setattr(module._scorer, "score", dying)
        assert verdict(*EQUAL).reason == reason
    assert len(calls) == 2
    assert verdict(*EQUAL) == (True, "equal, worked out")  # no death is remembered


def test_in_an_exit_handler_that_runs_after_the_workers_end():
    code = """
        import atexit
        truths = "2\\\\sqrt{2}", "\\\\sqrt{2}", "\\\\sqrt{8}"
        atexit.register(lambda: print([verify("\\\\boxed{\\\\sqrt{8}}", truth) for truth in truths]))
        from rpg.tasks import verify
        assert verify("\\\\boxed{\\\\sqrt{18}}", "3\\\\sqrt{2}")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "[True, False, True]"), done.stderr


def test_inside_a_worker_a_slow_answer_costs_itself():
    with Scorer(reward, workers=1, timeout=30.0) as scorer:
        scores = scorer.score([(*EQUAL, ""), (f"\\boxed{{{SLOW}}}", "\\sqrt{2}", ""), (*EQUAL, "")])
    assert scores.values == [1.0, 0.0, 1.0]
    assert sum(scores.failures.values()) == 0


def reward(response, answer, prompt):
    return float(verify(response, answer))


def test_the_alarm_leaves_others_alone(monkeypatch):
    monkeypatch.setattr(worker, "inside_worker", True)
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60)
        assert compared("\\sqrt{8}", "2\\sqrt{2}") == 1.0
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 30 < left < 60
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.2)
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_no_worker_to_be_had(monkeypatch):
    def refuse(*_):
        raise OSError("no more processes")

    module = sys.modules["rpg.verify.judge"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ask", refuse)
        with pytest.warns(RuntimeWarning, match="no more processes"):
            found = verdict(*EQUAL)
    assert found == (False, "could not be worked out: OSError: no more processes")
    assert verify(*EQUAL)  # not remembered


def test_from_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(verify(*EQUAL))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    assert verify(*EQUAL)
    judged.cache_clear()
    child = os.fork()
    if child == 0:
        os._exit(0 if verify(*EQUAL) and not verify("\\boxed{\\sqrt{9}x}", "2\\sqrt{2}x") else 1)
    assert os.waitpid(child, 0)[1] == 0
    judged.cache_clear()
    assert verify(*EQUAL)


def test_sympy_is_imported_only_where_it_is_needed_and_nothing_is_left_behind():
    code = """
        import subprocess, sys, time
        from rpg.tasks import verify
        assert verify("\\\\boxed{1,234}", "1234")
        assert verify("\\\\boxed{(1, 0.5]}", "(1,\\\\frac12]")
        assert "sympy" not in sys.modules
        module = sys.modules["rpg.verify.judge"]
        assert module._scorer is None
        assert verify("\\\\boxed{\\\\sqrt{8}}", "2\\\\sqrt{2}")
        assert "sympy" not in sys.modules and "torch" not in sys.modules
        print(module._scorer._workers[0]._process.pid)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("x^{9999}", False),
        ("x^{99999}", True),
        ("9^{9^9}", True),
        ("9^9^9", True),
        ("e^{x^2}", False),
        ("10^{10!}", True),
        ("99999!", True),
        ("n!", False),
        ("\\sum_{k=1}^n k", True),
        ("\\frac{" * 14 + "1" + "}{2}" * 14, True),
        ("x+" * 300, True),
        ("1" * 61 + "x", True),
    ],
)
def test_what_is_hopeless_is_not_parsed(answer, refused):
    assert (refusal(answer) is not None) == refused
