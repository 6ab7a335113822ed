"""Images as model input, and the mapping between token positions and image regions."""

from hookline.vision.grid import ImageGrid
from hookline.vision.inputs import Inputs

__all__ = ["ImageGrid", "Inputs"]


def __dir__() -> list[str]:
    return sorted(__all__)
