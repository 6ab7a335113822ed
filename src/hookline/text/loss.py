"""The next-token cross-entropy of a language model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

_NO_TARGET = -100
"""The target of positions that are not predicted, such as image tokens outside the vocabulary of the logits."""


def lm_loss(
    logits: Float[Tensor, "batch pos vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    per_token: bool = False,
) -> Float[Tensor, "*any"]:
    """Next-token cross-entropy, averaged over tokens that are neither padding nor images, or per token with 0 there.

    `seen` is true at image positions, whose tokens cannot be predicted.
    """
    counts = torch.ones_like(tokens[:, 1:], dtype=torch.float32)
    if attention_mask is not None:
        counts = (attention_mask[:, 1:] * attention_mask[:, :-1]).to(counts.dtype)
    if seen is not None:
        counts = counts * ~seen[:, 1:]
    targets = tokens[:, 1:].masked_fill(counts == 0, _NO_TARGET)
    # The vocabulary is the last axis: along others torch sums in an order that loses digits.
    flat = logits[:, :-1].float().flatten(0, 1)
    losses = F.cross_entropy(flat, targets.flatten(), reduction="none", ignore_index=_NO_TARGET).view(targets.shape)
    return losses if per_token else losses.sum() / counts.sum()
