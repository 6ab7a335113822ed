"""Which tokens of a prompt stand for parts of an image."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool
from torch import Tensor

from hookline.errors import HooklineError


def image_token_id(config: Any) -> int | None:
    """The token in whose place an image goes into the text; None for a model that takes no images with text."""
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((each for each in ids if isinstance(each, int)), None)


def image_token(config: Any) -> int:
    """The id of the token that a picture's places in the prompt have; an error for a model that has no such places."""
    token = image_token_id(config)
    if token is None:
        raise HooklineError(
            "positions of pictures are for a model that takes pictures together with text: this one does not"
        )
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        raise HooklineError(
            "no position of this model's input is a picture's: its text looks at pictures through cross-attention, in "
            f"the layers {list(config.get_text_config().cross_attention_layers)}"
        )
    return token


def mask_in(tokens: Tensor, config: Any) -> Bool[Tensor, "batch pos"]:
    """True where an image is, in rows of tokens."""
    return tokens == image_token(config)
