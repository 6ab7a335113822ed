"""Taps inside a module, at values that are neither its input nor its output: see `interception.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import nn

from hookline.engine._inner import interception
from hookline.engine._inner.interception import FunctionInterceptor
from hookline.engine._undo.torch_hooks import remove_hook
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.taps import Tap, lock, tap_on


class InnerTap(Tap):
    """A tap inside a module; active while the module's scope is."""

    interceptor: ClassVar[type[FunctionInterceptor]]
    _scope: InterceptScope | None = None

    def acquire(self, module: nn.Module, user: object) -> None:
        """Look into `module` for `user`."""
        self.users.add(id(user))
        self._scope = self._scope or scope_of(module)
        self._scope.acquire(module, type(self), (self, user))

    def release(self, module: nn.Module, user: object) -> None:  # noqa: ARG002
        """Undo `acquire`."""
        self.users.discard(id(user))
        if self._scope is not None:
            self._scope.release((self, user))

    def ignored_in(self, module: nn.Module) -> frozenset[str]:
        """The names of the children of the module in which nothing is intercepted."""
        return self.interceptor.ignored_in(module)

    def around(self, module: nn.Module, captures: Mapping[Tap, Callable[[Any], None]]) -> Callable[..., Any]:
        """Return a function that calls the module with interception, as its scope would; no child may be ignored.

        `captures` are what a run that is alone does at the taps.
        """
        make, taps = self.interceptor, _taps_in(module, type(self))
        all_captures = [captures[tap] for tap in taps.values()] if captures.keys() >= {*taps.values()} else None

        def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            depth = len(pass_state.interceptors)
            interceptor = make.for_call(args, kwargs)(module, taps, (args, kwargs))
            interceptor.captures = all_captures
            interception.start(interceptor)
            try:
                output = function(*args, **kwargs)
            finally:
                interception.stop(depth)
            interceptor.check()
            return output

        return call


def _taps_in(module: nn.Module, tap_type: type[InnerTap]) -> dict[Kind, Tap]:
    return {kind: tap_on(module, kind, make=tap_type) for kind in tap_type.interceptor.kinds}


class InterceptScope:
    """Torch hooks before and after a module's call, between which torch functions are intercepted."""

    def __init__(self) -> None:
        self.users: set[tuple[int, int]] = set()
        self._hooks: list[tuple[nn.Module, Any]] = []
        self._is_whole = False

    def acquire(self, module: nn.Module, tap_type: type[InnerTap], user: tuple[Tap, object]) -> None:
        """Be around `module` for one more user."""
        self.users.add((id(user[0]), id(user[1])))
        if self._is_whole:
            return
        self._take_off()
        make = tap_type.interceptor
        children = [module.get_submodule(name) for name in make.ignored_in(module)]
        enter = partial(_enter, make, _taps_in(module, tap_type))
        muted, back = partial(_mute, module, 1), partial(_mute, module, -1)
        # Noted before they are attached, so that after an interrupt `release` finds all of them.
        self._hooks = [(module, enter), (module, _leave)]
        self._hooks += [(child, hook) for child in children for hook in (muted, back)]
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(_leave, prepend=True, always_call=True)
        for child in children:
            child.register_forward_pre_hook(muted)
            child.register_forward_hook(back, always_call=True)
        self._is_whole = True

    def release(self, user: tuple[Tap, object]) -> None:
        """Undo `acquire`."""
        self.users.discard((id(user[0]), id(user[1])))
        if not self.users:
            self._is_whole = False
            self._take_off()

    def _take_off(self) -> None:
        for module, hook in self._hooks:
            remove_hook(module, hook)
        self._hooks = []


def _enter(
    make: type[FunctionInterceptor], taps: dict[Kind, Tap], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    interception.start(make.for_call(args, kwargs)(module, taps, (args, kwargs)))


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    interceptor = interception.stop_in(module)
    if interceptor is not None and output is not None:  # None if the module raised
        interceptor.check()


def _mute(module: nn.Module, more: int, *_: Any) -> None:
    interception.mute(module, more)


_scopes: WeakKeyDictionary[nn.Module, InterceptScope] = WeakKeyDictionary()


def scope_of(module: nn.Module) -> InterceptScope:
    """The one scope of a module."""
    with lock:
        return _scopes.setdefault(module, InterceptScope())
