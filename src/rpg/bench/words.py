"""The reward of the made-up task: something that differs from response to response and costs nothing."""

from __future__ import annotations


def odd_end(response: str, answer: str, prompt: str) -> float:
    """1 where the last word, a number, is odd."""
    return float(response[-1:] in tuple("13579"))
