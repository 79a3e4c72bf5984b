"""A run where the system is another: no fcntl, no resource, no SIGHUP, none of the flags of Unix's open()."""

import json
import subprocess
import sys

from forked import ENV
from running import TINY

OTHERWISE = """
import os, signal, sys
import psutil  # of others: on Linux it takes resource
sys.modules |= dict.fromkeys(("fcntl", "resource"))  # None: an import fails
del signal.SIGHUP, os.O_DIRECTORY, os.O_NOFOLLOW
from rpg.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_without_what_only_unix_has(tmp_path):
    line = ["train", "--output", "mine", "--steps", "2", *TINY]
    run = [sys.executable, "-c", OTHERWISE, *line]
    done = subprocess.run(run, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][-1] == 2
    assert all("memory/peak_gb" not in row for row in rows)
    assert "2 steps in" in done.stdout
    assert (tmp_path / "mine" / "report.html").is_file()
