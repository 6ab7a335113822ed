"""Taps inside a module, while it runs, where no event of a module is.

What a module computes in the middle of its forward it computes with a few functions of torch. While a module runs of
which a run wants to see the inside, those calls are watched (in this thread, in this module, in no other), and what
goes in and comes out flows past taps. What is watched for is said in `attention.py` and `experts.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import nn, overrides
from torch.overrides import TorchFunctionMode

from hookline.engine.taps import Kind, Tap, lock, now, tap_on
from hookline.engine.torch_hooks import take_off


class InnerTap(Tap):
    """A tap inside a module; there while the module's gate is."""

    interceptor: ClassVar[type[FunctionInterceptor]]

    def acquire(self, module: nn.Module, user: object) -> None:
        """Look into `module` for `user`."""
        self.users.add(id(user))
        scope_of(module).acquire(module, self.interceptor, (self, user))

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`."""
        self.users.discard(id(user))
        scope_of(module).release((self, user))


class FunctionInterceptor(TorchFunctionMode):
    """Sees every call of a torch function in one module."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Children in which nothing is to be seen."""

    def __init__(self, module: nn.Module, kinds: tuple[Kind, ...], make: type[InnerTap]) -> None:
        super().__init__()
        self.module = module
        self.muted = 0  # in how many of those children it is; it watches nothing while it is in any
        self.is_over = False
        self.taps = {kind: tap_on(module, kind, make=make) for kind in kinds}


class InterceptScope:
    """Torch hooks around a module, between which the calls of torch are watched."""

    def __init__(self) -> None:
        self.users: set[tuple[int, int]] = set()
        self._hooks: list[tuple[nn.Module, Any]] = []
        self._is_whole = False

    def acquire(self, module: nn.Module, watch: type[FunctionInterceptor], user: tuple[Tap, object]) -> None:
        """Be around `module` for one more user."""
        self.users.add((id(user[0]), id(user[1])))
        if self._is_whole:
            return
        self._take_off()
        children = [module.get_submodule(name) for name in watch.ignored & module._modules.keys()]
        enter, muted, back = partial(_enter, watch), partial(_mute, 1), partial(_mute, -1)
        # Noted before they are put on, so that an interrupt in the middle leaves nothing that `release` does not find.
        self._hooks = [(module, enter), (module, _leave)]
        self._hooks += [(child, hook) for child in children for hook in (muted, back)]
        module.register_forward_pre_hook(enter)
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
            take_off(module, hook)
        self._hooks = []


def _enter(watch: type[Any], module: nn.Module, _args: Any) -> None:
    interceptor = watch(module)
    now.watches.append(interceptor)
    interceptor.__enter__()


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    mine = [depth for depth, watch in enumerate(now.watches) if watch.module is module]
    if mine:
        stop_intercepting(mine[-1])


def _mute(more: int, *_: Any) -> None:
    if now.watches:
        now.watches[-1].muted += more


def stop_intercepting(depth: int) -> None:
    """Leave every module entered since there were `depth` of them; some may have ended in an interrupt."""
    while len(now.watches) > depth:
        interceptor = now.watches[-1]
        # Torch takes a mode off its stack while it is called, and an interrupt in that moment brings it back late:
        # when the traceback is freed. It must do nothing then.
        interceptor.is_over, interceptor.muted = True, 1
        sweep()
        now.watches.pop()


def sweep() -> None:
    """Take what is over from torch's stack of modes, wherever in it an interrupt may have left it."""
    above: list[Any] = []
    while any(
        isinstance(mode, FunctionInterceptor) and mode.is_over for mode in overrides._get_current_function_mode_stack()
    ):
        top = overrides._pop_mode()
        if not (isinstance(top, FunctionInterceptor) and top.is_over):
            above.append(top)
    while above:
        overrides._push_mode(above.pop())


_scopes: WeakKeyDictionary[nn.Module, InterceptScope] = WeakKeyDictionary()


def scope_of(module: nn.Module) -> InterceptScope:
    """The one gate of a module."""
    with lock:
        return _scopes.setdefault(module, InterceptScope())
