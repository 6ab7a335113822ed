"""Looking into pictures: the lens over a picture, attention back to it, and patching of a part of it."""

from hookline.experiments.seen.colours import overlay
from hookline.experiments.seen.heads import SeenAttention, attention, tower_attention
from hookline.experiments.seen.parts import patch
from hookline.experiments.seen.places import Sight, positions, sight
from hookline.experiments.seen.tokens import SeenLens, lens

__all__ = [
    "attention",
    "lens",
    "overlay",
    "patch",
    "positions",
    "tower_attention",
    "sight",
    "SeenAttention",
    "SeenLens",
    "Sight",
]
