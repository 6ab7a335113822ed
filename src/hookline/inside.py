"""Taps inside a module, while it runs, where no event of a module is.

What a module computes in the middle of its forward it computes with a few functions of torch. While a module runs of
which a run wants to see the inside, those calls are watched (in this thread, in this module, in no other), and what
goes in and comes out flows past taps. What is watched for is said in `attention.py` and `experts.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.overrides import TorchFunctionMode

from hookline.taps import Kind, Tap, lock, now, tap_on


class InnerTap(Tap):
    """A tap inside a module; there while the module's gate is."""

    watch: ClassVar[type[Watching]]

    def acquire(self, module: nn.Module, user: object) -> None:
        """Look into `module` for `user`."""
        self.users.add(id(user))
        gate_of(module).acquire(module, self.watch, (self, user))

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`."""
        self.users.discard(id(user))
        gate_of(module).release((self, user))


class Watching(TorchFunctionMode):
    """Sees every call of a torch function in one module."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Children in which nothing is to be seen."""

    def __init__(self, module: nn.Module, kinds: tuple[Kind, ...], make: type[InnerTap]) -> None:
        super().__init__()
        self.module = module
        self.away = 0  # in how many of those children it is
        self.taps = {kind: tap_on(module, kind, make=make) for kind in kinds}


class Gate:
    """Torch hooks around a module, between which the calls of torch are watched."""

    def __init__(self) -> None:
        self.users: set[tuple[int, int]] = set()
        self.handles: list[Any] = []

    def acquire(self, module: nn.Module, watch: type[Watching], user: tuple[Tap, object]) -> None:
        """Be around `module` for one more user."""
        self.users.add((id(user[0]), id(user[1])))
        if not self.handles:
            self.handles.append(module.register_forward_pre_hook(lambda module, _args: _enter(watch, module)))
            self.handles.append(module.register_forward_hook(_leave, prepend=True, always_call=True))
            for name in watch.ignored & module._modules.keys():
                child = module.get_submodule(name)
                self.handles.append(child.register_forward_pre_hook(lambda *_: _look_away(1)))
                self.handles.append(child.register_forward_hook(lambda *_: _look_away(-1), always_call=True))

    def release(self, user: tuple[Tap, object]) -> None:
        """Undo `acquire`."""
        self.users.discard((id(user[0]), id(user[1])))
        if not self.users:
            while self.handles:
                self.handles[-1].remove()
                self.handles.pop()


def _enter(watch: type[Any], module: nn.Module) -> None:
    watching = watch(module)
    watching.__enter__()
    now.watches.append(watching)


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    mine = [depth for depth, watch in enumerate(now.watches) if watch.module is module]
    if mine:
        stop_watching(mine[-1])


def _look_away(more: int) -> None:
    if now.watches:
        now.watches[-1].away += more


def stop_watching(depth: int) -> None:
    """Leave every module entered since there were `depth` of them; some may have ended in an interrupt."""
    while len(now.watches) > depth:
        now.watches.pop().__exit__(None, None, None)


_gates: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()


def gate_of(module: nn.Module) -> Gate:
    """The one gate of a module."""
    with lock:
        return _gates.setdefault(module, Gate())
