"""Positions in texts that are given as tokens, without a forward pass."""

from __future__ import annotations

from weakref import ref

from jaxtyping import Bool, Int
from torch import Tensor, nn

from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.token_positions import Lacking, Meaning, Positions, lacking, mask_of_indices


def columns_in(
    positions: Positions, model: nn.Module, tokens: Int[Tensor, "row pos"], real: Bool[Tensor, "row pos"] | None = None
) -> tuple[Bool[Tensor, "row pos"], Lacking]:
    """Where positions, in canonical form, are in texts; and those that a text does not have.

    `real` is False at padding; without it, nothing is padding.
    """
    span = Span(range(tokens.shape[1]), len(tokens), tokens, real)
    # As in a later step of a generation: a token that is not in this text may be in another.
    text = ForwardPass(1, span, None, ref(model), False)
    if isinstance(positions, Meaning):
        mask = positions.mask(text, span)
    else:
        mask = mask_of_indices(positions, span.real(), text, span)
    return mask, lacking(positions, text, span)
