"""rpg: KL-regularised policy gradients for language models, exact off-policy, with an audit that proves it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import audit, mismatch
    from . import clipping as clip
    from .advantages import Advantage
    from .algorithms import Algorithm, algorithm, algorithms
    from .losses import LossOutput, PolicyLoss
    from .objective import logit_score_sq, vocabulary_kl

__version__ = "0.1.0"
__all__ = [
    "Advantage",
    "Algorithm",
    "LossOutput",
    "PolicyLoss",
    "algorithm",
    "algorithms",
    "audit",
    "clip",
    "logit_score_sq",
    "mismatch",
    "vocabulary_kl",
]

# Loaded when first asked for: `rpg --help` and the processes that run reward functions do without torch.
_MODULES = {"audit": "audit", "clip": "clipping", "mismatch": "mismatch"}
_HOMES = {
    "advantages": ("Advantage",),
    "algorithms": ("Algorithm", "algorithm", "algorithms"),
    "losses": ("LossOutput", "PolicyLoss"),
    "objective": ("logit_score_sq", "vocabulary_kl"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        found: object = import_module(f".{_MODULES[name]}", __name__)
    elif name in _HOME:
        found = getattr(import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # a submodule of the same name (algorithms) must not take its place
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
