"""Log-probabilities and entropies from hidden states and the head."""

from .linear_logp import linear_logp

__all__ = ["linear_logp"]
