# ruff: noqa: N999
"""`FactoredMatrix` at the module path of TransformerLens."""

from hookline.compat.transformer_lens.absent import refusing
from hookline.weights.factored import FactoredMatrix as FactoredMatrix

__getattr__ = refusing("transformer_lens.FactoredMatrix")
