"""Dead features: those that are no longer active for anything, and a new start for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline.sae.autoencoder import SparseAutoencoder

_SHARE = 0.2
"""How strongly a resampled feature is found, beside those that live."""


class DeadFeatures:
    """For how many steps each feature has not been active."""

    def __init__(self, d_sae: int, patience: int, device: torch.device) -> None:
        self.steps = torch.zeros(d_sae, dtype=torch.long, device=device)
        self.patience = patience

    def update(self, features: Tensor) -> None:
        """A batch has gone by."""
        self.steps += 1
        self.steps[(features > 0).any(0)] = 0

    def indices(self) -> Tensor:
        """The features that have not been active for as many steps as one waits."""
        return (self.steps >= self.patience).nonzero().flatten()

    def share(self) -> float:
        """How many of all they are."""
        return len(self.indices()) / len(self.steps)


@torch.no_grad()
def resample(
    sae: SparseAutoencoder, optimizer: torch.optim.Adam, dead_features: DeadFeatures, x: Tensor, random: torch.Generator
) -> int:
    """Point dead features at inputs that are badly reconstructed, likelier the worse; gives how many they were."""
    dead = dead_features.indices()
    if not len(dead):
        return 0
    error = x - sae(x)
    odds = error.pow(2).sum(1).pow(2).double().cpu() + 1e-30
    chosen = torch.multinomial(odds, len(dead), replacement=len(dead) > len(x), generator=random)
    directions = nn.functional.normalize(error[chosen.to(x.device)], dim=1)
    alive = dead_features.steps < dead_features.patience
    norm = sae.W_enc[:, alive].norm(dim=0).mean() if bool(alive.any()) else 1.0
    sae.W_dec[dead] = directions
    sae.W_enc[:, dead] = (directions * norm * _SHARE).T
    sae.b_enc[dead] = 0
    for parameter, axis in ((sae.W_dec, 0), (sae.W_enc, 1), (sae.b_enc, 0)):
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                optimizer.state[parameter][moment].index_fill_(axis, dead, 0)
    dead_features.steps[dead] = 0
    return len(dead)
