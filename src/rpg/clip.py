"""``rpg.loss.clip`` by its public name: ``from rpg.clip import RPGClip``."""

from .loss.clip import (
    KL3,
    KL3_FORMS,
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
    lambert_w,
)

__all__ = [
    "KL3",
    "KL3_FORMS",
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
    "lambert_w",
]
