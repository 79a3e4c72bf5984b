"""Fixtures of the tests of the native engine."""

import pytest

import tiny
from rollout.engines import engine


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def graphs(request):
    """Both ways of decoding; a CPU takes the steps of the second without capturing them."""
    engine.graphs = request.param


@pytest.fixture(scope="module")
def llama():
    return tiny.make("llama-tied")
