"""TransformerLens's interface over hookline: change `transformer_lens` to `hookline.compat.transformer_lens`.

    from hookline.compat.transformer_lens import HookedTransformer, utils

    model = HookedTransformer.from_pretrained("gpt2")

What differs, and what is not here, is in docs/from-transformerlens.md.
"""

from hookline.compat.transformer_lens import hook_points, model_bridge, patching, utils
from hookline.compat.transformer_lens.absent import refusing

# From the modules of the same names: once these are loaded, no later import of one hides the class.
from hookline.compat.transformer_lens.ActivationCache import ActivationCache
from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix
from hookline.compat.transformer_lens.hook_points import HookedRootModule, HookPoint
from hookline.compat.transformer_lens.HookedTransformer import HookedTransformer
from hookline.compat.transformer_lens.HookedTransformerConfig import HookedTransformerConfig
from hookline.compat.transformer_lens.kv_cache import (
    HookedTransformerKeyValueCache,
    HookedTransformerKeyValueCacheEntry,
    TransformerLensKeyValueCache,
    TransformerLensKeyValueCacheEntry,
)

__all__ = [
    "HookedTransformer",
    "HookedTransformerConfig",
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
    "HookedRootModule",
    "HookedTransformerKeyValueCache",
    "HookedTransformerKeyValueCacheEntry",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "hook_points",
    "model_bridge",
    "patching",
    "utils",
]

__getattr__ = refusing("transformer_lens")
