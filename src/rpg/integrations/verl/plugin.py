"""What verl imports by itself (entry-point group verl.plugins): on import, every preset becomes verl's to name.

verl swallows what an import of a plugin raises. So this says in the log that it was loaded, or why not.
"""

from __future__ import annotations

import logging

from ..versions import check_version

logger = logging.getLogger("rpg.integrations.verl")
logger.setLevel(logging.INFO)  # verl's root logger is at WARNING, its handler is not


def register() -> str:
    """Everything there is, into verl. Gives the line for the log."""
    installed = check_version("verl")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    from ... import __version__
    from . import hook
    from .advantages import estimator, estimators
    from .losses import GIVEN, policy_loss
    from .settings import PREFIX, names

    taken = set(POLICY_LOSS_REGISTRY) - hook.OURS
    for loss_mode, preset in names().items():
        if loss_mode not in taken:
            POLICY_LOSS_REGISTRY[loss_mode] = policy_loss(preset)
            hook.OURS.add(loss_mode)
    POLICY_LOSS_REGISTRY[GIVEN] = policy_loss(GIVEN)
    for name, rule in estimators().items():
        ADV_ESTIMATOR_REGISTRY[PREFIX + name] = estimator(rule)
    hook.install()
    count = len(names()) // 2
    return f"rpg {__version__} is loaded into verl {installed}: {count} presets as policy losses and advantages"


try:
    logger.info(register())
except Exception as error:
    logger.error("rpg is NOT loaded into verl: %s", error)
    raise
