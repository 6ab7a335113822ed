# ruff: noqa: N999
"""Where TransformerLens has `ActivationCache`."""

from hookline.compat.transformer_lens.cache import ActivationCache

__all__ = ["ActivationCache"]
