"""What the trainer asks of an engine, and what engines have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kept import KeptIds, KeptStore


@dataclass(frozen=True)
class Sampling:
    """The distribution responses are drawn from. temperature 0 takes the most probable token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    kept: bool = False  # with truncated sampling: say which tokens could be drawn

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0; got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1]; got {self.min_p}")

    @property
    def whole(self) -> bool:
        """Whether every token can be drawn, so that the sampler's log-probabilities are those of the tempered model."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0 and self.temperature > 0

    @property
    def gives_kept(self) -> bool:
        return self.kept and not self.whole and self.temperature > 0

    @property
    def how(self) -> tuple[float, float, int, float]:
        """As sample() takes them."""
        return self.temperature, self.top_p, self.top_k, self.min_p


class NotFinite(ValueError):
    """The model gives no probabilities to sample from."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite: its weights, or a number on the way, overflowed")


@dataclass(frozen=True)
class Rollout:
    """A sampled response: its tokens (the end token among them) and the log-probability each was drawn with."""

    tokens: list[int]
    logp: list[float]
    finished: bool  # ended by an end token, not by the limit
    kept: KeptIds | None = None  # what each could be drawn from, where sampling was truncated and this was asked for
    versions: list[int] | None = None  # of the weights that drew each token, where they may differ


def nothing_to_sample(prompts: Sequence[Sequence[int]], n: int) -> bool:
    if prompts and n > 0 and not all(prompts):
        raise ValueError("a prompt is empty: it needs at least one token")
    return not prompts or n < 1


def in_groups(rollouts: list[Rollout], n: int) -> list[list[Rollout]]:
    """Of each prompt its n."""
    return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]


def read_rollouts(
    tokens: Tensor, logp: Tensor, length: Tensor, ended: Tensor, n: int, store: KeptStore | None = None
) -> list[list[Rollout]]:
    """From tensors over requests, [R,T] and [R]; what lies beyond a response's length does not count."""
    lengths, logp = length.tolist(), logp.cpu()
    live = torch.arange(logp.shape[1]) < torch.tensor(lengths)[:, None]
    if not bool(logp[live].isfinite().all()):
        raise NotFinite
    kept = [None] * len(lengths) if store is None else store.read(lengths)
    rows = zip(tokens.cpu().numpy(), logp.numpy(), lengths, ended.bool().tolist(), kept, strict=True)
    return in_groups(
        [Rollout(row[:size].tolist(), numbers[:size].tolist(), end, sets) for row, numbers, size, end, sets in rows], n
    )


class Engine(Protocol):
    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        kept: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """For each prompt n responses. Sample j of a prompt depends on the seed, its tokens and j, on nothing else.

        ``kept``: with top_p, top_k or min_p, say of each token which others could have been drawn in its place.
        ``progress`` is told how many responses are done.
        """
        ...

    def expect(self, longest_prompt: int) -> None:
        """Prompts of up to so many tokens will come: make room for them at once."""
        ...

    def sync(self) -> None:
        """The policy's weights have changed: sample from the new ones from here on."""
        ...

    def release(self) -> None:
        """Give back what memory is held between two calls."""
        ...
