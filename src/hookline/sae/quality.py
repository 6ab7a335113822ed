"""Quality: how much of what passes at a point is in an autoencoder's features, and what the model makes of the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.hooks import zero
from hookline.model import HookedModel, lm_loss
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.texts import batches_of, rows_of


@dataclass(frozen=True)
class Quality:
    """How good an autoencoder is, on some texts."""

    l0: float
    """How many features are active at a token, on average."""
    explained_variance: float
    dead: float
    """The share of features that were active at no token."""
    loss: float
    loss_spliced: float
    """With the reconstruction in place of the activation."""
    loss_zeroed: float
    """With zeros in its place."""

    @property
    def loss_recovered(self) -> float:
        """The share of what zeros cost that the reconstruction does not: 1 for a perfect one."""
        cost = self.loss_zeroed - self.loss
        return (self.loss_zeroed - self.loss_spliced) / cost if cost else math.nan

    def __repr__(self) -> str:
        return (
            f"L0 {self.l0:.1f}, explained variance {self.explained_variance:.1%}, dead {self.dead:.1%}, loss "
            f"{self.loss:.4f}, spliced {self.loss_spliced:.4f}, zeroed {self.loss_zeroed:.4f}, recovered "
            f"{self.loss_recovered:.1%}"
        )


@torch.no_grad()
def evaluate(
    sae: SparseAutoencoder, model: HookedModel, texts: Iterable[str], point: str | None = None, *, batch_size: int = 16
) -> Quality:
    """How good an autoencoder is on texts: what of the activations it explains, and what the model loses by it."""
    where = point if point is not None else sae.cfg.hook_name
    if where is None:
        raise HooklineError("the autoencoder does not say where it belongs: name the point")
    losses = torch.zeros(4, dtype=torch.float64)
    active = torch.zeros(sae.d_sae, dtype=torch.float64)
    moments = _Moments(sae)
    for batch in batches_of(model, texts, batch_size):
        x = rows_of(model, sae, where, batch)
        features = sae.encode(x)
        active += (features > 0).sum(0).double().cpu()
        moments.see(x, sae.decode(features, x))
        for index, hooks in enumerate(([], [sae.spliced(where, keep_error=False)], [(where, zero())])):
            logits = model.run_with_hooks(batch.ids, attention_mask=batch.mask, fwd_hooks=hooks)  # type: ignore[arg-type]
            losses[index] += lm_loss(logits, batch.ids, batch.mask, per_token=True).double().sum().cpu()
        losses[3] += int((batch.mask[:, 1:] * batch.mask[:, :-1]).sum())
    if not moments.rows or not losses[3]:
        raise HooklineError("there are no tokens to evaluate on: give texts of at least two tokens")
    loss, spliced, zeroed = (losses[:3] / losses[3]).tolist()
    dead = float((active == 0).double().mean())
    return Quality(float(active.sum()) / moments.rows, moments.explained, dead, loss, spliced, zeroed)


class _Moments:
    """Sums over all rows, from which the explained variance comes."""

    def __init__(self, sae: SparseAutoencoder) -> None:
        self.rows, self.missed, self.squares = 0, 0.0, 0.0
        self.sum = torch.zeros(sae.d_in, dtype=torch.float64, device=sae.device)

    def see(self, x: Tensor, reconstruction: Tensor) -> None:
        """Some rows more."""
        self.rows += len(x)
        self.missed += float((x.double() - reconstruction.double()).pow(2).sum())
        self.squares += float(x.double().pow(2).sum())
        self.sum += x.double().sum(0)

    @property
    def explained(self) -> float:
        """One minus what is missed, as a share of the variance."""
        return 1 - self.missed / (self.squares - float(self.sum.pow(2).sum()) / self.rows)
