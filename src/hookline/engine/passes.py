"""What the engine asks about the text of a forward pass; `hookline.text` answers.

The engine works on any module. Where a language model runs, actions and caches also need the positions of the text that
a pass covers. `hookline.text` registers its answers with `TextSupport.use`; until then, nothing is known about texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Unreached(Protocol):
    """The positions of a hook that no forward pass has reached."""

    def clear(self) -> None:
        """Start over."""

    def note(self, point: Any) -> None:
        """Note the positions that the current forward pass covers at a point."""

    def message(self) -> str | None:
        """Return a sentence about the positions never reached; None if there are none."""


class Tally(Protocol):
    """At how many rows a hook acted at each position of the text."""

    source: Callable[[], None] | None
    """Notes what was done in a graph since it was last called, while one runs."""

    def clear(self) -> None:
        """Start over."""

    def note(self, x: Any, where: Tensor | None) -> None:
        """Note that the hook acted on a value in the current forward pass, at these positions or all of them."""

    def add(self, columns: Any, shape: torch.Size, where: Tensor | None) -> None:
        """Note that it acted on a value of this shape at columns of a text."""

    def restore(self, counts: Counter[int | None]) -> None:
        """Return to what was counted before."""

    def counts(self) -> Counter[int | None]:
        """The number of rows by position; None where there are no positions."""


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

    def tallies(self, hooks: Sequence[tuple[Any, Tensor | None]]) -> Sequence[Tally]:  # noqa: ARG002
        """Return, for the point and the mask of each hook, an object that counts where it acts; or nothing."""
        return ()

    def rows(self, forward_pass: Any, which: Any) -> Any:  # noqa: ARG002
        """Return the description of a pass for some rows of its batch."""
        return forward_pass


_in_use = [TextSupport()]


def text() -> TextSupport:
    """Return the support in use."""
    return _in_use[0]
