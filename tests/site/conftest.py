"""The site, built once for all tests here, whichever process runs them."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def python():
    """The interpreter that has the generator."""
    path = Path(os.environ.get("RPG_DOCS_PYTHON", ROOT / ".venv-docs" / "bin" / "python"))
    if not path.exists():
        pytest.skip("no interpreter with the site's generator: make docs, or set RPG_DOCS_PYTHON")
    return path


@pytest.fixture(scope="session")
def site(python, tmp_path_factory):
    """Folder of the built site."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said").exists():
            done = subprocess.run(
                [python, ROOT / "scripts" / "site" / "build.py", folder], capture_output=True, text=True, timeout=180
            )
            (folder / "said").write_text(f"{done.returncode}\n{done.stdout}{done.stderr}", encoding="utf-8")
    return folder / "html"
