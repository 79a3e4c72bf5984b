"""Fixtures that run `rpg …` in processes of its own: see running.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from running import TINY, Job, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One command at a time: wait() for it before the next."""
    server = Server(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture
def command(server: Server) -> Callable[..., Job]:
    """Run ``rpg …`` to its end."""
    return lambda *argv, **options: server.start(*argv, **options).wait()


@pytest.fixture
def train(server: Server) -> Callable[..., Job]:
    """Run ``rpg train --output FOLDER …`` with tiny settings to its end."""
    return lambda folder, *argv, **options: server.start("train", "--output", folder, *TINY, *argv, **options).wait()
