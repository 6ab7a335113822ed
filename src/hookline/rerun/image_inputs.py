"""Images in a baseline: the inputs besides the tokens, and the output of the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine import undo
from hookline.errors import HooklineError
from hookline.transformer.find_anatomy import language_of, tower_of
from hookline.types import ModuleCall

if TYPE_CHECKING:
    from hookline.engine import HookPoint


def in_one_row(x: Tensor, point: HookPoint) -> Tensor:
    """The activation of one prompt at a point, with the patches of all images and tiles concatenated in one row.

    Vision towers take images as rows of a batch, or already in one row.
    """
    if x.shape[0] == 1:
        return x
    letters = point.axes.split()
    if point.stream != "image" or letters[1:2] != ["p"] or "k" in letters:
        raise HooklineError(
            f"{point.name!r} has {x.shape[0]} rows in one run (images, or tiles of an image), and no axis along "
            f"which their patches can be concatenated: use run_with_hooks"
        )
    return x.flatten(0, 1)[None]


class ImageInputs:
    """The keyword inputs of a run besides its tokens, and the output of the vision tower for them.

    A variant that differs in the language model only does not run the tower again. False without such inputs.
    """

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.inputs = dict(inputs)
        self._tower = tower_of(root) if inputs else None
        self._language = language_of(root) if inputs else None
        self._output: Any = None
        self.positions: Tensor | None = None
        """The position ids that the language model received: some models number images by rows and columns."""

    def __bool__(self) -> bool:
        return bool(self.inputs)

    def noted(self) -> undo.TorchHooks:
        """A context that records the output of the tower, and the position ids of the language model, in a run."""

        def note_output(_module: nn.Module, _args: Any, output: Any) -> None:
            self._output = output

        def note_positions(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            self.positions = kwargs.get("position_ids")

        return undo.TorchHooks(before=[(self._language, note_positions)], after=[(self._tower, note_output)])

    def repeated(self, n: int) -> dict[str, Any]:
        """The inputs for `n` copies of the row."""
        return {name: torch.cat([x] * n) if isinstance(x, Tensor) and x.ndim else x for name, x in self.inputs.items()}

    def skipped(self) -> dict[nn.Module, ModuleCall]:
        """The tower, to be skipped, with its known output."""
        if self._tower is None or self._output is None:
            return {}
        return {self._tower: lambda _args, _kwargs: self._output}
