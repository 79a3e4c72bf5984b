"""rpg: KL-regularised policy gradients for language models, exact off-policy, with an audit that proves it."""

import sys
from importlib import import_module
from types import ModuleType
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
    globals()[name] = found
    return found


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Whoever imports the submodule rpg.algorithms must not put it in the place of the function rpg.algorithms."""
        if not (name == "algorithms" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
