"""Engines: prompts in, sampled responses with their log-probabilities out."""

from .engine import Engine, NotFinite, Rollout, Sampling
from .native import NativeEngine
from .sampling import sample, uniforms

__all__ = ["Engine", "NativeEngine", "NotFinite", "Rollout", "Sampling", "sample", "uniforms"]
