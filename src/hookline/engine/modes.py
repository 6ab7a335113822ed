"""Torch modes that an interrupt cannot leave behind.

Torch calls a mode for every operation until it is removed from a stack, and an interrupt can skip the removal.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any, Self

import torch

from hookline.engine._torch.mode_stacks import (
    TorchDispatchMode,
    TorchFunctionMode,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from hookline.engine._torch.thread_state import set_grad_enabled
from hookline.engine.blocks import UndoBlock


class Modes(UndoBlock):
    """A block with torch modes on. Each of them must do nothing while its `is_over` is true."""

    def __init__(self, *modes: Any) -> None:
        self._modes = modes

    def open(self) -> None:
        """Put the modes on torch's stacks, the last one on top."""
        for mode in self._modes:
            mode.is_over = False
            if isinstance(mode, TorchDispatchMode):
                push_dispatch_mode(mode)
            else:
                push_function_mode(mode)

    def close(self) -> None:
        """Remove them."""
        for mode in self._modes:
            mode.is_over = True
        remove_ended()


def remove_ended() -> None:
    """Remove modes that are over from torch's stacks, wherever an interrupt may have left them."""
    above: list[Any] = []
    while any(map(_is_over, function_modes())):
        top = pop_function_mode()
        if not _is_over(top):
            above.append(top)
    while above:
        push_function_mode(above.pop())
    while any(map(_is_over, dispatch_modes())):
        top = pop_dispatch_mode()
        if not _is_over(top):
            above.append(top)
    while above:
        push_dispatch_mode(above.pop())


def _is_over(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    return bool(getattr(mode, "is_over", False))


class GradMode(ContextDecorator, UndoBlock):
    """`torch.set_grad_enabled` that restores the mode even if an interrupt arrives on exit."""

    def __init__(self, is_on: bool) -> None:
        self._wanted, self._before = is_on, torch.is_grad_enabled()

    def _recreate_cm(self) -> Self:
        """A new context for each call of a decorated function."""
        return type(self)(self._wanted)

    def open(self) -> None:
        """Set the gradient mode."""
        set_grad_enabled(self._wanted)

    def close(self) -> None:
        """Restore the gradient mode."""
        set_grad_enabled(self._before)
