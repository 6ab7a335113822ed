# ruff: noqa: N999
"""`HookedTransformer` at the module path of TransformerLens."""

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer as HookedTransformer
from hookline.compat.transformer_lens._impl.hooked_transformer import Loss as Loss
from hookline.compat.transformer_lens._impl.hooked_transformer import Output as Output
from hookline.compat.transformer_lens.hook_points import HookedRootModule as HookedRootModule

__getattr__ = refusing("transformer_lens.HookedTransformer")
