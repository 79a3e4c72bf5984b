"""What the trainer asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """The distribution responses are drawn from. temperature 0 takes the most probable token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0; got {self.top_k}")

    @property
    def whole(self) -> bool:
        """Whether every token can be drawn, so that the sampler's log-probabilities are those of the tempered model."""
        return self.top_p == 1 and self.top_k == 0 and self.temperature > 0


class NotFinite(ValueError):
    """The model gives no probabilities to sample from; its text is one line."""


@dataclass(frozen=True)
class Rollout:
    """A sampled response: its tokens (the end token among them) and the log-probability each was drawn with."""

    tokens: list[int]
    logp: list[float]
    finished: bool  # ended by an end token, not by the limit


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
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """For each prompt n responses. Sample j of a prompt depends on the seed, its tokens and j, on nothing else.

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
