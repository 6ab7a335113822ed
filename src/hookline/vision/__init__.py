"""Pictures as input: what goes in, and which position of the prompt stands for which place in a picture."""

from hookline.vision.grid import ImageGrid
from hookline.vision.inputs import Inputs

__all__ = ["ImageGrid", "Inputs"]


def __dir__() -> list[str]:
    return sorted(__all__)
