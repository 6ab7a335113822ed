# ruff: noqa: N999
"""Where TransformerLens has `FactoredMatrix`."""

from hookline.weights.factored import FactoredMatrix

__all__ = ["FactoredMatrix"]
