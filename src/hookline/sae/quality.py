"""Quality: how much of what passes at a point is in an autoencoder's features, and what the model makes of the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.hooks import zero
from hookline.loss import lm_loss
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.texts import Batch, batches_of, rows_of


@dataclass(frozen=True)
class Quality:
    """How good an autoencoder is, on some texts."""

    l0: float
    """How many features are active at a token, on average."""
    explained_variance: float
    dead: float
    """The share of features that were active at no token."""
    loss: float
    """That of the next token; nan of a model that does not predict it."""
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
        of_features = f"L0 {self.l0:.1f}, explained variance {self.explained_variance:.1%}, dead {self.dead:.1%}"
        if math.isnan(self.loss):
            return f"{of_features}; no loss: the model does not predict the next token"
        return (
            f"{of_features}, loss {self.loss:.4f}, spliced {self.loss_spliced:.4f}, zeroed {self.loss_zeroed:.4f}, "
            f"recovered {self.loss_recovered:.1%}"
        )


@torch.no_grad()
def evaluate(
    sae: SparseAutoencoder, model: HookedModel, texts: Iterable[str], point: str | None = None, *, batch_size: int = 16
) -> Quality:
    """How good an autoencoder is on texts: what of the activations it explains, and what the model loses by it.

    A model that does not predict the next token, such as a masked one, has no loss here (nan).
    """
    where = point if point is not None else sae.cfg.hook_name
    if where is None:
        raise HooklineError("the autoencoder does not say where it belongs: name the point")
    losses = torch.zeros(4, dtype=torch.float64)
    active = torch.zeros(sae.d_sae, dtype=torch.float64)
    moments, predicts = _Moments(sae), _predicts_next(model)
    for batch in batches_of(model, texts, batch_size):
        x = rows_of(model, sae, where, batch)
        features = sae.encode(x)
        active += (features > 0).sum(0).double().cpu()
        moments.see(x, sae.decode(features, x))
        if predicts:
            losses += _losses(sae, model, where, batch)
    if not moments.rows or (predicts and not losses[3]):
        raise HooklineError("there are no tokens to evaluate on: give texts of at least two tokens")
    loss, spliced, zeroed = (losses[:3] / losses[3]).tolist()
    dead = float((active == 0).double().mean())
    return Quality(float(active.sum()) / moments.rows, moments.explained, dead, loss, spliced, zeroed)


def _predicts_next(model: HookedModel) -> bool:
    """Whether its logits are of the next token, of the text that it is given."""
    return model._anatomy.main.name != "encoder" and not model._anatomy.is_encoder_decoder


def _losses(sae: SparseAutoencoder, model: HookedModel, point: str, batch: Batch) -> Tensor:
    """The sums of the loss as it is, with the reconstruction, and with zeros; and of how many tokens."""
    sums = []
    for hooks in ([], [sae.spliced(point, keep_error=False)], [(point, zero())]):
        logits = model.run_with_hooks(batch.ids, attention_mask=batch.mask, fwd_hooks=hooks)
        sums.append(float(lm_loss(logits, batch.ids, batch.mask, per_token=True).double().sum()))
    return torch.tensor([*sums, int((batch.mask[:, 1:] * batch.mask[:, :-1]).sum())], dtype=torch.float64)


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
