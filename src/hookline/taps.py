"""Taps: the torch hooks that hookline puts on a module, and only while somebody needs them.

A tap sits on one event of one module (its input or its output) and is shared by all runs that listen there, in
whatever thread. When the module is called, the tap asks which of those runs is the one going on in *this* thread or
task, and lets the value flow through that run's actions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline import recompute
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.actions import Action

Step: TypeAlias = Callable[[Any], Any]


class Kind(Enum):
    """Which event of a module. All but the first two are inside an attention module: see `attention.py`."""

    INPUT = "input"
    OUTPUT = "output"
    QUERY = "query"
    KEY = "key"
    SCORES = "scores"
    PATTERN = "pattern"

    @property
    def is_inner(self) -> bool:
        """Whether it happens while the module runs."""
        return self not in (Kind.INPUT, Kind.OUTPUT)


class _Now(threading.local):
    """What is going on in this thread at this moment."""

    def __init__(self) -> None:
        self.calls: dict[Tap, int] = {}  # which call each tap has come to in this forward pass
        self.call: int | None = None  # the call that the actions now running see
        self.starts_with_grad = False  # whether gradients were on when this forward pass began
        self.kept: dict[Any, Any] = {}  # what earlier events let pass, for points that need it: see `memo.py`
        self.watches: list[Any] = []  # the attention modules now running that are looked into


now = _Now()
lock = threading.RLock()
"""Held while taps are put on modules or taken off."""


class Routes:
    """Which actions wait at which tap. A run is one of these, and so is a set of standing hooks."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions: Sequence[Action] = ()
        self.waiting: dict[Tap, list[Action]] = {}
        self.steps: dict[Tap, list[Step]] = {}
        self.set(actions)

    def set(self, actions: Sequence[Action]) -> None:
        """Route these actions, and no others. Threads that are reading see the old routes or the new."""
        waiting: dict[Tap, list[Action]] = {}
        for action in actions:
            waiting.setdefault(action.tap, []).append(action)
        self.steps = {tap: arrange(some) for tap, some in waiting.items()}
        self.waiting = waiting
        self.actions = actions


def arrange(actions: list[Action]) -> list[Step]:
    """The actions at one tap as steps, in the order they are taken."""
    steps: list[Step] = []
    for action in sorted(actions, key=_turn) if len(actions) > 1 else actions:
        action.extend(steps)
    return steps


def _turn(action: Action) -> tuple[int, int]:
    return action.phase, action.order


active: ContextVar[tuple[Routes, ...]] = ContextVar("hookline_active", default=())
"""The runs going on in this thread or task, the outermost first."""


class Tap:
    """A torch hook on one event of one module."""

    def __init__(self, kind: Kind, *, late: bool = False) -> None:
        self.kind, self.late = kind, late
        self.users = 0
        self.handle: RemovableHandle | None = None
        self.standing: tuple[Routes, ...] = ()

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Called by torch with `(module, args, kwargs)` or `(module, args, kwargs, output)`."""
        if len(rest) != (2 if self.kind is Kind.OUTPUT else 1):
            # Another thread took the tap off when torch was about to call it, without keywords then; so no run of
            # this thread needs it.
            return None
        value = rest[1] if self.kind is Kind.OUTPUT else (args, rest[0])
        new = self.flow(value)
        return None if new is value else new

    # A compiler must not trace into a tap: it would bake the hooks of one run into the graph for good.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def flow(self, value: Any) -> Any:
        """What becomes of a value that passes here, in the run going on in this thread."""
        # Inside a backward pass a checkpointed region may be running a second time.
        in_backward = torch._C._current_graph_task_id() != -1
        again = recompute.runs_in_second_run() if in_backward else None
        steps = self._steps(active.get() if again is None else again)
        if not steps:
            return value
        if again is None:
            now.call = now.calls[self] = now.calls.get(self, -1) + 1
        else:
            now.call = None
        for step in steps:
            value = step(value)
        return value

    def _steps(self, runs: Sequence[Routes]) -> list[Step]:
        """What these runs, and those who always want something, want done here."""
        if self.standing:
            runs = (*runs, *self.standing)
        if len(runs) == 1:
            return runs[0].steps.get(self, [])
        return arrange([action for run in runs for action in run.waiting.get(self, ())])

    def is_wanted(self) -> bool:
        """Whether a value that passes here now would be looked at."""
        if torch._C._current_graph_task_id() != -1:
            return True  # perhaps in a second run of a checkpointed region; to find out costs more than to look
        return bool(self.standing) or any(self in run.steps for run in active.get())

    def acquire(self, module: nn.Module) -> None:
        """Be on `module` from now on, once more."""
        if self.users == 0:
            # First in line, so that other people's hooks see what we changed; a late tap last, to see what they
            # changed.
            if self.handle is None:
                on_output = self.kind is Kind.OUTPUT
                register = module.register_forward_hook if on_output else module.register_forward_pre_hook
                self.handle = register(self, prepend=not self.late, with_kwargs=True)
            else:
                self._put_back(module, self.handle.id)
        self.users += 1

    def _put_back(self, module: nn.Module, key: int) -> None:
        """Register again under the number torch gave before: a new handle would cost as much as all the rest."""
        if self.kind is Kind.OUTPUT:
            hooks, with_kwargs = module._forward_hooks, module._forward_hooks_with_kwargs
        else:
            hooks, with_kwargs = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
        with_kwargs[key] = True
        hooks[key] = self
        if not self.late:
            hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]

    def release(self) -> None:
        """Undo one `acquire`; with the last one the module is as it was."""
        self.users -= 1
        if self.users == 0 and self.handle is not None:
            self.handle.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HooklineError(
            "a model cannot be copied or pickled while hooks are on it: leave the context, or call "
            "reset_hooks(including_permanent=True), first"
        )


_taps: WeakKeyDictionary[nn.Module, WeakValueDictionary[tuple[Kind, bool], Tap]] = WeakKeyDictionary()


def tap_on(module: nn.Module, kind: Kind, *, late: bool = False, make: type[Tap] = Tap) -> Tap:
    """The one tap for this event, attached or not."""
    with lock:
        if module not in _taps:
            _taps[module] = WeakValueDictionary()
        tap = _taps[module].get((kind, late))
        if tap is None:
            tap = _taps[module][kind, late] = make(kind, late=late)
        return tap


def has_foreign_hooks(module: nn.Module, kind: Kind) -> bool:
    """Whether somebody else has torch hooks on this event."""
    if kind.is_inner:
        return False
    hooks = module._forward_hooks if kind is Kind.OUTPUT else module._forward_pre_hooks
    return bool(hooks) and any(type(hook) is not Tap for hook in hooks.values())
