"""Skipping: modules that are not run for the length of a block, in this thread, but return a given value.

The rest of the model's own forward runs around them, with its own masks and positions.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hookline.engine._compiler import pausing
from hookline.engine._recording.detours import Detour, detour_of
from hookline.engine._torch.compiled_calls import ATTRIBUTE, need_detours
from hookline.engine._undo.blocks import UndoBlock
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import lock
from hookline.types import ModuleCall


class Skipping(UndoBlock):
    """A block in which these modules are skipped: neither their forward nor any hooks on them run."""

    def __init__(self, root: nn.Module, gives: Mapping[nn.Module, ModuleCall]) -> None:
        need_detours()
        self.root, self._gives, self._before = root, gives, pass_state.skipped
        self._detours = [detour_of(module) for module in gives]

    def open(self) -> None:
        """Skip them in this thread."""
        with pausing.tracing_lock(), lock:
            for detour in self._detours:
                detour.acquire(self)
        self._before = pass_state.skipped
        pass_state.skipped = {**self._before, **self._gives}

    def close(self) -> None:
        """Run them again."""
        if self.is_here:
            pass_state.skipped = self._before
        with pausing.tracing_lock(), lock:
            for detour in self._detours:
                detour.release(self)

    def is_on(self, root: nn.Module) -> bool:
        """Whether modules of this model are skipped."""
        return self.root is root

    def note_elsewhere(self, module: nn.Module) -> None:
        """Another thread calls a module: it is not skipped there."""


def skips_here() -> bool:
    """Whether any module is skipped in this thread."""
    return bool(pass_state.skipped)


def is_detoured(module: nn.Module) -> bool:
    """Whether calls of a module are led elsewhere, in any thread."""
    return isinstance(vars(module).get(ATTRIBUTE), Detour)
