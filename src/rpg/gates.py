"""``rpg.loss.gates`` by its public name: ``from rpg.gates import HighEntropy``."""

from .loss.gates import ClipCov, Gate, HighEntropy, KLCov, Tokens

__all__ = ["ClipCov", "Gate", "HighEntropy", "KLCov", "Tokens"]
