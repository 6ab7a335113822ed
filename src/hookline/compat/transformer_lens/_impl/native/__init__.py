"""A small transformer for toy models: every component is an option, and nothing in it exists for hooks.

    from hookline.compat.transformer_lens._impl.native import NativeConfig, NativeTransformer

    config = NativeConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, attention_only=True, seed=0)
    model = hookline.hook(NativeTransformer(config))

It is a model of transformers like any other: `generate`, `save_pretrained`, padding and key/value caches are theirs.
"""

from hookline.compat.transformer_lens._impl.native.native_config import NativeConfig as NativeConfig
from hookline.compat.transformer_lens._impl.native.transformer import NativeTransformer as NativeTransformer
