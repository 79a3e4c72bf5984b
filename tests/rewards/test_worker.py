"""What a call leaves behind in its worker: threads that never end, a clean-up that blocks, memory that is gone."""

import time

import pytest

from rpg.rewards.messages import NO_CALL, Kind
from rpg.rewards.scoring import Scorer
from rpg.rewards.worker_process import WorkerProcess, pack_setup

REWARDS = """
import asyncio, os, threading, time

def ask(response):
    if response == "hang": threading.Event().wait()
    time.sleep(0.05)
    return os.getpid() if response == "pid" else 1.0

async def judge(response, answer, prompt):
    return await asyncio.to_thread(ask, response)

async def impatient(response, answer, prompt):
    try:
        return await asyncio.wait_for(judge(response, answer, prompt), 1.0)
    except TimeoutError:
        return 0.0

async def forgetful(response, answer, prompt):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.3)
    await asyncio.sleep(0.01)
    return os.getpid()

async def cleans_up(response, answer, prompt):
    try:
        await asyncio.sleep(1000 if response in ("block", "die") else 0.3)
    finally:
        if response == "block": time.sleep(1000)
        if response == "die": os._exit(3)
    return 1.0

async def stubborn(response, answer, prompt):
    try:
        await asyncio.sleep(1000 if response == "stubborn" else 0.3)
    except asyncio.CancelledError:
        await asyncio.sleep(0.1)
        time.sleep(1000)
    return 1.0

def plain(response, answer, prompt):
    if response == "bomb": raise MemoryError
    return 1.0

async def later(response, answer, prompt):
    return plain(response, answer, prompt)
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "leaving.py"
    path.write_text(REWARDS)
    return path


def items(*responses):
    return [(response, "", "") for response in responses]


def nothing(**failures):
    return {"raised": 0, "timed_out": 0, "not_finite": 0} | failures


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_that_hang_cost_their_calls_and_not_the_worker(rewards):
    with Scorer(f"{rewards}:judge", workers=1, timeout=1.0) as scorer:
        before = scorer.score(items("pid")).values
        assert scorer.score(items("pid")).values == before
        assert scorer.score(items(*["hang"] * 64)).failures == nothing(timed_out=64)
        for _ in range(2):
            assert scorer.score(items(*["ok"] * 10)).values == [1.0] * 10
        assert scorer.score(items("pid")).values != before


def test_a_thread_that_hangs_costs_no_call_beside_it(rewards):
    responses = ["ok"] * 40 + ["hang"] + ["ok"] * 400 + ["hang"] * 30 + ["ok"] * 400
    with Scorer(f"{rewards}:judge", workers=1, timeout=2.0) as scorer:
        scores = scorer.score(items(*responses))
    assert scores.values == [float(response == "ok") for response in responses]
    assert scores.failures == nothing(timed_out=31)
    assert scores.messages == ["no answer after 2 s"]


def test_threads_that_the_function_itself_gave_up_on(rewards):
    with Scorer(f"{rewards}:impatient", workers=1, timeout=2.0) as scorer:
        assert scorer.score(items(*["hang"] * 64)).values == [0.0] * 64
        time.sleep(1.2)  # now they are at work for longer than a call may take
        scorer.score(items("ok"))  # finds no thread to run in
        assert scorer.score(items(*["ok"] * 10)).values == [1.0] * 10


def test_threads_that_end_by_themselves_are_left_alone(rewards):
    with Scorer(f"{rewards}:forgetful", workers=1, timeout=2.0) as scorer:
        assert len({value for _ in range(5) for value in scorer.score(items(*["x"] * 10)).values}) == 1


# ---- clean-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["block", "die"])
def test_the_clean_up_of_a_call_that_is_over_costs_no_other(rewards, kind):
    with Scorer(f"{rewards}:cleans_up", workers=1, timeout=1.0, on_error=-1.0) as scorer:
        scorer.start()
        scores = scorer.score(items(kind, *["ok"] * 400))
        assert scores.values == [-1.0] + [1.0] * 400
        assert scores.failures == nothing(timed_out=1)
        assert scorer.score(items("ok")).values == [1.0]


def test_what_an_earlier_call_left_behind_is_not_taken_for_a_later_one(rewards):
    with Scorer(f"{rewards}:stubborn", workers=1, timeout=1.0) as scorer:
        assert scorer.score(items("stubborn", "ok")).failures == nothing(timed_out=1)
        time.sleep(0.2)  # now it blocks as soon as the loop runs
        scores = scorer.score(items(*["ok"] * 5))
    assert (scores.values, scores.failures) == ([1.0] * 5, nothing())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "later"])
def test_a_worker_out_of_memory_ends_by_itself(rewards, name):
    """Without being told to: what comes next must not run where there is no memory."""
    worker = WorkerProcess(pack_setup([f"{rewards}:{name}"], 4.0, 5.0))
    worker.socket.setblocking(True)
    worker.socket.settimeout(20.0)
    try:
        replies = list(worker.receive())
        worker.send((0, 0, ("ok", "", "")), 5.0)
        while len(replies) < 2:
            replies += worker.receive()
        worker.send((1, 0, ("bomb", "", "")), 5.0)
        while len(replies) < 3:
            replies += worker.receive()
        replies += worker.receive()
    finally:
        code = worker.end()
    ends = [(NO_CALL, Kind.READY), (0, Kind.OK), (1, Kind.OUT_OF_MEMORY), (NO_CALL, Kind.DIED)]
    assert [(number, outcome[0]) for number, outcome in replies] == ends
    assert code == "exit code 0"
