"""The class of every MLP, at the module path of TransformerLens."""

from hookline.compat.transformer_lens.components.parts import MLP as CanBeUsedAsMLP  # noqa: F401, N811
