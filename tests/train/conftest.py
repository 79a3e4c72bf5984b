"""Fixtures that run `rpg …` in processes of its own: see forked.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import TINY, Job, Server


@pytest.fixture
def command(server: Server) -> Callable[..., Job]:
    """Run ``rpg …`` to its end."""
    return lambda *argv, **options: server.start(*argv, **options).wait()


@pytest.fixture
def train(server: Server) -> Callable[..., Job]:
    """Run ``rpg train --output FOLDER …`` with tiny settings to its end."""
    return lambda folder, *argv, **options: server.start("train", "--output", folder, *TINY, *argv, **options).wait()
