"""Looking into pictures: the lens over a picture, attention back to it, and patching of a part of it."""

from hookline.experiments.images.colors import overlay
from hookline.experiments.images.image_attention import SeenAttention, attention, tower_attention
from hookline.experiments.images.image_lens import SeenLens, lens
from hookline.experiments.images.placed import Sight, positions, sight
from hookline.experiments.images.region_patching import patch

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
