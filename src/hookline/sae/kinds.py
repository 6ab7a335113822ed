"""Kinds of autoencoders: one class for each way of training, with its features, its loss, and the files it becomes.

| kind | features | loss beside the squared error | saved as |
|---|---|---|---|
| "l1" | ReLU | `l1` times their sum | "standard" |
| "topk" | the `k` largest of each row | | "topk" |
| "batchtopk" | the `k` largest per row on average, over a batch | | "jumprelu" |
| "matryoshka" | as "batchtopk" | the squared error of the first features alone, for each of `levels` | "jumprelu" |
| "jumprelu" | above a trained threshold | `l0` times their number | "jumprelu" |
| "gated" | a gate, and a magnitude | `l1` times the gates' sum, and the squared error of the gates alone | "gated" |
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import relu

from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.sae_config import Architecture
from hookline.sae.training_plan import TrainingPlan

START, WIDTH = 0.05, 0.05
"""The first threshold of a "jumprelu" feature, and the width in which its gradient is estimated.

For activations with a mean norm of √d_in; 0.001 for a mean norm of 1 (Rajamanoharan et al. 2024).
"""
_SLOWEST = 0.01
"""The weight of the last batch in the running mean of a "batchtopk" threshold."""


class StepLoss(NamedTuple):
    """The features of a batch, the squared error, and all that is minimized; both summed over rows."""

    features: Float[Tensor, "row d_sae"]
    squared_error: Float[Tensor, ""]
    total: Float[Tensor, ""]


class TrainedKind:
    """A ReLU autoencoder with an L1 penalty; other kinds change parts of it."""

    name: ClassVar[str] = "l1"
    architecture: ClassVar[Architecture] = "standard"
    options: ClassVar[tuple[str, ...]] = ("l1",)
    """The options of `train` that apply to it alone."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan

    def begin(self, sae: SparseAutoencoder) -> None:
        """Set what is not zero at the start."""

    def loss(self, sae: SparseAutoencoder, x: Float[Tensor, "row d_in"], step: int) -> StepLoss:
        """The features and the loss of a batch."""
        features = self.features(sae, x, step)
        error = (sae.decode(features) - x).pow(2).sum()
        return StepLoss(features, error, self.total(sae, x, features, error, step))

    def features(self, sae: SparseAutoencoder, x: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """The features of a batch in training."""
        return sae.encode(x)

    def total(self, sae: SparseAutoencoder, x: Tensor, features: Tensor, error: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """All that is minimized."""
        return error + self.plan.l1_coefficient(step) * features.sum()

    def settle(self, sae: SparseAutoencoder) -> None:
        """Restore what holds after a step of the optimizer."""


class TopK(TrainedKind):
    """Keeps the k largest features of each row."""

    name: ClassVar[str] = "topk"
    architecture: ClassVar[Architecture] = "topk"
    options: ClassVar[tuple[str, ...]] = ("k",)

    def total(self, sae: SparseAutoencoder, x: Tensor, features: Tensor, error: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """The squared error."""
        return error


class BatchTopK(TopK):
    """Keeps the largest features of a batch, k per row on average; after training, those above a threshold."""

    name: ClassVar[str] = "batchtopk"
    architecture: ClassVar[Architecture] = "jumprelu"

    def begin(self, sae: SparseAutoencoder) -> None:
        """The threshold is a running mean, and not trained."""
        sae.threshold.requires_grad_(False)

    def features(self, sae: SparseAutoencoder, x: Tensor, step: int) -> Tensor:
        """The largest features of the batch; the smallest of them moves the threshold."""
        activations = relu(sae.projected(x) + sae.b_enc)
        values, places = activations.flatten().topk(min(self.plan.k * len(x), activations.numel()), sorted=False)
        features = torch.zeros_like(activations).flatten().scatter(0, places, values).view_as(activations)
        positive = values.detach()[values > 0]
        if len(positive):
            weight = max(_SLOWEST, 1 / (step + 1))
            with torch.no_grad():
                sae.threshold.mul_(1 - weight).add_(weight * positive.min())
        return features


class Matryoshka(BatchTopK):
    """Its first features reconstruct by themselves too, so that they are the general ones."""

    name, options = "matryoshka", ("k", "levels")

    def total(self, sae: SparseAutoencoder, x: Tensor, features: Tensor, error: Tensor, step: int) -> Tensor:  # noqa: ARG002
        """The mean over levels of the squared error of the features up to there."""
        seen: Tensor = sae.b_dec
        start, total = 0, error
        for level in self.plan.levels[:-1]:
            seen = seen + features[:, start:level] @ sae.W_dec[start:level]
            total, start = total + (seen - x).pow(2).sum(), level
        return total / len(self.plan.levels)


class JumpReLU(TrainedKind):
    """Features above a threshold that is trained, with a penalty on their number."""

    name, architecture, options = "jumprelu", "jumprelu", ("l0",)

    def begin(self, sae: SparseAutoencoder) -> None:
        """A small threshold."""
        with torch.no_grad():
            sae.threshold.fill_(START)

    def loss(self, sae: SparseAutoencoder, x: Tensor, step: int) -> StepLoss:
        """The squared error, and the number of features, with estimated gradients of the threshold."""
        before = sae.projected(x) + sae.b_enc
        features, is_active = _Jump.apply(before, sae.threshold)
        error = (sae.decode(features) - x).pow(2).sum()
        return StepLoss(features, error, error + self.plan.l0 * self.plan.warmed_up(step) * is_active.sum())

    def settle(self, sae: SparseAutoencoder) -> None:
        """A threshold is not negative."""
        sae.threshold.clamp_(min=0.0)


class _Jump(torch.autograd.Function):
    """Values above a threshold, and where they are. Gradients of the threshold are estimated in a window around it."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        is_active = (before > threshold).to(before)
        ctx.save_for_backward(before, threshold, is_active)
        return before * is_active, is_active

    @staticmethod
    def backward(ctx: Any, of_value: Tensor, of_count: Tensor) -> tuple[Tensor, Tensor]:
        before, threshold, is_active = ctx.saved_tensors
        is_near = ((before - threshold).abs() < WIDTH / 2).to(before)
        moved = -(is_near / WIDTH * (threshold * of_value + of_count)).sum(0)
        return of_value * is_active, moved


class Gated(TrainedKind):
    """A gate decides which features are active, and the magnitudes how much (Rajamanoharan et al. 2024)."""

    name, architecture = "gated", "gated"

    def loss(self, sae: SparseAutoencoder, x: Tensor, step: int) -> StepLoss:
        """The penalty is on the gates, which also have to reconstruct, with a decoder that this does not train."""
        pre_activations = sae.projected(x)
        features = sae.gated(pre_activations)
        error = (sae.decode(features) - x).pow(2).sum()
        gates = relu(pre_activations + sae.b_gate)
        of_gates = (gates @ sae.W_dec.detach() + sae.b_dec.detach() - x).pow(2).sum()
        return StepLoss(features, error, error + of_gates + self.plan.l1_coefficient(step) * gates.sum())


KINDS: dict[str, type[TrainedKind]] = {
    kind.name: kind for kind in (TrainedKind, TopK, BatchTopK, Matryoshka, JumpReLU, Gated)
}
