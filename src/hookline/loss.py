"""The loss of a language model: how surprised it is at each next token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def lm_loss(
    logits: Float[Tensor, "batch pos vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    per_token: bool = False,
) -> Float[Tensor, ...]:
    """Cross-entropy of the next token, averaged over all that are no padding and no pictures; or per token, 0 there.

    `seen` is true where a picture is: what stands there is no token that could be predicted.
    """
    if seen is not None:
        tokens = tokens.masked_fill(seen, 0)  # an image's token may lie outside the vocabulary
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(tokens.shape[0], -1)
    counts = torch.ones_like(losses)
    if attention_mask is not None:
        counts = (attention_mask[:, 1:] * attention_mask[:, :-1]).to(losses.dtype)
    if seen is not None:
        counts = counts * ~seen[:, 1:]
    return losses * counts if per_token else (losses * counts).sum() / counts.sum()
