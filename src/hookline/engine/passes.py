"""What the engine asks about the text of a forward pass; `hookline.text` answers.

The engine works on any module. Where a language model runs, actions and caches also need the positions of the text that
a pass covers. `hookline.text` registers its answers with `TextSupport.use`; until then, nothing is known about texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class Unreached(Protocol):
    """The positions of a hook that no forward pass has reached."""

    def clear(self) -> None:
        """Start over."""

    def note(self, point: Any) -> None:
        """Note the positions that the current forward pass covers at a point."""

    def message(self) -> str | None:
        """Return a sentence about the positions never reached; None if there are none."""


class TextSupport:
    """The answers for a network without text."""

    def use(self) -> None:
        """Ask this about texts from now on."""
        _in_use[0] = self

    def begin(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """A forward pass of a whole model begins."""

    def begin_encoder(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """The encoder of a model runs by itself, before the model does."""

    def pick(self, x: Tensor, point: Any, positions: Any) -> Tensor:  # noqa: ARG002
        """Return an activation at some positions."""
        return x

    def unreached(self, positions: Any) -> Unreached | None:  # noqa: ARG002
        """Return an object that keeps track of the positions of a hook."""
        return None

    def reshaped(self, forward_pass: Any, point: Any, before: Tensor, after: Tensor) -> Any:  # noqa: ARG002
        """Return the description of a pass from where a hook gave an activation another shape."""
        return forward_pass

    def rows(self, forward_pass: Any, which: Any) -> Any:  # noqa: ARG002
        """Return the description of a pass for some rows of its batch."""
        return forward_pass


_in_use = [TextSupport()]


def text() -> TextSupport:
    """Return the support in use."""
    return _in_use[0]
