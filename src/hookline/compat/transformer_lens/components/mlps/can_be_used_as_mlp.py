"""The class of every MLP, at the module path of TransformerLens."""

from hookline.compat.transformer_lens._impl.parts import CanBeUsedAsMLP as CanBeUsedAsMLP
