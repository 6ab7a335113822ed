"""Which tokens of a prompt are placeholders for parts of an image."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool
from torch import Tensor

from hookline.errors import HooklineError


def image_token_id(config: Any) -> int | None:
    """The id of the placeholder token for images; None for a model that does not take images in its text."""
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token_id for token_id in ids if isinstance(token_id, int)), None)


def image_token(config: Any) -> int:
    """The id of the placeholder token for images; an error for a model without image positions in its text."""
    token = image_token_id(config)
    if token is None:
        raise HooklineError("image positions need a vision-language model: this model does not take images in its text")
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        raise HooklineError(
            "no position of this model's input is an image: its text attends to images by cross-attention, in the "
            f"layers {list(config.get_text_config().cross_attention_layers)}"
        )
    return token


def mask_in(tokens: Tensor, config: Any) -> Bool[Tensor, "batch pos"]:
    """True at the placeholder tokens of images."""
    return tokens == image_token(config)
