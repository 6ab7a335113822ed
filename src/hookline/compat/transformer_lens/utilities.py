"""`transformer_lens.utils` at its module path in TransformerLens 3."""

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens.utils import *  # noqa: F403

__getattr__ = refusing("transformer_lens.utilities")
