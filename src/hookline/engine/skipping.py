"""Skipping: modules that are not run for the length of a block, in this thread, but return a given value.

The rest of the model's own forward runs around them, with its own masks and positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hookline.engine.blocks import UndoBlock
from hookline.engine.taps import lock

Give = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Returns the value of a skipped module, given the arguments of its call."""

_users: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()
_own: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""The attribute that a compiled module had before."""


class _Skipped(threading.local):
    """The modules that are skipped in this thread, with what they return instead."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, Give] = {}


_skipped = _Skipped()

_PLACE = "_compiled_call_impl"
"""The attribute that torch calls instead of a module and its hooks, if it exists."""


class Skipping(UndoBlock):
    """A block in which these modules are skipped: neither their forward nor any hooks on them run."""

    def __init__(self, root: nn.Module, gives: Mapping[nn.Module, Give]) -> None:
        self._root, self._gives, self._before = root, gives, _skipped.modules

    def open(self) -> None:
        """Skip them in this thread."""
        for module in self._gives:
            _detour(module, self)
        self._before = _skipped.modules
        _skipped.modules = {**self._before, **self._gives}

    def close(self) -> None:
        """Run them again."""
        if self.is_here:
            _skipped.modules = self._before
        for module in self._gives:
            _restore(module, self)

    def is_on(self, root: nn.Module) -> bool:
        """Whether modules of this model are skipped."""
        return self._root is root


def skips_here() -> bool:
    """Whether any module is skipped in this thread."""
    return bool(_skipped.modules)


def is_detoured(module: nn.Module) -> bool:
    """Whether a module is skipped in any thread."""
    return module in _own


def _detour(module: nn.Module, user: object) -> None:
    """Redirect the module's calls in this thread; those of other threads are unchanged."""
    with lock:
        users = _users.setdefault(module, set())
        users.add(user)
        if module in _own:
            return
        _own[module] = {_PLACE: vars(module)[_PLACE]} if _PLACE in vars(module) else {}
        go_on = getattr(module, _PLACE) or module._call_impl

        def detour(*args: Any, **kwargs: Any) -> Any:
            give = _skipped.modules.get(module)
            return go_on(*args, **kwargs) if give is None else give(args, kwargs)

        vars(module)[_PLACE] = detour


def _restore(module: nn.Module, user: object) -> None:
    with lock:
        users = _users.get(module, set())
        users.discard(user)
        if not users and module in _own:
            own = _own[module]
            if own:
                vars(module).update(own)
            else:
                vars(module).pop(_PLACE, None)
            del _own[module]
