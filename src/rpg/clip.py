"""``rpg.loss.clip`` by its public name: ``from rpg.clip import RPGClip``."""

from .loss.clip import (
    KL3,
    Adaptive,
    Box,
    Clip,
    DualClip,
    Limits,
    LogBox,
    RPGClip,
    Sigmoid,
    Taper,
    Truncate,
    Unweighted,
    curvature_keep,
)

__all__ = [
    "KL3",
    "Adaptive",
    "Box",
    "Clip",
    "DualClip",
    "Limits",
    "LogBox",
    "RPGClip",
    "Sigmoid",
    "Taper",
    "Truncate",
    "Unweighted",
    "curvature_keep",
]
