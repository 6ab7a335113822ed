"""Taps inside a module, at values that are neither its input nor its output: see `interception.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from hookline.engine._inner import interception
from hookline.engine._inner.interception import FunctionInterceptor
from hookline.engine._torch.hooks_on_modules import HookPlace, put_all, take_all
from hookline.engine.order import Kind
from hookline.engine.taps import Tap, lock, tap_on


class InnerTap(Tap):
    """A tap inside a module. What is attached to the module is a scope, which all taps inside it share."""

    interceptor: ClassVar[type[FunctionInterceptor]]

    def acquire(self, module: nn.Module, user: object) -> None:
        """Look into `module` for `user`."""
        scope_of(module).acquire(module, type(self), (id(self), id(user)))

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`."""
        scope_of(module).release(module, (id(self), id(user)))


class InterceptScope:
    """Torch hooks before and after a module's call, between which torch functions are intercepted."""

    def __init__(self) -> None:
        self.users: set[object] = set()
        self._hooks: list[tuple[HookPlace, nn.Module | None, Any]] = []
        """Places, modules and hooks; None for the module itself, which must not be kept alive from here."""
        self._children: list[nn.Module] | None = None

    def acquire(self, module: nn.Module, tap_type: type[InnerTap], user: object) -> None:
        """Be around `module` for one more user."""
        if not self.users:
            self._plan(module, tap_type)
        self.users.add(user)
        if len(self.users) == 1:
            put_all([(place, child or module, hook) for place, child, hook in self._hooks])

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`. Safe to call twice."""
        self.users.discard(user)
        if not self.users:
            take_all([(place, child or module, hook) for place, child, hook in self._hooks])

    def _plan(self, module: nn.Module, tap_type: type[InnerTap]) -> None:
        """Find out what to attach where, once unless a child was replaced."""
        make = tap_type.interceptor
        children = [module.get_submodule(name) for name in make.ignored_in(module)]
        if children == self._children:
            return
        taps = {kind: tap_on(module, kind, make=tap_type) for kind in make.kinds}
        for tap in taps.values():
            tap.users = self.users  # type: ignore[assignment]
        muted, back = partial(_mute, ref(module), 1), partial(_mute, ref(module), -1)
        before, after = partial(HookPlace, is_before=True), partial(HookPlace, is_before=False, is_always=True)
        self._hooks = [
            (before(is_first=False), None, partial(_enter, make, taps)),
            (after(is_first=True), None, _leave),
            *((before(is_first=False), child, muted) for child in children),
            *((after(is_first=False), child, back) for child in children),
        ]
        self._children = children


def _enter(
    make: type[FunctionInterceptor], taps: dict[Kind, Tap], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    interception.start(make.for_call(args, kwargs)(module, taps, (args, kwargs)))


def _leave(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
    interceptor = interception.stop_in(module)
    if interceptor is not None and output is not None:  # None if the module raised
        interceptor.check()


def _mute(module: ref[nn.Module], more: int, *_: Any) -> None:
    interception.mute(module(), more)


_scopes: WeakKeyDictionary[nn.Module, InterceptScope] = WeakKeyDictionary()


def scope_of(module: nn.Module) -> InterceptScope:
    """The one scope of a module."""
    with lock:
        scope = _scopes.get(module)
        if scope is None:
            scope = _scopes[module] = InterceptScope()
        return scope
