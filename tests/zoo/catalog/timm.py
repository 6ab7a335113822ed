"""Every network that timm registers, on small images."""

from collections.abc import Iterator

import timm
from torch import nn
from zoo.network import Built, Network, images, runs, smallest

SMALLER = (
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 2, 1)},
    {"layers": (1, 1, 1, 1)},
    {"num_classes": 10},
    {"depth": 1, "num_classes": 10},
    {"depths": (1, 1, 1, 1), "num_classes": 10},
    {"depth": 2, "embed_dim": 96, "num_heads": 4},
    {"depth": (1, 1, 1)},
    {"depths": (1, 1, 1)},
    {"channel_multiplier": 0.25},
    {"block_cfg": None},
)


def build(name: str) -> Built:
    """The network at the smallest of some sizes of images."""

    def make(**options: object) -> nn.Module:
        return timm.create_model(name, pretrained=False, **options)

    size = timm.get_pretrained_cfg(name).input_size[-1] if timm.get_pretrained_cfg(name) else 224
    for small in (64, 128):
        try:
            return runs(smallest(lambda small=small, **o: make(img_size=small, **o), *SMALLER), *images(small))
        except Exception:  # its images have one size, or any
            continue
    return runs(smallest(make, *SMALLER), *images(64, 96, 128, size))


def networks() -> Iterator[Network]:
    """One row per registered name."""
    for name in timm.list_models():
        yield Network(name, lambda name=name: build(name))
