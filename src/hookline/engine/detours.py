"""Detours: calls of modules that go somewhere else, in this thread only.

torch looks in an attribute of a module for a compiled version of its call, and calls that instead of the module and its
hooks. Modules are skipped that way (`skipping.py`), and recorded at a lower cost than that of torch's hooks
(`recording.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import _C, nn

from hookline.engine.schedule import Way, active
from hookline.engine.taps import lock, tell_other_threads

_is_traced, _is_exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting
_graph_task, _dispatch_modes = _C._current_graph_task_id, _C._len_torch_dispatch_stack
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
            return self.go_on(*args, **kwargs)  # another thread leads the calls while this one compiles the module
        runs = active.get()
        if runs is self.alone and not here.skipped and _graph_task() == -1 and not _dispatch_modes():  # nearly always
            return self.way(args, kwargs)
        way = here.skipped.get(self.module) if here.skipped else None
        if way is not None:
            return way(args, kwargs)
        for run in runs:
            if run.is_open and (way := run.ways.get(self.module)) is not None:
                if len(runs) == 1 and _graph_task() == -1 and not _dispatch_modes():
                    return way(args, kwargs)
                return run.with_hooks(self.module, args, kwargs)
        tell_other_threads(self.users, self.module)
        called: Any = sys._getframe(1).f_locals.get("self")
        if called is not self.module and self.own is None and getattr(called, PLACE, None) is self:
            return called._call_impl(*args, **kwargs)  # a replica, which has the attributes of the module
        return self.go_on(*args, **kwargs)

    @property
    def go_on(self) -> Callable[..., Any]:
        """The module's own call, with its hooks."""
        return self.own or self.module._call_impl

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


def leads(module: nn.Module) -> bool:
    """Whether every call of the module that fires its hooks takes its detour."""
    return all(map(_leads, _defined(module, "__call__")))


def _leads(call: Any) -> bool:
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    return call is nn.Module._wrapped_call_impl or ("__call__" in names and "_call_impl" not in names)


def called_if_hooked(root: nn.Module) -> set[nn.Module]:
    """The modules that need torch hooks: `nn.TransformerEncoderLayer` looks for those of its children.

    So do those that are called by `_call_impl`, which takes no detour.
    """
    parents = [
        module
        for module in root.modules()
        if any(_looks_for_hooks(getattr(each, "__code__", None)) for each in _defined(module, "forward"))
    ]
    return {module for parent in parents for module in parent.modules() if module is not parent}


def _defined(module: nn.Module, name: str) -> list[Any]:
    """What the classes of a module define as `name`."""
    return [vars(each)[name] for each in type(module).__mro__ if name in vars(each)]


@lru_cache(maxsize=512)
def _looks_for_hooks(code: Any) -> bool:
    """Whether a function, or one inside it, mentions the attribute in which torch keeps hooks, or torch's own call."""
    if not isinstance(code, CodeType):
        return False
    is_found = any(name in (*code.co_names, *code.co_consts) for name in ("_forward_hooks", "_call_impl"))
    return is_found or any(map(_looks_for_hooks, code.co_consts))
