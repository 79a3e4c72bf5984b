"""Engines: prompts in, sampled responses with their log-probabilities out."""

from ..kernels.sample_torch import sample, uniforms
from .engine import Engine, NotFinite, Rollout, Sampling
from .native import NativeEngine

__all__ = ["Engine", "NativeEngine", "NotFinite", "Rollout", "Sampling", "sample", "uniforms"]
