"""Composition: how much of what one head writes another reads, from their weights alone."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.weights.factored import FactoredMatrix


def composition_scores(left: FactoredMatrix, right: FactoredMatrix) -> Float[Tensor, "*batch"]:
    """The norm of the product over the product of the norms, for each pair: 1 at most, and small for strangers.

        composition_scores(model.OV[0, 3], model.QK[1, 5])

    Batch axes are broadcast. Only products as small as a head are made, none as wide as the model.
    """
    middle = left.B @ right.A
    before, after = left.A.mT @ left.A, right.B @ right.B.mT
    square = ((before @ middle) * (middle @ after)).sum((-2, -1))
    return square.clamp(min=0).sqrt() / (left.norm() * right.norm())


def all_scores(left: FactoredMatrix, right: FactoredMatrix) -> Float[Tensor, "layer head layer head"]:
    """For every head, what it has to do with every head of a later layer; 0 for all others."""
    n_layers = left.shape[0]
    by_layer = [composition_scores(left[layer].unsqueeze(1).unsqueeze(1), right) for layer in range(n_layers)]
    scores = torch.stack(by_layer)
    numbers = torch.arange(n_layers, device=scores.device)
    is_later = numbers[:, None] < numbers
    return scores * is_later[:, None, :, None]
