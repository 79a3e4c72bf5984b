import pytest

from make_runs import make_many, make_run
from rpg import report


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    return report.read_run(make_run(tmp_path_factory.mktemp("one") / "latest"))


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    folders = make_many(tmp_path_factory.mktemp("many"), tasks=("arithmetic", "countdown"), seeds=3, steps=40)
    return [report.read_run(folder) for folder in folders]
