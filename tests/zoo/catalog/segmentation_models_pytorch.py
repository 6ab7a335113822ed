"""The decoders of segmentation_models_pytorch with some of its encoders, and its encoders with one decoder."""

from collections.abc import Iterator

import segmentation_models_pytorch as smp
from zoo.network import Built, Network, images, runs, smallest

DECODERS = (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "DeepLabV3",
    "DeepLabV3Plus",
    "PAN",
    "UPerNet",
    "Segformer",
)
ENCODERS = (
    "resnet18",
    "mobilenet_v2",
    "efficientnet-b0",
    "mit_b0",
    "timm-regnetx_002",
    "timm-mobilenetv3_small_075",
    "densenet121",
    "vgg11_bn",
)


def build(decoder: str, encoder: str) -> Built:
    """The network on a small image."""

    def make(**options: object):
        return getattr(smp, decoder)(encoder, encoder_weights=None, classes=2, **options)

    return runs(smallest(make), *images(64, 128, rows=2))


def networks() -> Iterator[Network]:
    """One row per pair that is asked for."""
    pairs = [(decoder, encoder) for decoder in DECODERS for encoder in ENCODERS]
    pairs += [("Unet", encoder) for encoder in smp.encoders.get_encoder_names() if encoder not in ENCODERS]
    for decoder, encoder in pairs:
        yield Network(f"{decoder} {encoder}", lambda decoder=decoder, encoder=encoder: build(decoder, encoder))
