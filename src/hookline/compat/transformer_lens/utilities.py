"""Where TransformerLens 3 has what was in `utils`."""

from hookline.compat.transformer_lens.utils import *  # noqa: F403
