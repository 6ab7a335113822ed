# ruff: noqa: N999
"""Where TransformerLens has `HookedTransformer`."""

from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer

__all__ = ["HookedTransformer"]
