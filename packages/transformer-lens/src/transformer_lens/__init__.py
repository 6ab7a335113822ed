"""hookline in place of TransformerLens: this name becomes `hookline.compat.transformer_lens`."""

__hookline__ = True

try:
    from hookline.compat.transformer_lens import install
except ImportError as error:
    raise ImportError(
        "transformer-lens 3.5.1+hookline needs a hookline that has a stand-in: pip install -U hookline"
    ) from error

install()
