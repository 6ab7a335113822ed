"""Scores: linear functions of the activation at a point, kept while a model writes, in place of the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine import HookPoint, Record, Recorder


def scores_of(
    x: Float[Tensor, "*place d"], weight: Float[Tensor, "score d"], bias: Float[Tensor, " score"]
) -> Float[Tensor, "*place score"]:
    """`x · w + b` for each score; not as a product of matrices, which autocast would compute in bfloat16."""
    wide = x.to(weight.dtype)
    return torch.stack([(wide * direction).sum(-1) for direction in weight.unbind()], -1) + bias


class _Kept(Recorder):
    """Keeps scores, which have no padding to note and no device to go to."""

    def keep(self, point: HookPoint, x: Any) -> None:
        """Keep the scores of some columns."""
        self.log.append((point.name, x))


class Score(Record):
    """Keeps scores of the activation that leaves a point."""

    def __init__(
        self,
        point: HookPoint,
        weight: Float[Tensor, "score d"],
        bias: Float[Tensor, " score"],
        ended: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(point, _Kept(skips_missing=True))
        self.weight, self.bias = weight, bias
        self.ended = ended
        """Returns which rows of a generation end because of it, `[row]`; None if it ends none."""

    def value_of(self, value: Any) -> Tensor:
        """The scores of the activation."""
        x = super().value_of(value).detach()
        wide = torch.promote_types(x.dtype, torch.float32)
        return scores_of(x, self.weight.to(x.device, wide), self.bias.to(x.device, wide))

    @property
    def pieces(self) -> list[Tensor]:
        """The scores so far, `[row, column, score]`, in the order of the columns."""
        return [x for _, x in self.recorder.log if x is not None]
