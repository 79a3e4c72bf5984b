"""The reward of the made-up task: something that differs from response to response and costs nothing."""

from __future__ import annotations


def odd_end(response: str, answer: str, prompt: str) -> float:
    """1 where the last word, a number, is odd."""
    last = response.split()[-1:]
    return float(bool(last) and int(last[0]) % 2)
