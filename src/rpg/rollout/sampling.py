"""One token for each row of logits, from one uniform number for each: the inverse of the cumulative distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, prompt: Sequence[int], sample: int, count: int) -> np.ndarray:
    """The numbers in [0, 1) that decide the tokens of one response: of the seed, the prompt's tokens and the sample."""
    name = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
    entropy = (seed, int.from_bytes(name, "little"), sample)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(count)


def truncate(logits_BV: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """−inf outside the k most probable tokens, and outside the fewest tokens whose probabilities reach top_p."""
    if 0 < top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        p_BV = sorted_BV.softmax(-1)
        outside_BV = p_BV.cumsum(-1) - p_BV >= top_p  # what came before already reaches it
        logits_BV = logits_BV.masked_fill(outside_BV.scatter(-1, order_BV, outside_BV), -torch.inf)
    return logits_BV


def sample(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities in what they were drawn from: tempered, truncated and renormalised."""
    logits_BV = logits_BV.float()
    if temperature == 0:
        token_B = logits_BV.argmax(-1)
        return token_B, torch.zeros_like(token_B, dtype=torch.float32)
    if temperature != 1:
        logits_BV = logits_BV / temperature
    logp_BV = truncate(logits_BV, top_p, top_k).log_softmax(-1)
    cumulative_BV = logp_BV.double().exp_().cumsum(-1)
    threshold_B1 = (uniform_B.double() * cumulative_BV[:, -1]).unsqueeze(-1)
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    token_B1 = token_B1.clamp_(max=logp_BV.shape[-1] - 1)  # past the end only where logits are NaN; so is logp then
    return token_B1.squeeze(-1), logp_BV.gather(-1, token_B1).squeeze(-1)
