# ruff: noqa: N999
"""`FactoredMatrix` at the module path of TransformerLens."""

from hookline.weights.factored import FactoredMatrix as FactoredMatrix
