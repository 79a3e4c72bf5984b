"""Async reward functions: many calls at a time in one worker, against a real server; each with its own deadline."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rpg.rewards.scoring import Part, Scorer

REWARDS = '''
import asyncio, os, sys, time
from pathlib import Path

async def judge(response, answer, prompt):
    """Asks the server whose port is in the prompt."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(prompt))
    writer.write(f"GET /{response} HTTP/1.1\\r\\nHost: judge\\r\\n\\r\\n".encode())
    head, _, body = (await reader.read()).partition(b"\\r\\n\\r\\n")
    writer.close()
    return float(body)

async def mischief(response, answer, prompt):
    """What is in the response; a file in the folder, the prompt, counts its calls."""
    with open(Path(prompt, response), "a") as calls:
        calls.write("x")
    await asyncio.sleep(0.1)
    if response == "await": await asyncio.Event().wait()
    if response == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if response == "block": time.sleep(1000)
    if response == "loop":
        while True: pass
    if response == "subtask": await asyncio.wait_for(block(), 1000)
    if response == "die": os._exit(3)
    if response == "exit": sys.exit(3)
    if response == "interrupt": raise KeyboardInterrupt
    if response == "cancel": raise asyncio.CancelledError
    if response == "bomb":
        hoard = []
        while True: hoard.append(bytearray(10**7))
    if response == "nan": return float("nan")
    if response == "raise": raise ValueError("bad")
    await asyncio.sleep(0.1)
    return 1.0

async def block():
    await asyncio.sleep(0.01)
    time.sleep(1000)

async def busy(response, answer, prompt):
    time.sleep(0.02)
    return 1.0

async def in_threads(response, answer, prompt):
    await asyncio.to_thread(time.sleep, 0.2)
    return 1.0

async def dies_in_a_thread(response, answer, prompt):
    await asyncio.sleep(0.05)
    await asyncio.to_thread(leave if response == "die" else time.sleep, 0.3)
    return 1.0

def leave(seconds):
    time.sleep(seconds / 2)
    os._exit(3)

def runs_its_own(response, answer, prompt):
    async def later():
        await asyncio.sleep(0)
        return 0.5
    return asyncio.run(later())

class Judge:
    async def __call__(self, response, answer, prompt):
        await asyncio.sleep(0.2)
        return 1.0

async def pid(response, answer, prompt):
    await asyncio.sleep(0.01)
    return os.getpid()
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "judges.py"
    path.write_text(REWARDS)
    return path


class Server:
    """Answers 1 to /right and 0 to the rest after 0.2 s, and never to /hang."""

    def __init__(self):
        self.port, self.most, self._now = 0, 0, 0
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def _run(self, started):
        async def serve():
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=500)
            self.port = server.sockets[0].getsockname()[1]
            started.set()

        self._loop.run_until_complete(serve())
        self._loop.run_forever()

    async def _answer(self, reader, writer):
        self._now += 1
        self.most = max(self.most, self._now)
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        await asyncio.sleep(1000 if path == b"/hang" else 0.2)
        self._now -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + (b"1" if path == b"/right" else b"0"))
        writer.close()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.close()


def items(responses, prompt):
    return [(response, "42", str(prompt)) for response in responses]


def timed(scorer, calls):
    start = time.perf_counter()
    scores = scorer.score(calls)
    return scores, time.perf_counter() - start


def test_a_judge_over_http(rewards, server):
    with Scorer(f"{rewards}:judge", workers=2) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(["right", "wrong"] * 100, server.port))
        assert scores.values == [1.0, 0.0] * 100
        assert seconds < 200 * 0.2 / 4  # one after the other in two workers: 20 s
        assert 50 < server.most <= 128
        again, _ = timed(scorer, items(["wrong", "right"], server.port))
    assert again.values == [0.0, 1.0]


def test_a_request_that_hangs_costs_itself(rewards, server):
    responses = ["right"] * 50 + ["hang"] + ["right"] * 49
    with Scorer(f"{rewards}:judge", workers=1, timeout=1.0, on_error=-1.0) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(responses, server.port))
    assert scores.values == [1.0] * 50 + [-1.0] + [1.0] * 49
    assert scores.failures == {"raised": 0, "timed_out": 1, "not_finite": 0}
    assert scores.messages == ["no answer after 1 s"]
    assert scores.solved == [value == 1.0 for value in scores.values]
    assert seconds < 10


MISCHIEF = {
    "await": "no answer after 1 s",
    "stubborn": "no answer after 1 s",
    "block": "no answer after 1 s",
    "loop": "no answer after 1 s",
    "subtask": "no answer after 1 s",
    "die": "worker died: exit code 3",
    "exit": "SystemExit: 3 (judges.py:",
    "interrupt": "KeyboardInterrupt (judges.py:",
    "cancel": "CancelledError (judges.py:",
    "bomb": "MemoryError (judges.py:",
    "nan": "returned nan",
    "raise": "ValueError: bad (judges.py:",
}


@pytest.mark.parametrize("kind", MISCHIEF)
def test_mischief_among_many_costs_itself_and_is_not_tried_again(rewards, kind, tmp_path):
    responses = [f"a{i}" for i in range(20)] + [kind] + [f"b{i}" for i in range(20)]
    with Scorer(f"{rewards}:mischief", workers=1, timeout=1.0, on_error=-1.0, memory_gb=0.2) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(responses, tmp_path))
        assert scores.values == [1.0] * 20 + [-1.0] + [1.0] * 20
        assert sum(scores.failures.values()) == 1
        assert len(scores.messages) == 1
        assert scores.messages[0].startswith(MISCHIEF[kind])
        assert Path(tmp_path, kind).read_text() == "x"
        assert seconds < 15
        assert scorer.score(items(["c"], tmp_path)).values == [1.0]


def test_a_death_that_nobody_can_be_blamed_for(rewards):
    """In a thread: all that were on the way may have done it, and none is tried again. The next ones are served."""
    with Scorer(f"{rewards}:dies_in_a_thread", workers=1) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(["nap"] * 5 + ["die"] + ["nap"] * 5, ""))
        assert scores.failures["raised"] == 11
        assert scores.messages == ["worker died: exit code 3"]
        assert seconds < 10
        assert scorer.score(items(["nap"], "")).values == [1.0]


def test_the_clock_of_a_call_starts_with_it(rewards):
    with Scorer(f"{rewards}:busy", workers=1, timeout=0.5) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(["x"] * 64, ""))
    assert seconds > 64 * 0.02
    assert scores.failures["timed_out"] == 0


@pytest.mark.parametrize("name", ["in_threads", "Judge"])
def test_other_ways_to_wait(rewards, name):
    from rpg.rewards.importing import load_function

    reward = f"{rewards}:{name}" if name == "in_threads" else load_function(f"{rewards}:Judge")()
    with Scorer(reward, workers=1) as scorer:
        scorer.start()
        scores, seconds = timed(scorer, items(["x"] * 100, ""))
    assert scores.values == [1.0] * 100
    assert seconds < 100 * 0.2 / 10


def test_async_and_plain_functions_side_by_side(rewards, server):
    parts = [Part("judge", f"{rewards}:judge"), Part("own", f"{rewards}:runs_its_own", 2.0)]
    for workers in (1, 2):
        with Scorer(parts, workers=workers) as scorer:
            for _ in range(2):
                scores = scorer.score(items(["right", "wrong"] * 20, server.port))
                assert scores.parts == {"judge": [1.0, 0.0] * 20, "own": [0.5] * 40}
                assert scores.values == [2.0, 1.0] * 20
                assert not any(scores.failures.values())


def test_an_interrupted_call_leaves_no_answers_behind(rewards, server):
    import signal

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with Scorer(f"{rewards}:judge", workers=2) as scorer:
            scorer.start()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Stop):
                scorer.score(items(["right"] * 20 + ["hang"] * 20, server.port))
            assert scorer.score(items(["wrong", "right"] * 20, server.port)).values == [0.0, 1.0] * 20
    finally:
        signal.signal(signal.SIGALRM, before)


def test_long_texts_to_a_worker_that_is_busy(rewards, tmp_path):
    """More than a socket holds is on its way while the worker does not read: the deadline counts nevertheless."""
    with Scorer(f"{rewards}:mischief", workers=1, timeout=1.0) as scorer:
        scorer.start()
        calls = [("block", "", str(tmp_path)), *[("x", "y" * 300_000, str(tmp_path))] * 10]
        scores, seconds = timed(scorer, calls)
    assert scores.failures["timed_out"] == 1
    assert scores.values == [0.0] + [1.0] * 10
    assert seconds < 15


def test_both_workers_are_used(rewards):
    with Scorer(f"{rewards}:pid", workers=2) as scorer:
        scorer.start()
        time.sleep(0.3)
        assert len(set(scorer.score(items(["x"] * 200, "")).values)) == 2
