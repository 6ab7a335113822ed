"""Where TransformerLens 3 has what was in `utils`."""

from hookline.compat.transformer_lens.utils import *  # noqa: F403
from hookline.compat.transformer_lens.utils import __all__

__all__ = __all__
