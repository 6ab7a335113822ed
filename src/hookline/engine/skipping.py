"""Skipping: modules that are not run, in this thread and for a while, but give what they are told to give.

The model's own forward goes on around them, so masks, positions and all else are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hookline.engine.blocks import Block
from hookline.engine.taps import lock, now

Give = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""What a module gives instead, for the arguments of its call."""

_users: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()
_own: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""What a module has in this place of its own, if it was compiled."""

_PLACE = "_compiled_call_impl"
"""What torch calls instead of a module, hooks and all, if it is there."""


class Skipping(Block):
    """A block in which these modules are skipped: neither their forward nor anybody's hooks on them are run."""

    def __init__(self, root: nn.Module, gives: Mapping[nn.Module, Give]) -> None:
        self._root, self._gives, self._before = root, gives, now.skipped

    def open(self) -> None:
        """Skip them in this thread."""
        for module in self._gives:
            _detour(module, self)
        self._before = now.skipped
        now.skipped = {**self._before, **self._gives}

    def close(self) -> None:
        """Run them again."""
        if self.is_here:
            now.skipped = self._before
        for module in self._gives:
            _restore(module, self)

    def is_on(self, root: nn.Module) -> bool:
        """Whether modules of this model are skipped."""
        return self._root is root


def _detour(module: nn.Module, user: object) -> None:
    """Let the module's calls come by here; those of other threads go on as they were."""
    with lock:
        users = _users.setdefault(module, set())
        users.add(user)
        if module in _own:
            return
        _own[module] = {_PLACE: vars(module)[_PLACE]} if _PLACE in vars(module) else {}
        go_on = getattr(module, _PLACE) or module._call_impl

        def detour(*args: Any, **kwargs: Any) -> Any:
            give = now.skipped.get(module)
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
