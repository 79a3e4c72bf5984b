"""Runs -> one page: ``write([read_run("runs/latest")], "report.html")``. Everything is embedded; nothing is loaded."""

from .document import page, write
from .runs import RunData, find_runs, read_run

__all__ = ["RunData", "find_runs", "page", "read_run", "write"]
