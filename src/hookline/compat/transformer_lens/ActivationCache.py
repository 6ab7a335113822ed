# ruff: noqa: N999
"""`ActivationCache` at the module path of TransformerLens."""

from hookline.compat.transformer_lens.cache import ActivationCache as ActivationCache
