"""What the engine is told about texts: see `hookline.engine.TextSupport`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hookline.engine import HookPoint, TextSupport
from hookline.text.acted import PositionTally, tallies
from hookline.text.at_positions import picked
from hookline.text.forward_pass import begin_encoder, begin_pass
from hookline.text.unreached import UnreachedPositions


class Texts(TextSupport):
    """Answers from the forward pass going on in this thread."""

    def begin(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Note what a forward pass is about."""
        begin_pass(model, inputs)

    def begin_encoder(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Note what the encoder of a model runs on."""
        begin_encoder(model, inputs)

    def pick(self, x: Tensor, point: Any, positions: Any) -> Tensor:
        """What an activation has at some positions."""
        return picked(x, point, positions)

    def unreached(self, positions: Any) -> UnreachedPositions:
        """What keeps track of positions that a hook is for."""
        return UnreachedPositions(positions)

    def reshaped(self, forward_pass: Any, point: Any, before: Tensor, after: Tensor) -> Any:
        """The same pass, without positions if a hook added or removed some."""
        return None if forward_pass is None else forward_pass.reshaped(point, before, after)

    def tallies(self, hooks: Sequence[tuple[HookPoint, Tensor | None]]) -> list[PositionTally]:
        """What counts where each of these hooks acts."""
        return tallies(hooks)

    def rows(self, forward_pass: Any, which: Any) -> Any:
        """What is known of a pass, of some rows of its batch."""
        return None if forward_pass is None else forward_pass.of_rows(which)


Texts().use()
