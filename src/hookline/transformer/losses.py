"""The loss of a run: next-token cross-entropy, or the model's own loss for labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.errors import HooklineError
from hookline.text.image_tokens import image_token_id
from hookline.text.loss import lm_loss
from hookline.transformer.cfg import cfg_of
from hookline.transformer.index import ModelPoints
from hookline.transformer.outputs import outcome


def next_token_loss(points: ModelPoints, logits: Tensor, inputs: Mapping[str, Any], *, per_token: bool) -> Tensor:
    """Cross-entropy of every next token that is neither padding nor an image, averaged or per token."""
    anatomy = points.anatomy
    d_vocab = cfg_of(points.root, anatomy).d_vocab
    if anatomy.main.name == "encoder" or logits.ndim != 3 or logits.shape[-1] != d_vocab:
        raise HooklineError("this model has no next-token loss: its output is not logits for every position")
    prefix = "decoder_" if anatomy.is_encoder_decoder else ""
    tokens = inputs.get(f"{prefix}input_ids")
    if tokens is None:
        raise HooklineError("the loss needs token ids: give tokens or text, not embeddings")
    if logits.shape[1] < 2:
        raise HooklineError("the next-token loss needs at least two tokens")
    images = image_positions(points, tokens)
    if images is not None and bool(images[:, 1:].all()):
        raise HooklineError("the loss is computed on text, and there is none after the first position, only images")
    return lm_loss(logits, tokens, inputs.get(f"{prefix}attention_mask"), images, per_token=per_token)


def image_positions(points: ModelPoints, tokens: Tensor) -> Tensor | None:
    """True where a token belongs to an image; None for a model without a vision tower."""
    image = image_token_id(points.root.config) if points.anatomy.towers else None
    return tokens == image if image is not None else None


def own_loss(output: Any, return_type: str | None, per_token: bool) -> Any:
    """What `return_type` asks for, where labels were given and the output has the model's own loss."""
    if per_token:
        raise HooklineError("loss_per_token is not available with labels: the model's own loss is one number")
    if output.get("loss") is None:
        raise HooklineError("labels were given, but the model returned no loss")
    logits, loss = outcome(output), output["loss"]
    return {None: None, "logits": logits, "loss": loss, "both": (logits, loss)}[return_type]
