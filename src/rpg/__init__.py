"""rpg: KL-regularised policy gradients for language models, exact off-policy, with an audit that proves it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import audit, clip, gates, mismatch
    from .api import Run, evaluate, merge, sample, train
    from .loss.advantages import Advantage
    from .loss.methods import Algorithm, algorithm, algorithms
    from .loss.metrics import LossOutput
    from .loss.objective import logit_score_sq, vocabulary_kl
    from .loss.policy_loss import PolicyLoss

__version__ = "0.1.0"
__all__ = [
    "Advantage",
    "Algorithm",
    "LossOutput",
    "PolicyLoss",
    "Run",
    "algorithm",
    "algorithms",
    "audit",
    "clip",
    "evaluate",
    "gates",
    "logit_score_sq",
    "merge",
    "mismatch",
    "sample",
    "train",
    "vocabulary_kl",
]

# Loaded when first asked for: `rpg --help` and the processes that run reward functions do without torch.
_HOME = {
    "Advantage": "loss.advantages",
    "Algorithm": "loss.methods",
    "LossOutput": "loss.metrics",
    "PolicyLoss": "loss.policy_loss",
    "Run": "api",
    "algorithm": "loss.methods",
    "algorithms": "loss.methods",
    "audit": "audit",
    "clip": "clip",
    "evaluate": "api",
    "gates": "gates",
    "logit_score_sq": "loss.objective",
    "merge": "api",
    "mismatch": "mismatch",
    "sample": "api",
    "train": "api",
    "vocabulary_kl": "loss.objective",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] == "api" and (why := import_module(".console", __name__).more_than_core()):
        raise ImportError(f"rpg.{name} {why}")
    module = import_module(f".{_HOME[name]}", __name__)
    value: object = module if _HOME[name].split(".")[-1] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
