"""Detours: calls of modules that go somewhere else, in this thread only.

torch looks in an attribute of a module for a compiled version of its call, and calls that instead of the module and its
hooks. Modules are skipped that way (`skipping.py`), and recorded at a lower cost than that of torch's hooks
(`recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from hookline.engine._torch import compiled_calls
from hookline.engine._torch.bytecode import code_or_none
from hookline.engine._torch.compiled_calls import can_detour, looks_for_hooks, takes_detours, traceable_call
from hookline.engine._torch.frames import frame_at
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine._torch.mode_stacks import count_dispatch_modes
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import active
from hookline.engine.taps import lock, tell_other_threads

_is_traced, _is_exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
PLACE = compiled_calls.ATTRIBUTE
"""The attribute that torch calls instead of a module and its hooks, if it is not None."""


class Detour:
    """Leads the calls of one module, in threads that have a way for it; those of other threads are unchanged.

    Torch reads the attribute twice, to see whether it is None and to call it; Python does not change threads between.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users: set[int] = set()
        self.own: Any = None
        self.alone: tuple[Any, ...] | None = None
        """The runs of a thread in which one run leads the calls, and no other acts on anything."""
        self.way: Any = None
        """What it does with them."""

    def acquire(self, user: object) -> None:
        """Lead the calls of the module for `user`. The caller holds `taps.lock`."""
        self.users.add(id(user))
        attributes = self.module.__dict__
        own = attributes.get(PLACE)
        if own is not self:
            self.own = own
            attributes[PLACE] = self

    def release(self, user: object) -> None:
        """Undo `acquire`. Safe to call twice."""
        self.users.discard(id(user))
        if not self.users and (attributes := self.module.__dict__).get(PLACE) is self:
            if self.own is None:
                del attributes[PLACE]
            else:
                attributes[PLACE] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch instead of the module and its hooks."""
        if _is_traced() or _is_exporting():
            return self.original_call(*args, **kwargs)  # another thread leads calls of what this one compiles
        runs = active.get()
        is_plain = current_graph_task() == -1 and not count_dispatch_modes()
        if runs is self.alone and not pass_state.skipped and is_plain:  # nearly always
            return self.way(args, kwargs)
        way = pass_state.skipped.get(self.module) if pass_state.skipped else None
        if way is not None:
            return way(args, kwargs)
        for run in runs:
            if run.is_open and (way := run.ways.get(self.module)) is not None:
                if len(runs) == 1 and is_plain:
                    return way(args, kwargs)
                return run.with_hooks(self.module, args, kwargs)
        tell_other_threads(self.users, self.module)
        called: Any = frame_at(1).f_locals.get("self")
        if called is not self.module and self.own is None and getattr(called, PLACE, None) is self:
            return traceable_call(called)(*args, **kwargs)  # a replica, which has the attributes of the module
        return self.original_call(*args, **kwargs)

    @property
    def original_call(self) -> Callable[..., Any]:
        """The module's own call, with its hooks."""
        return self.own or traceable_call(self.module)

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
        found = _detours.get(id(module))
        if found is None:
            found = _detours[id(module)] = Detour(module)
        return found


def is_interceptable(module: nn.Module) -> bool:
    """Whether every call of the module that fires its hooks takes its detour."""
    return can_detour() and all(map(takes_detours, _defined(module, "__call__")))


def called_if_hooked(root: nn.Module) -> set[nn.Module]:
    """The modules that need torch hooks: `nn.TransformerEncoderLayer` looks for those of its children.

    So do those that are called by `_call_impl`, which takes no detour.
    """
    parents = [
        module
        for module in root.modules()
        if any(looks_for_hooks(code_or_none(each)) for each in _defined(module, "forward"))
    ]
    return {module for parent in parents for module in parent.modules() if module is not parent}


def _defined(module: nn.Module, name: str) -> list[Any]:
    """What the classes of a module define as `name`."""
    return [vars(each)[name] for each in type(module).__mro__ if name in vars(each)]
