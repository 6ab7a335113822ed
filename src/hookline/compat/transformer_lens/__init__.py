"""TransformerLens's interface over hookline: change `transformer_lens` to `hookline.compat.transformer_lens`.

    from hookline.compat.transformer_lens import HookedTransformer, utils

    model = HookedTransformer.from_pretrained("gpt2")

For libraries that import `transformer_lens` themselves, `install()` puts this package in its place.
docs/from-transformerlens.md lists what differs and what is not available.
"""

from hookline.compat.transformer_lens import components as components
from hookline.compat.transformer_lens import evals as evals
from hookline.compat.transformer_lens import head_detector as head_detector
from hookline.compat.transformer_lens import hook_points as hook_points
from hookline.compat.transformer_lens import loading as loading
from hookline.compat.transformer_lens import model_bridge as model_bridge
from hookline.compat.transformer_lens import patching as patching
from hookline.compat.transformer_lens import train as train
from hookline.compat.transformer_lens import utilities as utilities
from hookline.compat.transformer_lens import utils as utils
from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.encoders.bert import (
    BertNextSentencePrediction as BertNextSentencePrediction,
)
from hookline.compat.transformer_lens._impl.encoders.bert import HookedEncoder as HookedEncoder
from hookline.compat.transformer_lens._impl.encoders.t5 import HookedEncoderDecoder as HookedEncoderDecoder
from hookline.compat.transformer_lens._impl.kv_cache import (
    HookedTransformerKeyValueCache as HookedTransformerKeyValueCache,
)
from hookline.compat.transformer_lens._impl.kv_cache import (
    HookedTransformerKeyValueCacheEntry as HookedTransformerKeyValueCacheEntry,
)
from hookline.compat.transformer_lens._impl.kv_cache import TransformerLensKeyValueCache as TransformerLensKeyValueCache
from hookline.compat.transformer_lens._impl.kv_cache import (
    TransformerLensKeyValueCacheEntry as TransformerLensKeyValueCacheEntry,
)
from hookline.compat.transformer_lens._impl.module_paths import make_modules
from hookline.compat.transformer_lens._impl.standin import VERSION as __version__  # noqa: F401, N811
from hookline.compat.transformer_lens._impl.standin import install as install
from hookline.compat.transformer_lens._impl.svd_interpreter import SVDInterpreter as SVDInterpreter

# From the modules of the same names: once these are loaded, no later import of one hides the class.
from hookline.compat.transformer_lens.ActivationCache import ActivationCache as ActivationCache
from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix as FactoredMatrix
from hookline.compat.transformer_lens.hook_points import HookedRootModule as HookedRootModule
from hookline.compat.transformer_lens.hook_points import HookPoint as HookPoint
from hookline.compat.transformer_lens.HookedTransformer import HookedTransformer as HookedTransformer
from hookline.compat.transformer_lens.HookedTransformerConfig import HookedTransformerConfig as HookedTransformerConfig
from hookline.compat.transformer_lens.model_bridge import TransformerBridge as TransformerBridge

make_modules()
__getattr__ = refusing("transformer_lens")
