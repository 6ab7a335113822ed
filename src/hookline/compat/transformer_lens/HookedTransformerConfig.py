# ruff: noqa: N999
"""`HookedTransformerConfig` at the module path of TransformerLens."""

from hookline.compat.transformer_lens.tl_config import HookedTransformerConfig as HookedTransformerConfig
