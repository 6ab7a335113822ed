"""Dead features: counted during training, and pointed at what is reconstructed poorly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.kinds import START

_SHARE = 0.2
"""The norm of a resampled encoder direction, relative to the mean norm of those that are alive."""


class DeadFeatures:
    """Counts for how many steps each feature has been inactive."""

    def __init__(self, d_sae: int, patience: int, device: torch.device) -> None:
        self.steps = torch.zeros(d_sae, dtype=torch.long, device=device)
        self.patience = patience

    def update(self, features: Tensor) -> None:
        """Count a batch."""
        self.steps += 1
        self.steps[(features > 0).any(0)] = 0

    def indices(self) -> Tensor:
        """The features that have been inactive for `patience` steps."""
        return (self.steps >= self.patience).nonzero().flatten()

    def share(self) -> float:
        """The fraction of dead features."""
        return len(self.indices()) / len(self.steps)


@torch.no_grad()
def resample(
    sae: SparseAutoencoder, optimizer: torch.optim.Adam, dead_features: DeadFeatures, x: Tensor, random: torch.Generator
) -> int:
    """Point dead features at poorly reconstructed inputs, sampled by their error; returns how many were resampled."""
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
    vectors = {
        name: parameter for name, parameter in sae.named_parameters() if parameter.requires_grad and parameter.ndim == 1
    }
    vectors.pop("b_dec")
    for name, parameter in vectors.items():
        parameter[dead] = START if name == "threshold" else 0.0
    for parameter, axis in ((sae.W_dec, 0), (sae.W_enc, 1), *((vector, 0) for vector in vectors.values())):
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                optimizer.state[parameter][moment].index_fill_(axis, dead, 0)
    dead_features.steps[dead] = 0
    return len(dead)
