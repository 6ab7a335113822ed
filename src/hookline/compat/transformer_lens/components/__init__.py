"""The components of TransformerLens at its module path: the classes of the parts of a model."""

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.parts import MLP as MLP
from hookline.compat.transformer_lens._impl.parts import AbstractAttention as AbstractAttention
from hookline.compat.transformer_lens._impl.parts import Attention as Attention
from hookline.compat.transformer_lens._impl.parts import Embed as Embed
from hookline.compat.transformer_lens._impl.parts import GatedMLP as GatedMLP
from hookline.compat.transformer_lens._impl.parts import GroupedQueryAttention as GroupedQueryAttention
from hookline.compat.transformer_lens._impl.parts import LayerNorm as LayerNorm
from hookline.compat.transformer_lens._impl.parts import LayerNormPre as LayerNormPre
from hookline.compat.transformer_lens._impl.parts import PosEmbed as PosEmbed
from hookline.compat.transformer_lens._impl.parts import RMSNorm as RMSNorm
from hookline.compat.transformer_lens._impl.parts import RMSNormPre as RMSNormPre
from hookline.compat.transformer_lens._impl.parts import TransformerBlock as TransformerBlock
from hookline.compat.transformer_lens._impl.parts import Unembed as Unembed

__getattr__ = refusing("transformer_lens.components")
