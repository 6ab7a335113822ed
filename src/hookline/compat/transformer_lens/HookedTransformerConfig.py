# ruff: noqa: N999
"""`HookedTransformerConfig` at the module path of TransformerLens."""

from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig as HookedTransformerConfig
