"""The processes of rewards: functions that fork, daemons in sessions of their own, and that nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rpg.rewards.scoring import Scorer
from running import TINY

REWARDS = '''
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path

def daemon():
    """Forks twice, in a session of its own: its parent is gone, and nothing of it leads back here."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()

def score(response, answer, prompt):
    if prompt: Path(prompt, f"{os.getpid()}.begun").touch()
    kind, _, rest = response.partition(" ")
    if kind == "sleep": time.sleep(1000)
    if kind == "power": 9**9**9
    if kind == "loop":
        while True: pass
    if kind == "child": subprocess.run(["sleep", "1000"])
    if kind == "nap": time.sleep(float(rest))
    if kind == "pid": return os.getpid()
    if kind == "family":
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        daemon()
    if rest == "hang": time.sleep(1000)
    if rest == "die": os._exit(3)
    if rest == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if rest == "group": os.killpg(0, signal.SIGKILL)
    if rest == "zero": return 0.0
    return float(response == answer)

def family(response, answer, prompt):
    score("family", answer, os.environ["RPG_TEST_MARK"])
    return len(response) % 3

def fork(response):
    """The child comes back, too, and is first to."""
    if os.fork() == 0:
        if response == "raise": raise KeyError("child")
        if response == "exit": sys.exit(0)
        return -1.0
    time.sleep(0.05)
    return 1.0

def forks(response, answer, prompt):
    return fork(response)

async def forks_later(response, answer, prompt):
    await asyncio.sleep(0.001)
    return fork(response)

async def forks_in_thread(response, answer, prompt):
    return await asyncio.to_thread(fork, response)
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    while found := alive(tmp_path):  # of a test that has failed
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def start_program(rewards, folder, body):
    """A script in a session of its own; every process that descends from it carries the folder's name."""
    script = Path(folder, "script.py")
    head = f"""
        import os, signal, sys, time
        from rpg.rewards.scoring import Scorer
        REWARDS, FOLDER = {str(rewards)!r}, {str(folder)!r}
        def mine(response, answer, prompt):
            return float(response == answer)
        """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    pipe = subprocess.PIPE
    env = {**os.environ, "RPG_TEST_MARK": str(folder)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=env
    )


def alive(folder):
    """Processes with the folder's mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RPG_TEST_MARK={folder}\0".encode() in Path(process, "environ").read_bytes():
                found.append((process.name, Path(process, "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forks", "forks_later", "forks_in_thread"])
def test_a_fork_that_comes_back_does_not_answer(rewards, folder, monkeypatch, name):
    monkeypatch.setenv("RPG_TEST_MARK", str(folder))
    responses = ["return", "raise", "exit"] * 4
    with Scorer(f"{rewards}:{name}", workers=1) as scorer:
        for _ in range(2):
            scores = scorer.score([(response, "", "") for response in responses])
            assert (scores.values, scores.messages) == ([1.0] * len(responses), [])
        wait_for(lambda: len(alive(folder)) == 2, seconds=15)  # the worker and its guard: no fork waits for anything
    assert not alive(folder)


def test_an_answer_that_nobody_asked_for_is_ignored(tmp_path):
    """Whoever wrote it: the socket is open in every fork."""
    (tmp_path / "writes.py").write_text(
        textwrap.dedent("""
            import os, socket
            from rpg.rewards.messages import REPLY, Kind
            def score(response, answer, prompt):
                for fd in map(int, os.listdir("/proc/self/fd")):
                    try:
                        socket.socket(fileno=os.dup(fd)).send(REPLY.pack(77, Kind.OK, -1.0, 0))
                    except OSError:
                        pass
                return 1.0
            """)
    )
    with Scorer(f"{tmp_path}/writes.py:score", workers=1) as scorer:
        assert scorer.score([("", "", "")] * 3).values == [1.0] * 3


# ---- nothing stays behind --------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("end", ["close", "hang", "die", "crash", "group", "interrupt"])
def test_families_end_with_their_worker(rewards, folder, monkeypatch, end):
    """Children, children in sessions of their own and daemons: however the worker ends."""
    monkeypatch.setenv("RPG_TEST_MARK", str(folder))

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    responses = {"close": "family", "interrupt": "family hang"}
    item = (responses.get(end, f"family {end}"), "", str(folder))
    try:
        with Scorer(f"{rewards}:score", workers=1, timeout=500 if end == "interrupt" else 1.5) as scorer:
            scorer.start()
            if end == "interrupt":
                signal.setitimer(signal.ITIMER_REAL, 1.0)
                with pytest.raises(Stop):
                    scorer.score([item])
            else:
                scores = scorer.score([item] * 2)
                assert sum(scores.failures.values()) == (0 if end == "close" else 2)
            found = len(alive(folder))  # the worker, its guard and two families; or the next worker and its guard
            assert found == 8 if end == "close" else found <= 2
            assert len(list(folder.glob("*.begun"))) == (1 if end in ("close", "interrupt") else 2)  # it did begin
            if end not in ("close", "interrupt"):
                causes = {"hang": "no answer after 1.5 s", "die": "worker died: exit code 3"}
                causes |= {"crash": "worker died: SIGSEGV", "group": "worker died: SIGKILL"}
                assert scores.messages == [causes[end]]
        assert not alive(folder)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGKILL])
def test_a_run_leaves_no_process(rewards, folder, server, number):
    """``rpg train`` to its end, interrupted, killed."""
    job = server.start(
        *("train", "--output", folder / "run", *TINY, "--steps", "1" if number is None else "1000"),
        *("--task.reward", f"{rewards}:family"),
        RPG_TEST_MARK=str(folder),
    )
    if number is not None:
        assert job.until(lambda: len(list(folder.glob("*.begun"))) == 2 and len(alive(folder)) > 6, every=0.05)
        job.kill(number)
    assert job.wait().code == (0 if number is None else 130 if number == signal.SIGINT else -number)
    wait_for(lambda: not alive(folder), seconds=15)


def test_without_a_guard(rewards, folder, monkeypatch):
    """As on systems without subreapers: the worker's process group ends with it."""
    monkeypatch.setenv("RPG_TEST_MARK", str(folder))
    (folder / "sitecustomize.py").write_text("import sys; sys.platform = 'darwin'")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    with Scorer(f"{rewards}:score", workers=1, timeout=1.0) as scorer:
        assert scorer.score([("1", "1", str(folder))]).values == [1.0]
        assert len(alive(folder)) == 1
        assert scorer.score([("child", "", str(folder))]).failures["timed_out"] == 1
        assert not [line for _, line in alive(folder) if line.startswith(b"sleep\0")]
    assert not alive(folder)


# ---- the workers' life -----------------------------------------------------------------------------------------------


def test_a_worker_killed_between_calls_costs_nothing(rewards, folder):
    with Scorer(f"{rewards}:score", workers=1) as scorer:
        pid = int(scorer.score([("pid", "", str(folder))]).values[0])
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())  # its guard has seen it
        scores = scorer.score([("pid", "", str(folder)), ("1", "1", str(folder))])
    assert scores.failures == {"raised": 0, "timed_out": 0, "not_finite": 0}
    assert scores.values[0] != pid


@pytest.mark.parametrize("response", ["sleep", "power", "loop", "child", "42"])
def test_a_killed_parent_leaves_no_process(rewards, folder, response):
    body = f"""
        if __name__ == "__main__":
            scorer = Scorer(REWARDS + ":score", workers=2, timeout=500)
            scorer.score([({response!r}, "42", FOLDER)] * 2)
            time.sleep(1000)
        """
    program = start_program(rewards, folder, body)
    wait_for(lambda: len(list(folder.glob("*.begun"))) == 2 or (response == "42" and list(folder.glob("*.begun"))))
    time.sleep(0.2)
    assert len(alive(folder)) >= 3  # it sees what it looks for
    program.kill()
    assert program.communicate() == ("", "")
    wait_for(lambda: not alive(folder), seconds=15)


def test_a_killed_parent_whose_fork_lives_on(rewards, folder):
    """The fork holds copies of all pipes, so that none of them is seen to end."""
    body = """
        scorer = Scorer(REWARDS + ":score", workers=1, timeout=500)
        scorer.start()
        if os.fork() == 0:
            time.sleep(1000)
        scorer.score([("sleep", "42", FOLDER)])
        """
    program = start_program(rewards, folder, body)
    wait_for(lambda: list(folder.glob("*.begun")))
    program.kill()
    wait_for(lambda: not any(b"rpg.rewards.worker" in line for _, line in alive(folder)), seconds=15)
    os.killpg(program.pid, signal.SIGKILL)  # the fork
    program.communicate()


def test_a_timeout_takes_the_whole_family(rewards, folder):
    body = """
        with Scorer(REWARDS + ":score", workers=1, timeout=0.5) as scorer:
            print(scorer.score([("child", "42", FOLDER)]).failures["timed_out"], flush=True)
            time.sleep(1000)
        """
    program = start_program(rewards, folder, body)
    assert program.stdout.readline() == "1\n"
    wait_for(lambda: not [line for _, line in alive(folder) if line.startswith(b"sleep\0")], seconds=15)
    program.kill()
    program.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_does_not_reach_the_workers(rewards, folder, number):
    body = f"""
        seen = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: seen.append(number))
        with Scorer(REWARDS + ":score", workers=2) as scorer:
            scores = scorer.score([("nap 0.5", "nap 0.5", FOLDER)] * 4)
        print(scores.values, sum(scores.failures.values()), seen == [{int(number)}])
        """
    program = start_program(rewards, folder, body)
    wait_for(lambda: list(folder.glob("*.begun")))
    os.killpg(program.pid, number)
    assert program.communicate() == ("[1.0, 1.0, 1.0, 1.0] 0 True\n", "")
    assert not alive(folder)


def test_control_c_ends_all_with_one_traceback(rewards, folder):
    program = start_program(rewards, folder, """Scorer(REWARDS + ":score").score([("sleep", "42", FOLDER)] * 4)""")
    wait_for(lambda: len(list(folder.glob("*.begun"))) == 2)
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate()
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.endswith("KeyboardInterrupt\n")
    wait_for(lambda: not alive(folder), seconds=15)


def test_a_script_of_its_own(rewards, folder):
    """A reward in the main script; a fork's end that is not ours; an exit without close."""
    body = """
        if __name__ == "__main__":
            scorer = Scorer(mine, workers=1)
            print(scorer.score([("42", "42", ""), ("41", "42", "")]).values)
            scorer = Scorer(REWARDS + ":score", workers=1)
            before = scorer.score([("pid", "", "")]).values
            if (child := os.fork()) == 0:
                sys.exit()
            os.waitpid(child, 0)
            print(scorer.score([("pid", "", "")]).values == before)
        """
    program = start_program(rewards, folder, body)
    assert program.communicate() == ("[1.0, 0.0]\nTrue\n", "")
    wait_for(lambda: not alive(folder), seconds=15)


def test_a_script_without_a_guard_is_told_so(rewards, folder):
    program = start_program(rewards, folder, "Scorer(mine).score([('42', '42', '')])")
    out, err = program.communicate()
    assert out == ""
    assert "if __name__ == '__main__'" in err.splitlines()[-1]
    assert not alive(folder)
