"""The components of TransformerLens at its module path: the classes of the parts of a model."""

from hookline.compat.transformer_lens.absent import refusing
from hookline.compat.transformer_lens.components.parts import MLP as MLP
from hookline.compat.transformer_lens.components.parts import AbstractAttention as AbstractAttention
from hookline.compat.transformer_lens.components.parts import Attention as Attention
from hookline.compat.transformer_lens.components.parts import Embed as Embed
from hookline.compat.transformer_lens.components.parts import GatedMLP as GatedMLP
from hookline.compat.transformer_lens.components.parts import GroupedQueryAttention as GroupedQueryAttention
from hookline.compat.transformer_lens.components.parts import LayerNorm as LayerNorm
from hookline.compat.transformer_lens.components.parts import LayerNormPre as LayerNormPre
from hookline.compat.transformer_lens.components.parts import PosEmbed as PosEmbed
from hookline.compat.transformer_lens.components.parts import RMSNorm as RMSNorm
from hookline.compat.transformer_lens.components.parts import RMSNormPre as RMSNormPre
from hookline.compat.transformer_lens.components.parts import TransformerBlock as TransformerBlock
from hookline.compat.transformer_lens.components.parts import Unembed as Unembed

__getattr__ = refusing("transformer_lens.components")
