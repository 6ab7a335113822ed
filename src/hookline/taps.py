"""Taps: the torch hooks that hookline puts on a module, and only while somebody needs them.

A tap sits on one event of one module (its input or its output) and is shared by all runs that listen there, in
whatever thread. When the module is called, the tap asks which of those runs is the one going on in *this* thread or
task, and lets the value flow through that run's actions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
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
    """Which event of a module."""

    INPUT = "input"
    OUTPUT = "output"


class _Now(threading.local):
    """What is going on in this thread at this moment."""

    def __init__(self) -> None:
        self.calls: dict[Tap, int] = {}  # which call each tap has come to in this forward pass
        self.call: int | None = None  # the call that the actions now running see
        self.starts_with_grad = False  # whether gradients were on when this forward pass began


now = _Now()
lock = threading.RLock()
"""Held while taps are put on modules or taken off."""


class Routes:
    """Which actions wait at which tap. A run is one of these, and so is a set of standing hooks."""

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        # A run begun inside a backward pass (by a hook, say) is not one of those outside it.
        self.task = torch._C._current_graph_task_id()
        self.actions: dict[Tap, tuple[Action, ...]] = {}
        self.steps: dict[Tap, tuple[Step, ...]] = {}
        self.set(actions)

    def set(self, actions: Iterable[Action]) -> None:
        """Route these actions, and no others. Threads that are reading see the old routes or the new."""
        table: dict[Tap, list[Action]] = {}
        for action in actions:
            table.setdefault(action.tap, []).append(action)
        self.steps = {tap: arrange(waiting) for tap, waiting in table.items()}
        self.actions = {tap: tuple(waiting) for tap, waiting in table.items()}

    def all(self) -> list[Action]:
        """All actions, in the order in which they were registered."""
        every = [action for waiting in self.actions.values() for action in waiting]
        return sorted(every, key=lambda action: action.order)


def arrange(actions: Iterable[Action]) -> tuple[Step, ...]:
    """The actions at one tap as steps, in the order they are taken."""
    steps: list[Step] = []
    for action in sorted(actions, key=lambda action: (action.phase, action.order)):
        action.extend(steps)
    return tuple(steps)


active: ContextVar[tuple[Routes, ...]] = ContextVar("hookline_active", default=())
"""The runs going on in this thread or task, the outermost first."""


class Tap:
    """A torch hook on one event of one module."""

    def __init__(self, kind: Kind, *, late: bool) -> None:
        self.kind, self.late = kind, late
        self.users = 0
        self.handle: RemovableHandle | None = None
        self.standing: tuple[Routes, ...] = ()

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Called by torch with `(module, args, kwargs)` or `(module, args, kwargs, output)`."""
        steps, recomputing = self._steps()
        if not steps or len(rest) != (2 if self.kind is Kind.OUTPUT else 1):
            # The length is wrong if another thread took the tap off when torch was about to call it, without
            # keywords then; so no run of this thread needs it.
            return None
        value = rest[1] if self.kind is Kind.OUTPUT else (args, rest[0])
        new = self._flow(value, steps, recomputing=recomputing)
        return None if new is value else new

    # A compiler must not trace into a tap: it would bake the hooks of one run into the graph for good.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _steps(self) -> tuple[tuple[Step, ...], bool]:
        """What to do now, and whether this is the second run of a checkpointed region."""
        task = torch._C._current_graph_task_id()
        again = recompute.runs_in_second_run() if task != -1 else None
        runs = [run for run in active.get() if run.task == task] if again is None else again
        here = [run for run in (*runs, *self.standing) if self in run.steps]
        if len(here) == 1:
            return here[0].steps.get(self, ()), again is not None
        return arrange(action for run in here for action in run.actions.get(self, ())), again is not None

    def _flow(self, value: Any, steps: tuple[Step, ...], *, recomputing: bool) -> Any:
        if recomputing:
            now.call = None
        else:
            now.call = now.calls[self] = now.calls.get(self, -1) + 1
        for step in steps:
            value = step(value)
        return value

    def acquire(self, module: nn.Module) -> None:
        """Be on `module` from now on, once more."""
        if self.handle is None:
            on_output = self.kind is Kind.OUTPUT
            register = module.register_forward_hook if on_output else module.register_forward_pre_hook
            # First in line, so that other people's hooks see what we changed; a late tap last, to see what they
            # changed.
            self.handle = register(self, prepend=not self.late, with_kwargs=True)
        self.users += 1

    def release(self) -> None:
        """Undo one `acquire`; with the last one the module is as it was."""
        self.users -= 1
        if self.users == 0 and self.handle is not None:
            self.handle.remove()
            self.handle = None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HooklineError(
            "a model cannot be copied or pickled while hooks are on it: leave the context, or call "
            "reset_hooks(including_permanent=True), first"
        )


_taps: WeakKeyDictionary[nn.Module, WeakValueDictionary[tuple[Kind, bool], Tap]] = WeakKeyDictionary()


def tap_on(module: nn.Module, kind: Kind, *, late: bool = False) -> Tap:
    """The one tap for this event, attached or not."""
    with lock:
        if module not in _taps:
            _taps[module] = WeakValueDictionary()
        tap = _taps[module].get((kind, late))
        if tap is None:
            tap = _taps[module][kind, late] = Tap(kind, late=late)
        return tap


def has_foreign_hooks(module: nn.Module, kind: Kind) -> bool:
    """Whether somebody else has torch hooks on this event."""
    hooks = module._forward_hooks if kind is Kind.OUTPUT else module._forward_pre_hooks
    return any(type(hook) is not Tap for hook in hooks.values())
