"""Puts this folder on the path, where tiny.py and other helpers are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from forked import ENV, Job, Server
from running import TINY

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs ``rpg …`` in processes of its own, one at a time: wait() for it before the next."""
    server = Server(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which runs are one's own is kept here, not at the home of whoever tests."""
    os.environ["XDG_STATE_HOME"] = ENV["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def command(server: Server) -> Callable[..., Job]:
    """Run ``rpg …`` to its end."""
    return lambda *argv, **options: server.start(*argv, **options).wait()


@pytest.fixture
def train(server: Server) -> Callable[..., Job]:
    """Run ``rpg train --output FOLDER …`` with tiny settings to its end."""
    return lambda folder, *argv, **options: server.start("train", "--output", folder, *TINY, *argv, **options).wait()


LONG = (  # each takes half a minute or more
    "tests/loss/test_mutations.py",
    "tests/integrations/test_trl_equivalence.py::test_two_processes",
    "tests/models/test_loading.py::test_from_the_hub_then_from_the_cache",
    "tests/bench/test_bench.py::test_both_sides",
    "tests/distributed/test_ranks_runs.py::test_torchrun_is_stopped_at_one_step",
    "tests/export/test_export_verl.py::test_verl_takes_them",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: at the end one core would wait for them."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
