"""A model's weights in the classic layout, and what can be folded into them."""

from hookline.weights.factored import FactoredMatrix

__all__ = ["FactoredMatrix"]


def __dir__() -> list[str]:
    return sorted(__all__)
