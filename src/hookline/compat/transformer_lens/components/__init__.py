"""The components of TransformerLens at its module path."""

from hookline.compat.transformer_lens.components.parts import MLP as MLP
from hookline.compat.transformer_lens.components.parts import Attention as Attention
from hookline.compat.transformer_lens.components.parts import Embed as Embed
from hookline.compat.transformer_lens.components.parts import LayerNorm as LayerNorm
from hookline.compat.transformer_lens.components.parts import PosEmbed as PosEmbed
from hookline.compat.transformer_lens.components.parts import TransformerBlock as TransformerBlock
from hookline.compat.transformer_lens.components.parts import Unembed as Unembed
