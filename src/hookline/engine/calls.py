"""Counting the calls of modules in a forward pass, in each thread separately."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.engine._torch.frames import MODULE_CALL, callers
from hookline.engine._undo.blocks import interrupt_safe
from hookline.engine.pass_state import pass_state

if TYPE_CHECKING:
    from hookline.engine.taps import Tap


class Calls:
    """The number of the current call at each tap, in the current forward pass of the whole model, in one thread.

    A model that calls itself continues the count; a pass that a hook starts has a count of its own. What else a hook
    calls is not the model's, and is not counted: `cell#1` is the second call that the model makes.
    """

    failure: Any = None
    """The error of a hook in the current pass."""

    def __init__(self, *, is_home: bool = False) -> None:
        self.is_home = is_home  # whether calls outside a pass count too
        self.hooks = pass_state.hooks  # inside how many hooks those are made
        self.calls: dict[tuple[Tap, int], int] = {}
        self.passes_on: list[int] = []  # for each pass that is running: inside how many hooks
        self._handled: list[BaseException | None] = []  # and the exception that its caller is handling

    def begin(self, tap: Tap, root: nn.Module) -> None:
        """Begin a forward pass of the whole model, at `tap`."""
        if self.passes_on and not _is_running(root):
            self.passes_on = []  # torch does not report the end of a pass that was interrupted
        if pass_state.hooks not in self.passes_on:
            self.failure = None  # of a module that was called by itself
            self.calls = {key: call for key, call in self.calls.items() if key[1] < pass_state.hooks}
            self.calls[tap, pass_state.hooks] = 0
        self._handled[len(self.passes_on) :] = [sys.exception()]
        self.passes_on.append(pass_state.hooks)

    def raised(self) -> BaseException | None:
        """The exception that ends the innermost forward pass; None if it ends normally."""
        error = sys.exception()
        return None if self.passes_on and error is self._handled[len(self.passes_on) - 1] else error

    def end(self) -> None:
        """End the innermost forward pass."""
        if self.passes_on:
            self.passes_on.pop()
            del self._handled[len(self.passes_on) :]
        if not self.passes_on and not self.is_home:
            self.calls = {}  # a thread-local keeps its contents alive

    def is_of_hook(self) -> bool:
        """Whether the current call is made by a hook, in no pass of its own."""
        return pass_state.hooks != (self.passes_on[-1] if self.passes_on else self.hooks)

    def is_below_hook(self) -> bool:
        """Whether the current call is made by a hook of the outermost pass, or in a pass that such a hook started."""
        return pass_state.hooks != (self.passes_on[0] if self.passes_on else self.hooks)

    def is_on(self) -> bool:
        """Whether a forward pass of the whole model is running."""
        return bool(self.passes_on)


class _Elsewhere(threading.local):
    """The calls of each thread except the one that opened the context of hooks."""

    def __init__(self, make: type[Calls]) -> None:
        self.calls = make()


class Count:
    """The calls that a set of hooks has seen, in each thread separately."""

    def __init__(self, make: type[Calls] = Calls) -> None:
        self._make = make
        self._home: Any = None  # `Calls` of the thread that opened the context
        self._thread = 0
        self._elsewhere: _Elsewhere | None = None  # created on demand: it costs more than everything else here

    def open(self) -> None:
        """Enter a context of hooks in this thread, in which calls outside a pass count too."""
        thread = threading.get_ident()
        if self._thread != thread:
            self._thread, self._home = thread, self._make(is_home=True)
        self._home.hooks = pass_state.hooks

    def forget(self) -> None:
        """Count from 0 again."""
        self._home, self._thread, self._elsewhere = None, 0, None

    def here(self) -> Calls:
        """The calls of this thread."""
        if self._thread == threading.get_ident():
            return self._home
        if self._elsewhere is None:
            with _lock:
                self._elsewhere = self._elsewhere or _Elsewhere(self._make)
        return self._elsewhere.calls

    def next(self, tap: Tap) -> None:
        """Count one more call."""
        calls = (self._home if self._thread == threading.get_ident() else self.here()).calls
        key = tap, pass_state.hooks
        calls[key] = calls.get(key, -1) + 1

    def of(self, tap: Tap) -> int | None:
        """The number of the current call at `tap`; None where calls are not counted."""
        here: Calls = self._home if self._thread == threading.get_ident() else self.here()
        if not (here.passes_on or here.is_home) or (pass_state.hooks and here.is_of_hook()):
            return None
        return here.calls.get((tap, pass_state.hooks))


_lock = interrupt_safe(threading.Lock())


def is_call_of(frame: FrameType, module: nn.Module) -> bool:
    """Whether torch is calling `module` in this frame."""
    return frame.f_code is MODULE_CALL and frame.f_locals["self"] is module


def running_modules() -> list[nn.Module]:
    """The modules that torch is calling in this thread, innermost first."""
    return [frame.f_locals["self"] for frame in callers() if frame.f_code is MODULE_CALL]


def _is_running(module: nn.Module) -> bool:
    """Whether this thread is in an earlier call of `module` than the current one."""
    return sum(is_call_of(frame, module) for frame in callers()) > 1
