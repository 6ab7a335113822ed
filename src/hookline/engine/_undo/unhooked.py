"""A block in which no hooks act on a model: not those of contexts, and not permanent ones."""

from __future__ import annotations

from torch import nn

from hookline.engine._undo.blocks import UndoBlock
from hookline.engine.schedule import active
from hookline.engine.taps import taps_of


class Unhooked(UndoBlock):
    """A block in which no hooks of hookline act on a model. The caller holds `undo.attaching`."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(tap, tap.permanent) for module in root.modules() for tap in taps_of(module)]
        self._active = active.get()

    def open(self) -> None:
        """Disable all hooks."""
        active.set(())
        for tap, _ in self._before:
            tap.permanent = ()

    def close(self) -> None:
        """Enable them again."""
        for tap, permanent in self._before:
            tap.permanent = permanent
        active.set(self._active)
