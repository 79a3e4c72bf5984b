"""TRL's GRPOTrainer with any method of rpg: ``from rpg.integrations.trl import RPGConfig, RPGTrainer``."""

from importlib.metadata import PackageNotFoundError

from ..versions import check_version

try:
    check_version("trl")
except PackageNotFoundError:
    raise ImportError("rpg.integrations.trl needs the package trl: pip install 'rpg-rl[trl]'") from None

from .config import RPGConfig
from .trainer import RPGTrainer

__all__ = ["RPGConfig", "RPGTrainer"]
