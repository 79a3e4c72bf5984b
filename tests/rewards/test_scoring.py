"""Reward functions that raise, hang, crash, eat memory and print, in real processes; and nothing stays behind."""

import functools
import os
import signal
import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest

from rpg.rewards.importing import load_function
from rpg.rewards.scoring import Scorer

REWARDS = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
VALUES = {"nan": float("nan"), "inf": float("inf"), "none": None, "str": "1", "bytes": b"1", "list": [1], "dict": {}}
VALUES |= {"complex": 1j, "huge": 10**400, "true": True, "int": 3}
def score(response, answer, prompt):
    kind, _, rest = response.partition(" ")
    if kind == "raise": raise ValueError("bad\\nthing")
    if kind == "exit": sys.exit(3)
    if kind == "interrupt": raise KeyboardInterrupt
    if kind == "sleep": time.sleep(1000)
    if kind == "power": 9**9**9
    if kind == "loop":
        while True: pass
    if kind == "die": os._exit(3)
    if kind == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "bomb":
        hoard = []
        while True: hoard.append(bytearray(10**7))
    if kind == "big": return len(bytearray(10**8)) / 10**8
    if kind == "child": subprocess.run(["sleep", "1000"])
    if kind == "print":
        print(response * 100_000, flush=True); print("\\ud800"); print("x", file=sys.stderr)
        os.write(1, b"x" * 1000); os.write(2, b"x"); os.system("echo x; echo x >&2"); sys.stdout.close()
    if kind == "read": return float(sys.stdin.read() == "")
    if kind == "nap": time.sleep(float(rest))
    if kind == "pid": return os.getpid()
    if kind == "torch": return "torch" in sys.modules
    if kind == "value": return VALUES[rest]
    return float(response == answer)

async def later(response, answer, prompt):
    await asyncio.sleep(0.001)
    return score(response, answer, prompt)

class Marker:
    def __call__(self, response, answer, prompt):
        return 0.25

def make():
    return score
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def items(*responses):
    return [(response, "42", "What is 6 × 7?") for response in responses]


def equal(response, answer, prompt):
    return response == answer


def above(response, answer, prompt, *, least):
    return float(len(response) >= least)


def nothing(**failures):
    return {"raised": 0, "timed_out": 0, "not_finite": 0} | failures


# ---- a failure costs its own item ------------------------------------------------------------------------------------

BAD = """raise;exit;interrupt;sleep;power;loop;die;segfault;bomb;child;value nan;value inf;value none;value str
value bytes;value list;value complex;value dict;value huge""".replace("\n", ";").split(";")


def test_every_failure_costs_its_own_item_whatever_the_number_of_workers(rewards):
    responses = [r for bad in BAD for r in (bad, "42", "41")] + ["value true", "value int"]
    results = []
    for workers in (2, 5):
        with Scorer(f"{rewards}:score", workers=workers, timeout=1.5, memory_gb=0.2, on_error=-1.0) as scorer:
            scorer.start()
            results.append(scorer.score(items(*responses)))
            assert scorer.score(items("42", "41")).values == [1.0, 0.0]
    scores = results[0]
    assert scores.values == [-1.0, 1.0, 0.0] * len(BAD) + [1.0, 3.0]
    assert scores.failures == {"raised": 6, "timed_out": 4, "not_finite": 9}
    assert scores.messages == [
        "ValueError: bad thing (my_rewards.py:8)",
        "SystemExit: 3 (my_rewards.py:9)",
        "KeyboardInterrupt (my_rewards.py:10)",
        "no answer after 1.5 s",
        "worker died: exit code 3",
    ]
    assert results[1] == scores


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("segfault", "worker died: SIGSEGV"),
        ("bomb", "MemoryError (my_rewards.py:19)"),
        ("value nan", "returned nan, not a finite number"),
        ("value none", "returned NoneType, not a finite number"),
        ("value str", "returned str, not a finite number"),
        ("value huge", "returned int, not a finite number"),
    ],
)
def test_messages(rewards, response, message):
    with Scorer(f"{rewards}:score", workers=1, memory_gb=0.2) as scorer:
        scores = scorer.score(items(response, response))
    assert scores.messages == [message]
    assert sum(scores.failures.values()) == 2


def test_a_large_allocation_within_the_limit(rewards):
    with Scorer(f"{rewards}:score", workers=1, memory_gb=0.5) as scorer:
        assert scorer.score(items("big")).values == [1.0]


def test_what_it_prints_and_reads_goes_nowhere(rewards, capfd):
    with Scorer(f"{rewards}:score", workers=1) as scorer:
        scores = scorer.score(items("print", "42", "print", "read", "42"))
    assert scores.values == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert scores.failures == nothing(raised=1)  # the second print: to a stdout that the first has closed
    assert capfd.readouterr() == ("", "")


def test_texts_arrive_as_they_are():
    texts = ["", "\0", "\ud800", "é\u2028\r\n", "x" * 5_000_000, "</s>🙂"]
    with Scorer(equal, workers=2) as scorer:
        assert scorer.score([(text, text, text) for text in texts]).values == [1.0] * len(texts)
        assert scorer.score([(text, text + "!", text) for text in texts]).values == [0.0] * len(texts)
        assert scorer.score([]).values == []


def test_throughput(rewards):
    with Scorer(f"{rewards}:score", workers=2) as scorer:
        scorer.start()
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            assert scorer.score(items("42", "41") * 1500).values == [1.0, 0.0] * 1500
            seconds.append(time.perf_counter() - start)
    assert 3000 / min(seconds) > 4000


# ---- which functions -------------------------------------------------------------------------------------------------


def test_kinds_of_functions(rewards, monkeypatch):
    marker = load_function(f"{rewards}:Marker")()
    from_file = load_function(f"{rewards}:make")()
    for reward, expected in (
        (f"{rewards}:later", [1.0, 0.0]),
        (from_file, [1.0, 0.0]),
        (marker, [0.25, 0.25]),
        (equal, [1.0, 0.0]),
        (functools.partial(above, least=3), [0.0, 1.0]),
        ("builtins:max", [0.0, 0.0]),  # does not say how it is called
    ):
        for trusted in (False, True):
            with Scorer(reward, trusted=trusted, workers=1) as scorer:
                scores = scorer.score(items("42", "wrong"))
                assert scores.values == expected, (reward, trusted)
                assert scores.failures == nothing(not_finite=2 if reward == "builtins:max" else 0)
    monkeypatch.chdir(rewards.parent)
    with Scorer("my_rewards:score", workers=1) as by_module, Scorer("my_rewards.py:score", workers=1) as by_file:
        monkeypatch.chdir("/")
        assert by_file.score(items("42")).values == [1.0]
        monkeypatch.chdir(rewards.parent)
        assert by_module.score(items("42")).values == [1.0]


def test_trusted(rewards):
    import numpy as np
    import torch  # here, for the workers import this file

    returned = [True, 3, np.float32(0.5), np.array(0.5), np.True_, torch.tensor(0.5), Fraction(1, 4), Decimal("0.25")]
    refused = [
        None,
        "1",
        float("nan"),
        float("-inf"),
        torch.tensor([1.0, 2.0]),
        np.zeros(2),
        torch.tensor(float("nan")),
    ]

    def pick(response, answer, prompt):
        if response == "raise":
            raise RuntimeError("no")
        if response == "memory":
            raise MemoryError
        return (returned + refused)[int(response)]

    responses = [str(i) for i in range(len(returned + refused))]
    with Scorer(pick, trusted=True, on_error=-2) as scorer:
        scores = scorer.score(items(*responses, "raise", "memory"))
    assert scores.values == [1.0, 3.0, 0.5, 0.5, 1.0, 0.5, 0.25, 0.25] + [-2] * (len(refused) + 2)
    assert scores.failures == nothing(raised=2, not_finite=len(refused))

    with Scorer(load_function(f"{rewards}:score"), trusted=True) as scorer, pytest.raises(KeyboardInterrupt):
        scorer.score(items("interrupt"))


def test_workers_do_not_import_torch(rewards):
    with Scorer(f"{rewards}:score", workers=1) as scorer:
        assert scorer.score(items("torch")).values == [0.0]


# ---- mistakes are one line -------------------------------------------------------------------------------------------


def refuse(words, make, kind=ValueError):
    with pytest.raises(kind) as error:
        make()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    for word in words.split("|"):
        assert word in str(error.value)


def test_functions_that_cannot_be_had(rewards, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\n\ndef f():\n    raise KeyError('two\\nlines')\n\nf()\n")
    syntax = tmp_path / "syntax.py"
    syntax.write_text("\n\ndef f(:\n")
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "value.py").write_text("score = 3")
    for words, spec in (
        (f"cannot import {broken}|KeyError|(line 4)", f"{broken}:f"),
        (f"cannot import {syntax}|SyntaxError|(line 3)", f"{syntax}:f"),
        ("SystemExit: bye|(line 2)", f"{leaves}:f"),
        ("has no function 'scor'|did you mean 'score'?", f"{rewards}:scor"),
        ("has no function 'zzz'", f"{rewards}:zzz"),
        ("is no function but int", f"{tmp_path}/value.py:score"),
        ("ModuleNotFoundError|no_such_module", "no_such_module:f"),
        ("has no function 'jion'|did you mean 'join'?", "posixpath:jion"),
    ):
        refuse(words, lambda: load_function(spec))
        refuse(words, lambda: Scorer(spec, trusted=True))
        with Scorer(spec, workers=2) as scorer:
            refuse(words, scorer.start)
            refuse(words, lambda: scorer.score(items("42")))
    for words, spec in (
        ("no such file: |nowhere.py", f"{tmp_path}/nowhere.py:f"),
        ("no such file: |did you mean|my_rewards.py", f"{rewards.parent}/my_reward.py:f"),
        ("names no function|file.py:name", "my_rewards.py"),
        ("names no function", "my_rewards.py:"),
        ("names no function", ":f"),
        ("names no function", ""),
    ):
        refuse(words, lambda: load_function(spec))
        refuse(words, lambda: Scorer(spec))  # before any work is done


def test_arguments():
    refuse("<lambda>' cannot be sent|file.py:name", lambda: Scorer(lambda r, a, p: 1.0))
    refuse("reward|int", lambda: Scorer(3))
    for name, value in (
        ("workers", 0),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("memory_gb", -1),
        ("on_error", float("nan")),
    ):
        refuse(name, lambda: Scorer(equal, **{name: value}))
    scorer = Scorer(equal)
    scorer.close()
    scorer.close()
    refuse("closed", lambda: scorer.score(items("42")))


def test_a_worker_that_never_gets_ready(tmp_path):
    (tmp_path / "leaves.py").write_text("import os\nos._exit(7)\n")
    with Scorer(f"{tmp_path}/leaves.py:f", workers=2) as scorer:
        refuse("died before they were ready|exit code 7", scorer.start, RuntimeError)


# ---- the workers' life -----------------------------------------------------------------------------------------------


def test_an_interrupted_call_leaves_no_answers_behind(rewards):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with Scorer(f"{rewards}:score", workers=2) as scorer:
            scorer.start()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Stop):
                scorer.score(items("42", "42", *["nap 0.5"] * 9))
            assert scorer.score(items("41", "42", "41")).values == [0.0, 1.0, 0.0]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_threads_and_descriptors(rewards):
    before = len(os.listdir("/proc/self/fd"))
    scorer = Scorer(f"{rewards}:score", workers=2)
    found = []
    for _ in range(2):
        threads = [threading.Thread(target=lambda: found.append(scorer.score(items("42", "die")))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [scores.values for scores in found] == [[1.0, 0.0]] * 6
    scorer.close()
    assert len(os.listdir("/proc/self/fd")) == before
