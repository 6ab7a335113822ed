# ruff: noqa: N999
"""`HookedTransformer` at the module path of TransformerLens."""

from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer as HookedTransformer
