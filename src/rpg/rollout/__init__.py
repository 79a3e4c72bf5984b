"""Engines: prompts in, sampled responses with their log-probabilities out."""

from ..kernels.sample_torch import sample, uniforms
from .engine import Engine, NotFinite, Rollout, Sampling
from .kept import KeptIds, TooManyKept
from .native import NativeEngine

__all__ = [
    "Engine",
    "KeptIds",
    "NativeEngine",
    "NotFinite",
    "Rollout",
    "Sampling",
    "TooManyKept",
    "sample",
    "uniforms",
]
