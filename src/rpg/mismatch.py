"""``rpg.loss.mismatch`` by its public name: ``from rpg.mismatch import TIS``."""

from .loss.mismatch import MIS, TIS, IcePop, Mismatch, SequenceMask

__all__ = ["MIS", "TIS", "IcePop", "Mismatch", "SequenceMask"]
