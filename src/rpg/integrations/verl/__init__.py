"""Every preset inside verl. verl loads ``plugin`` itself: name a preset in ``policy_loss.loss_mode`` (docs/verl.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...loss.methods import Algorithm
from .settings import Settings, settings

if TYPE_CHECKING:
    from .hook import LossFn

__all__ = ["Settings", "loss_fn", "settings"]


def loss_fn(algorithm: str | Algorithm, **options: object) -> LossFn:
    """``fn(config, model_output, data, dp_group=None)`` for the ``set_loss_fn`` of a worker that you drive yourself.

    options: as in ``policy_loss.rpg``: of the preset (``beta=1e-3``), and ``reference={"update": "frozen"}``; renewing
    the reference is then your loop's.
    Give it the actor's config first: ``worker.set_loss_fn(partial(loss_fn("grpo"), config=actor_config))``.
    """
    from .hook import LossFn

    chosen = settings(algorithm, options)
    if chosen.reference.update in ("every", "kl"):
        raise ValueError(
            f"loss_fn(reference.update={chosen.reference.update}): only verl's own trainer has its reference renewed; "
            "give frozen, and renew the reference of your loop yourself"
        )
    return LossFn(chosen)
