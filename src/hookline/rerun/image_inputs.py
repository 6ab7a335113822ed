"""Pictures in a run of which variants are made: what goes in beside the tokens, and what the model made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine.skipping import Give
from hookline.engine.torch_hooks import TorchHooks
from hookline.errors import HooklineError
from hookline.transformer.vision_towers import language_of, tower_of

if TYPE_CHECKING:
    from hookline.engine.points import HookPoint


def in_one_row(x: Tensor, point: HookPoint) -> Tensor:
    """What a run on one prompt has at a point, with the patches of all images and tiles one after the other in a row.

    Vision towers take them as rows of a batch, or in one row already.
    """
    if x.shape[0] == 1:
        return x
    letters = point.axes.split()
    if point.stream != "image" or letters[1:2] != ["p"] or "k" in letters:
        raise HooklineError(
            f"{point.name!r} has {x.shape[0]} rows in one run, for images or tiles of an image, and no axis that all "
            f"of their patches could be along: use run_with_hooks"
        )
    return x.flatten(0, 1)[None]


class ImageInputs:
    """The keyword inputs of a run beside its tokens, with what the vision tower gave for them.

    A variant that differs in the language part only need not look at the pictures again.
    """

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.inputs = dict(inputs)
        self._tower, self._language = tower_of(root), language_of(root)
        self._seen: Any = None
        self.positions: Tensor | None = None
        """Of the tokens, as the language part was told: some models count pictures in rows and columns."""

    def noted(self) -> TorchHooks:
        """A block that notes, in a run, what the tower gives and which positions the language part gets."""

        def note_seen(_module: nn.Module, _args: Any, output: Any) -> None:
            self._seen = output

        def note_positions(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            self.positions = kwargs.get("position_ids")

        return TorchHooks(before=[(self._language, note_positions)], after=[(self._tower, note_seen)])

    def repeated(self, n: int) -> dict[str, Any]:
        """The inputs for `n` rows of the same."""
        return {name: torch.cat([x] * n) if isinstance(x, Tensor) and x.ndim else x for name, x in self.inputs.items()}

    def skipped(self) -> dict[nn.Module, Give]:
        """The tower need not be run: it gives what it gave."""
        if self._tower is None or self._seen is None:
            return {}
        return {self._tower: lambda _args, _kwargs: self._seen}
