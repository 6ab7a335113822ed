# ruff: noqa: N999
"""Where TransformerLens has `HookedTransformerConfig`."""

from hookline.compat.transformer_lens.tl_config import HookedTransformerConfig

__all__ = ["HookedTransformerConfig"]
