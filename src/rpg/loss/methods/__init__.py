"""Every method: its row of the table, and below it the same loss in a few lines of plain torch.

A row is what runs; its plain form is there to be checked against the paper, and the tests hold that both have the same
gradient. A plain form takes logp, old, ref and a mask of ones and zeros, [B,T] each, and the advantage A, [B,1] or
[B,T]. Letters as in the papers: w = π/old (r where a paper calls it that), u = π/ref, v = ref/old, sg = stop-gradient,
c = d loss / d log π of one token. ``rpg algorithms NAME`` prints both.
"""

from ..registry import Algorithm, Method, algorithm, algorithms
from . import baselines, policy_gradients, rpg_paper, weights  # noqa: F401  they register themselves

__all__ = ["Algorithm", "Method", "algorithm", "algorithms"]
