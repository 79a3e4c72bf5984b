"""The exact loss of E[R] − β·KL(π‖ref), to copy into a trainer, and to audit:

rpg audit examples/exact_loss.py:loss --divergence rkl --seeds 40 --strict
"""

from torch import Tensor


def loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    w = (logp - old_logp).exp()  # log-probabilities and mask are [responses, tokens], advantages [responses]
    per_token = -w * advantages[:, None] + beta * w * (logp - ref_logp).detach()
    return (per_token * mask).sum() / mask.sum()  # the sum over the whole optimiser step, never a micro-batch's
