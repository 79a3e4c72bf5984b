"""One token for each row of logits, from one uniform number for each: the inverse of the cumulative distribution."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, prompt: Sequence[int], sample: int, count: int) -> Any:
    """The numbers in [0, 1) that decide the tokens of one response: of the seed, the prompt's tokens and the sample."""
    return _splitmix([_key(seed, np.asarray(prompt, dtype=np.int64).tobytes(), sample)], count)[0]


def uniform_table(seed: int, prompts: Sequence[Sequence[int]], n: int, count: int) -> Tensor:
    """[prompts·n, count] in float64. A prompt that comes again goes on with other numbers."""
    seen: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        name = np.asarray(prompt, dtype=np.int64).tobytes()
        keys += [_key(seed, name, seen[name] + j) for j in range(n)]
        seen[name] += n
    return torch.from_numpy(_splitmix(keys, count))


def _key(seed: int, prompt: bytes, sample: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d %d " % (seed, sample) + prompt, digest_size=8).digest(), "little")


def _splitmix(keys: Sequence[int], count: int) -> Any:
    """A stream for each key, [keys, count]: SplitMix64 (Steele, Lea and Flood 2014), the upper 53 bits."""
    step = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = np.array(keys, dtype=np.uint64)[:, None] + step
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def truncate(logits_BV: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """−inf outside the k most probable tokens, outside those that have min_p times the largest probability, and outside
    the fewest tokens whose probabilities reach top_p.

    Top-p looks at what top-k and min-p left, renormalised. Tokens tied with the last one kept are kept.
    """
    if 0 < top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if min_p > 0:
        smallest_B1 = logits_BV.amax(-1, keepdim=True) + math.log(min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if top_p < 1:
        sorted_BV = logits_BV.sort(dim=-1, descending=True).values
        p_BV = sorted_BV.double().softmax(-1)
        inside_BV = p_BV.cumsum(-1) - p_BV < top_p  # what came before does not reach it
        last_B1 = (inside_BV.sum(-1, keepdim=True) - 1).clamp_(min=0)  # none inside only where logits are NaN
        logits_BV = logits_BV.masked_fill(logits_BV < sorted_BV.gather(-1, last_B1), -torch.inf)
    return logits_BV


def sample(
    logits_BV: Tensor,
    uniform_B: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities in what they were drawn from: tempered, truncated and renormalised."""
    if temperature == 0:
        token_B = logits_BV.float().argmax(-1)
        return token_B, torch.zeros_like(token_B, dtype=torch.float32)
    token_B, logp_B, _ = sample_kept(logits_BV, uniform_B, temperature, top_p, top_k, min_p)
    return token_B, logp_B


def sample_kept(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float, top_k: int, min_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``sample``, and which tokens could have been drawn, [B,V]; temperature is above 0."""
    logits_BV = logits_BV.float()
    if temperature != 1:
        logits_BV = logits_BV / temperature
    logp_BV = truncate(logits_BV, top_p, top_k, min_p).log_softmax(-1)
    cumulative_BV = logp_BV.double().exp_().cumsum(-1)
    threshold_B1 = (uniform_B.double() * cumulative_BV[:, -1]).unsqueeze(-1)
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    token_B1 = token_B1.clamp_(max=logp_BV.shape[-1] - 1)  # past the end only where logits are NaN; so is logp then
    return token_B1.squeeze(-1), logp_BV.gather(-1, token_B1).squeeze(-1), logp_BV > -torch.inf
