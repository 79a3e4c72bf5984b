"""rpg: KL-regularised policy gradients for language models, exact off-policy, with an audit that proves it."""

from . import audit, mismatch
from . import clipping as clip
from .advantages import Advantage
from .algorithms import Algorithm, algorithm, algorithms
from .losses import LossOutput, PolicyLoss
from .objective import vocabulary_kl

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
    "mismatch",
    "vocabulary_kl",
]
