"""The networks and layers of kornia that run on an image without weights."""

from collections.abc import Iterator

import kornia
import torch
from torch import nn
from zoo.network import Built, Network, can_be_filled, filled, runs

SIZES = {
    "kernel_size": (3, 3),
    "sigma": (1.0, 1.0),
    "sigma_color": 0.1,
    "sigma_space": (1.0, 1.0),
    "patch_size": 32,
    "num_classes": 4,
    "image_size": 32,
    "pretrained": False,
    "levels": 2,
    "angle": torch.tensor([30.0]),
    "scale_factor": torch.tensor([1.5]),
    "size": (16, 16),
    "top": 2,
    "height": 16,
    "width": 16,
    "max_level": 2,
    "num_features": 20,
    "d_model": 32,
    "depth": 2,
    "num_heads": 2,
    "embed_dim": 32,
    "factor": 2,
    "direction": "x",
    "radius": 3,
    "amount": 1.0,
    "threshold": 0.1,
    "brightness_factor": 0.2,
    "contrast_factor": 0.8,
    "saturation_factor": 0.8,
    "hue_factor": 0.1,
    "gamma": 1.2,
    "window_size": 5,
    "max_val": 1.0,
    "alpha": 0.5,
    "filters": 2,
    "number_bins": 8,
    "input_dim": 3,
    "p": 0.5,
}
"""Small values of arguments, by their names."""


def build(cls: type[nn.Module]) -> Built:
    """The module on one of some images."""
    module = cls(**filled(cls, SIZES))
    color, gray, patch = torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32), torch.rand(4, 1, 32, 32)
    labels = torch.randint(0, 3, (2, 32, 32))
    return runs(
        module,
        ((color,), {}),
        ((gray,), {}),
        ((patch,), {}),
        ((torch.rand(1, 1, 64, 64),), {}),
        ((torch.rand(1, 3, 64, 64),), {}),
        ((color, color), {}),
        ((gray, gray), {}),
        ((color, labels), {}),
        ((torch.rand(4, 8), torch.rand(4, 8)), {}),
        ((torch.rand(2, 1, 13, 13),), {}),
        ((torch.rand(2, 1, 19, 19),), {}),
        ((torch.rand(2, 3, 8, 32, 32),), {}),
    )


def networks() -> Iterator[Network]:
    """One row per class that needs nothing but sizes."""
    classes: dict[type, str] = {}
    for area in (
        "feature",
        "filters",
        "color",
        "contrib",
        "losses",
        "enhance",
        "geometry",
        "augmentation",
        "morphology",
    ):
        module = getattr(kornia, area, None)
        for name in dir(module):
            cls = getattr(module, name)
            if (
                isinstance(cls, type)
                and issubclass(cls, nn.Module)
                and cls.__module__.startswith("kornia")
                and can_be_filled(cls, SIZES)
            ):
                classes.setdefault(cls, f"{area}.{name}")
    for cls, name in classes.items():
        yield Network(name, lambda cls=cls: build(cls))
