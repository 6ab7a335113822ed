"""Torch modes that an interrupt cannot leave behind.

Torch calls a mode for every operation until it is removed from a stack, and an interrupt can skip the removal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Self

import torch

from hookline.engine._torch.checkpoint_regions import CACHES
from hookline.engine._torch.mode_stacks import (
    TorchDispatchMode,
    TorchFunctionMode,
    count_dispatch_modes,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from hookline.engine._torch.thread_state import set_grad_enabled
from hookline.engine._undo.blocks import UndoBlock


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


def has_caches() -> bool:
    """Whether a mode of selective checkpointing is on."""
    modes = dispatch_modes()
    return len(modes) > len(_without_caches(modes))


def uncached(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without the modes of selective checkpointing."""
    modes = dispatch_modes()
    rest = _without_caches(modes)
    if len(rest) == len(modes):
        return function(*args)
    try:
        _set_dispatch_modes(rest)
        return function(*args)
    finally:
        try:
            _set_dispatch_modes(modes)
        except BaseException:  # an interrupt
            _set_dispatch_modes(modes)
            raise


def _without_caches(modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    return [mode for mode in modes if not isinstance(mode, CACHES)]


def _set_dispatch_modes(modes: list[TorchDispatchMode]) -> None:
    while count_dispatch_modes():
        pop_dispatch_mode()
    for mode in modes:
        push_dispatch_mode(mode)


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
