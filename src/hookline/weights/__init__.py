"""The weights of a model in the classic layout, and their exact and reversible processing."""

from hookline.weights.factored import FactoredMatrix

__all__ = ["FactoredMatrix"]


def __dir__() -> list[str]:
    return sorted(__all__)
