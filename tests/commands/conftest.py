import pytest

from make_runs import make_run
from rpg import report


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    return report.read_run(make_run(tmp_path_factory.mktemp("one") / "latest"))
