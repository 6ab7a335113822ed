"""Experiments on images: the logit lens over an image, attention to its parts, and patching of a region."""

from hookline.experiments.images.colors import overlay
from hookline.experiments.images.image_attention import ImageAttention, attention, tower_attention
from hookline.experiments.images.image_lens import ImageLens, lens
from hookline.experiments.images.placed import PlacedImage, place_image, positions
from hookline.experiments.images.region_patching import patch

__all__ = [
    "attention",
    "lens",
    "overlay",
    "patch",
    "positions",
    "tower_attention",
    "place_image",
    "ImageAttention",
    "ImageLens",
    "PlacedImage",
]
