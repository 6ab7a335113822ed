"""Detours: calls of modules that go somewhere else, in one thread only.

torch looks in an attribute of a module for a compiled version of its call, and calls that instead of the module and its
hooks. Modules are skipped that way (`skipping.py`).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from hookline.engine._torch.compiled_calls import ATTRIBUTE, call_with_hooks
from hookline.engine._torch.frames import frame_at
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import lock, tell_other_threads

_is_traced, _is_exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting


class Detour:
    """Leads the calls of one module elsewhere in threads that skip it; those of other threads are unchanged.

    Torch reads the attribute twice, to see whether it is None and to call it; Python does not change threads between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users: set[int] = set()
        self.own: Any = None

    def acquire(self, user: object) -> None:
        """Lead the calls of the module for `user`. The caller holds `taps.lock`."""
        self.users.add(id(user))
        attributes = self.module.__dict__
        own = attributes.get(ATTRIBUTE)
        if own is not self:
            self.own = own
            attributes[ATTRIBUTE] = self

    def release(self, user: object) -> None:
        """Undo `acquire`. Safe to call twice."""
        self.users.discard(id(user))
        if not self.users and (attributes := self.module.__dict__).get(ATTRIBUTE) is self:
            if self.own is None:
                del attributes[ATTRIBUTE]
            else:
                attributes[ATTRIBUTE] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch instead of the module and its hooks."""
        if not (_is_traced() or _is_exporting()):  # another thread leads calls of what this one compiles
            if (instead := pass_state.skipped.get(self.module)) is not None:
                return instead(args, kwargs)
            tell_other_threads(self.users, self.module)
            called: Any = frame_at(1).f_locals.get("self")
            if called is not self.module and self.own is None and getattr(called, ATTRIBUTE, None) is self:
                return call_with_hooks(called)(*args, **kwargs)  # a replica, which has the attributes of the module
        return (self.own or call_with_hooks(self.module))(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of the module has no detour."""
        return _nothing, ()


def _nothing() -> None:
    pass


_detours: WeakValueDictionary[int, Detour] = WeakValueDictionary()
"""By the `id` of their modules, which they hold."""


def detour_of(module: nn.Module) -> Detour:
    """The one detour of a module."""
    with lock:
        detour = _detours.get(id(module))
        if detour is None:
            detour = _detours[id(module)] = Detour(module)
        return detour
