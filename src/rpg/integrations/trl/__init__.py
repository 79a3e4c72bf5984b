"""TRL's GRPOTrainer with any method of rpg: ``from rpg.integrations.trl import RPGConfig, RPGTrainer``."""

from importlib.metadata import PackageNotFoundError

from ...console import install
from ..versions import check_version

try:
    check_version("trl")
except PackageNotFoundError:
    raise ImportError(f"rpg.integrations.trl needs the package trl: {install('rpg-rl[trl]')}") from None

from .config import RPGConfig
from .trainer import RPGTrainer

__all__ = ["RPGConfig", "RPGTrainer"]
