"""What the engine asks about the text of a forward pass. `hookline.text` answers; without it, nothing is known of one.

The engine works on any module. Where a language model runs, actions and caches also want to know which positions of
which text a pass is about. The package above that knows says so here, once, with `use`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor, nn

Stream: TypeAlias = Literal["text", "encoder", "image"]
"""What the positions of a point are of: the text, what goes into an encoder beside it, or the patches of images."""


class _Current(threading.local):
    """The forward pass of a language model that is running in this thread: a `text.forward_pass.ForwardPass`."""

    def __init__(self) -> None:
        self.forward_pass: Any = None
        self.at_hook: Any = None  # the same when the innermost hook was called, which may have run the model since


current = _Current()


class Unreached(Protocol):
    """What a hook for some positions has not come to so far."""

    def clear(self) -> None:
        """Nothing has been missed yet."""

    def note(self, point: Any) -> None:
        """Look at the text of the forward pass going on, as the point sees it."""

    def message(self) -> str | None:
        """What was never reached, in words; None if all was."""


class TextSupport(Protocol):
    """What is known of texts."""

    def begin(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """A forward pass of a whole model begins."""

    def begin_encoder(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """The encoder of a model runs by itself, before the model does."""

    def pick(self, x: Tensor, point: Any, positions: Any) -> Tensor:
        """What an activation has at some positions."""

    def unreached(self, positions: Any) -> Unreached | None:
        """What keeps track of positions that a hook is for."""

    def rows(self, passing: Any, which: Any) -> Any:
        """What is known of a pass, of some rows of its batch."""


class _Nothing:
    """Of a network without texts."""

    def begin(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        pass

    begin_encoder = begin

    def pick(self, x: Tensor, point: Any, positions: Any) -> Tensor:  # noqa: ARG002
        return x

    def unreached(self, positions: Any) -> Unreached | None:  # noqa: ARG002
        return None

    def rows(self, passing: Any, which: Any) -> Any:  # noqa: ARG002
        return passing


class _Slot:
    def __init__(self) -> None:
        self.support: TextSupport = _Nothing()


_slot = _Slot()


def use(support: TextSupport) -> None:
    """From now on, ask this about texts."""
    _slot.support = support


def text() -> TextSupport:
    """What is known of texts."""
    return _slot.support
