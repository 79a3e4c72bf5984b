"""rpg: KL-regularised policy gradients for language models, exact off-policy, with an audit that proves it."""

import sys

from . import audit, mismatch
from . import clipping as clip
from .advantages import Advantage
from .algorithms import Algorithm, algorithm, algorithms
from .losses import LossOutput, PolicyLoss
from .objective import logit_score_sq, vocabulary_kl

sys.modules[f"{__name__}.clip"] = clip  # so that `from rpg.clip import Box` works too

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
