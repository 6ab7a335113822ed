"""Detours: calls of modules that go somewhere else, in this thread only.

torch looks in an attribute of a module for a compiled version of its call, and calls that instead of the module and its
hooks. Modules are skipped that way (`skipping.py`), and recorded at a lower cost than that of torch's hooks
(`recording.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from hookline.engine import blocks, compiling
from hookline.engine.calls import callers, is_call_of
from hookline.engine.schedule import Way, active
from hookline.engine.taps import lock

PLACE = "_compiled_call_impl"
"""The attribute that torch calls instead of a module and its hooks, if it is not None."""


class _Here(threading.local):
    """The modules that are skipped in this thread, with what they return instead."""

    def __init__(self) -> None:
        self.skipped: Mapping[nn.Module, Way] = {}


here = _Here()


class Detour:
    """Leads the calls of one module, in threads that have a way for it; those of other threads are unchanged.

    Torch reads the attribute twice, to see whether it is None and to call it; Python does not change threads between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._users: set[int] = set()
        self._own: Any = None

    def acquire(self, user: object) -> None:
        """Lead the calls of the module for `user`. The caller holds `taps.lock`."""
        self._users.add(id(user))
        attributes = self.module.__dict__
        own = attributes.get(PLACE)
        if own is not self:
            self._own = own
            attributes[PLACE] = self

    def release(self, user: object) -> None:
        """Undo `acquire`. Safe to call twice."""
        self._users.discard(id(user))
        if not self._users and (attributes := self.module.__dict__).get(PLACE) is self:
            if self._own is None:
                del attributes[PLACE]
            else:
                attributes[PLACE] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch instead of the module and its hooks."""
        if torch.compiler.is_compiling() and compiling.is_traced():
            return self.go_on(*args, **kwargs)  # another thread leads the calls while this one compiles the module
        way = here.skipped.get(self.module) if here.skipped else None
        for run in active.get() if way is None else ():
            if run.is_open and (way := run.ways.get(self.module)) is not None:
                break
        if way is not None:
            return way(args, kwargs)
        self._tell_other_threads()
        return self.go_on(*args, **kwargs)

    @property
    def go_on(self) -> Callable[..., Any]:
        """The module's own call, with its hooks."""
        return self._own or self.module._call_impl

    def _tell_other_threads(self) -> None:
        """If the model started this thread, a run of another one misses a call."""
        for run in [each for user in list(self._users) if (each := blocks.find(user)) is not None]:
            if not run.is_here and not any(is_call_of(frame, run.root) for frame in callers()):
                run.note_elsewhere(self.module)


_detours: WeakValueDictionary[int, Detour] = WeakValueDictionary()
"""By the `id` of their modules, which they hold."""


def detour_of(module: nn.Module) -> Detour:
    """The one detour of a module."""
    with lock:
        found = _detours.get(id(module))
        if found is None:
            found = _detours[id(module)] = Detour(module)
        return found


def leads(module: nn.Module) -> bool:
    """Whether every call of the module that fires its hooks takes its detour."""
    call = type(module).__call__
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    return call is nn.Module.__call__ or ("__call__" in names and "_call_impl" not in names)
