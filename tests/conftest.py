"""Puts this folder on the path, where tiny.py and other helpers are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forked import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs ``rpg …`` in processes of its own, one at a time: wait() for it before the next."""
    server = Server(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mutation tests first: each takes a minute, and at the end one core would wait for them."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_mutations.py"))
