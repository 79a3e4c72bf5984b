"""Which versions of an engine these integrations were tested with; another is refused by name."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version

from ..console import install

TESTED = {"trl": ("1.16", "1.17"), "verl": ("0.9.1", "0.10")}  # from, below
ANYWAY = "RPG_UNTESTED_VERSIONS"


def check_version(package: str) -> str:
    """The version installed. Outside the tested range: ImportError, or a warning where RPG_UNTESTED_VERSIONS=1."""
    installed, (least, below) = version(package), TESTED[package]
    if not _number(least) <= _number(installed) < _number(below):
        text = (
            f"{package} {installed} is installed; rpg.integrations.{package} was tested with {package} "
            f">={least},<{below}: {install(f'{package}>={least},<{below}')}, or set {ANYWAY}=1 to go on with this one"
        )
        if os.environ.get(ANYWAY) != "1":
            raise ImportError(text)
        warnings.warn(text, stacklevel=2)
    return installed


def _number(text: str) -> tuple[int, ...]:
    """1.16.0rc1 -> (1, 16, 0): what comes before a release counts as the release."""
    from packaging.version import Version

    return Version(text).release
