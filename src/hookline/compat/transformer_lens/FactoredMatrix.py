# ruff: noqa: N999
"""`FactoredMatrix` at the module path of TransformerLens."""

import warnings

from torch import Tensor

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.weights import factored


class FactoredMatrix(factored.FactoredMatrix):
    """See `hookline.weights.FactoredMatrix`; `Vh` is that of TransformerLens."""

    @property
    def Vh(self) -> Tensor:  # noqa: N802
        """`V`, not its transpose, as in TransformerLens, where this name is deprecated."""
        warnings.warn("Vh is V here, as in TransformerLens: write V, or V.mT", DeprecationWarning, stacklevel=2)
        return self.V


__getattr__ = refusing("transformer_lens.FactoredMatrix")
