"""Log-probabilities, entropies and exact KL from hidden states and the head, without the logits."""

from .logp import head_logits, linear_logp, linear_logp_kl

__all__ = ["head_logits", "linear_logp", "linear_logp_kl"]
