"""Torch modes that an interrupt cannot leave behind.

Torch calls a mode for every operation until it is removed from a stack, and an interrupt can skip the removal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Self

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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
                torch._C._push_on_torch_dispatch_stack(mode)
            else:
                overrides._push_mode(mode)

    def close(self) -> None:
        """Remove them."""
        for mode in self._modes:
            mode.is_over = True
        remove_ended()


def remove_ended() -> None:
    """Remove modes that are over from torch's stacks, wherever an interrupt may have left them."""
    above: list[Any] = []
    while any(map(_is_over, overrides._get_current_function_mode_stack())):
        top = overrides._pop_mode()
        if not _is_over(top):
            above.append(top)
    while above:
        overrides._push_mode(above.pop())
    while any(map(_is_over, _get_current_dispatch_mode_stack())):
        top = torch._C._pop_torch_dispatch_stack(None)
        if not _is_over(top):
            above.append(top)
    while above:
        torch._C._push_on_torch_dispatch_stack(above.pop())


def _is_over(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    return bool(getattr(mode, "is_over", False))


_CACHES = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
"""The modes of selective checkpointing: the first keeps results in a region's first run, the other returns them again.

They go by the operator and by how often it was called. So they must not see what hooks compute: a hook that only reads
is not called in the second run, where the model would get its results.
"""


def has_caches() -> bool:
    """Whether a mode of selective checkpointing is on."""
    modes = _get_current_dispatch_mode_stack()
    return len(modes) > len(_without_caches(modes))


def uncached(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without the modes of selective checkpointing."""
    modes = _get_current_dispatch_mode_stack()
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
    return [mode for mode in modes if not isinstance(mode, _CACHES)]


def _set_dispatch_modes(modes: list[TorchDispatchMode]) -> None:
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


class GradMode(ContextDecorator, UndoBlock):
    """`torch.set_grad_enabled` that restores the mode even if an interrupt arrives on exit."""

    def __init__(self, is_on: bool) -> None:
        self._wanted, self._before = is_on, torch.is_grad_enabled()

    def _recreate_cm(self) -> Self:
        """A new context for each call of a decorated function."""
        return type(self)(self._wanted)

    def open(self) -> None:
        """Set the gradient mode."""
        torch._C._set_grad_enabled(self._wanted)

    def close(self) -> None:
        """Restore the gradient mode."""
        torch._C._set_grad_enabled(self._before)
