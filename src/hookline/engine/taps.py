"""Taps: the torch hooks that hookline puts on a module, and only while somebody needs them.

A tap sits on one event of one module (its input or its output) and is shared by all runs that listen there, in
whatever thread. When the module is called, the tap asks which of those runs is the one going on in *this* thread or
task, and lets the value flow through that run's actions.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from enum import Enum, IntEnum, auto
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn, overrides
from torch.utils.hooks import RemovableHandle

from hookline.engine import blocks, checkpointing, compiling
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.engine.actions import Action

Step: TypeAlias = Callable[[Any], Any]


class Kind(Enum):
    """Which event of a module. Those after the first three are inside it, while it runs: see `inside.py`."""

    INPUT = "input"
    OUTPUT = "output"
    END = "end"  # the call is over, be it by an error
    QUERY = "query"
    KEY = "key"
    SCORES = "scores"
    PATTERN = "pattern"
    ROUTER = "router"  # inside a router of experts

    @property
    def is_inner(self) -> bool:
        """Whether it happens while the module runs."""
        return self not in (Kind.INPUT, Kind.OUTPUT, Kind.END)


class Turn(IntEnum):
    """The order in which the actions at one event are taken. Those of one turn: as they were added."""

    CALLERS_TENSORS = auto()  # the caller gets back its own tensors, before anybody sees the output
    BEGIN = auto()  # a pass begins; what was worked out from an earlier value is forgotten
    EFFECT = auto()  # an edit made at an earlier event shows
    ENTER = auto()  # rows or a residual stream are put in at the input of a layer
    AT_POINTS = auto()  # hooks and caches, by `Site.stage` along the way of the data, and by `Phase` at one point
    LEAVE = auto()  # rows come in at the output of a layer
    KEEP = auto()  # the value is kept for points at later events
    SEND = auto()  # what the module is called with is noted


class Phase(IntEnum):
    """The order at one point: a record holds what the edits made, and a gradient is that of what flowed out."""

    BOUND = auto()  # the end of a pass
    EDIT = auto()
    GRADIENT = auto()
    RECORD = auto()


class _Now(threading.local):
    """What is going on in this thread at this moment."""

    def __init__(self) -> None:
        self.is_second_run = False  # whether a checkpointed region is recomputing
        self.hooks = 0  # how many hooks are running, each called by what another one called
        self.call: int | None = None  # the call of its module that the innermost of them sees
        self.starts_with_grad = False  # whether gradients were on when this forward pass began
        self.kept: dict[Any, Any] = {}  # what earlier events let pass, for points that need it: see `memo.py`
        self.worked_out: dict[Any, Any] = {}  # and what was worked out from that since
        self.watches: list[Any] = []  # the modules now running that are looked into
        self.passing: Any = None  # what part of a text the forward pass is about: see `passes.py`
        self.asked: Any = None  # the same when the innermost hook was called, which may have run the model since
        self.progress: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # how far the one before came
        self.skipped: dict[nn.Module, Any] = {}  # modules that are not run: see `skipping.py`
        self.arguments: Any = None  # what the module was called with whose tap a value passes
        self.sent: dict[int, Any] = {}  # tensors that went into a module in place of the caller's: see `aliases.py`


now = _Now()
lock = threading.RLock()
"""Held while taps are put on modules or taken off."""


class Calls:
    """Which call each tap has come to in the forward pass of the whole model that is going on, in one thread.

    A model that calls itself goes on counting; a pass that a hook makes counts apart from the one the hook is in.
    """

    failure: Any = None
    """Of a hook, in the pass that is going on."""

    def __init__(self, *, is_home: bool = False) -> None:
        self.is_home = is_home  # whether calls outside of a pass count too
        self.calls: dict[tuple[Tap, int], int] = {}
        self.passes_on: list[int] = []  # those going on: in how many hooks

    def begin(self, tap: Tap, root: nn.Module) -> None:
        """A forward pass of the whole model begins, at `tap`."""
        if self.passes_on and not _is_running(root):
            self.passes_on = []  # torch does not say when a pass ends in an interrupt
        if now.hooks not in self.passes_on:
            self.calls = {key: call for key, call in self.calls.items() if key[1] < now.hooks}
            self.calls[tap, now.hooks] = 0
        self.passes_on.append(now.hooks)

    def end(self) -> None:
        """It is over, one way or another."""
        if self.passes_on:
            self.passes_on.pop()
        if not self.passes_on and not self.is_home:
            self.calls = {}  # what is local to a thread keeps alive what it has

    def is_on(self) -> bool:
        """Whether a forward pass of the whole model is going on."""
        return bool(self.passes_on)


class _Elsewhere(threading.local):
    """The calls of each thread but the one that opened a context of hooks."""

    def __init__(self, make: type[Calls]) -> None:
        self.calls = make()


class Count:
    """The calls that a set of hooks has come to, in each thread apart."""

    def __init__(self, make: type[Calls] = Calls) -> None:
        self._make = make
        self._home: Any = None  # `Calls`, of the thread that opened a context
        self._thread = 0
        self._elsewhere: _Elsewhere | None = None  # made when it is needed, which costs more than all the rest

    def open(self) -> None:
        """A context of hooks is entered in this thread: calls outside of a pass count too."""
        thread = threading.get_ident()
        if self._thread != thread:
            self._thread, self._home = thread, self._make(is_home=True)

    def here(self) -> Calls:
        """Those of this thread."""
        if self._thread == threading.get_ident():
            return cast("Calls", self._home)
        if self._elsewhere is None:
            with lock:
                self._elsewhere = self._elsewhere or _Elsewhere(self._make)
        return self._elsewhere.calls

    def next(self, tap: Tap) -> None:
        """One more call."""
        calls = (self._home if self._thread == threading.get_ident() else self.here()).calls
        key = tap, now.hooks
        calls[key] = calls.get(key, -1) + 1

    def of(self, tap: Tap) -> int | None:
        """The call that the tap has come to; None where calls are not counted."""
        here: Calls = self._home if self._thread == threading.get_ident() else self.here()
        return here.calls.get((tap, now.hooks)) if here.passes_on or here.is_home else None


def _is_running(module: nn.Module) -> bool:
    """Whether this thread is in a call of `module` that began before the one that asks."""
    return sum(is_call_of(frame, module) for frame in callers()) > 1


def callers() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def is_call_of(frame: FrameType, module: nn.Module) -> bool:
    """Whether torch is calling `module` in this frame."""
    return frame.f_code is _CALL and frame.f_locals["self"] is module


_CALL = nn.Module._call_impl.__code__


def running_modules() -> list[nn.Module]:
    """The modules that torch is calling in this thread, the innermost first."""
    return [frame.f_locals["self"] for frame in callers() if frame.f_code is _CALL]


class Routes:
    """Which actions wait at which tap. A run is one of these, and so is a set of standing hooks."""

    is_open = True
    """Whether what is routed is to be done. A context that was left may still be in the `active` of another task."""
    is_one_pass = False
    """Whether there is but one forward pass in it."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions: Sequence[Action] = ()
        self.waiting: dict[Tap, list[Action]] = {}
        self.steps: dict[Tap, list[Step]] = {}
        self.count = self.new_count()
        self.set(actions)

    def new_count(self) -> Count:
        """Where calls are counted: by each set of actions for itself."""
        return Count()

    def set(self, actions: Sequence[Action]) -> None:
        """Route these actions, and no others. Threads that are reading see the old routes or the new."""
        waiting: dict[Tap, list[Action]] = {}
        for action in actions:
            action.count = self.count
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


def _turn(action: Action) -> tuple[Turn, int, Phase, int]:
    return action.turn, action.stage, action.phase, action.order


active: ContextVar[tuple[Routes, ...]] = ContextVar("hookline_active", default=())
"""The runs going on in this thread or task, the outermost first."""


class Tap:
    """A torch hook on one event of one module."""

    def __init__(self, kind: Kind, *, late: bool = False) -> None:
        self.kind, self.late = kind, late
        self.users: set[int] = set()
        self.key = RemovableHandle(OrderedDict()).id  # a number that torch gives to no other hook
        self.standing: tuple[Routes, ...] = ()

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Called by torch with `(module, args, kwargs)` or `(module, args, kwargs, output)`."""
        if torch.compiler.is_compiling() and compiling.leaves_hooks_out():
            return None  # another thread hooks the module while this one compiles it
        if len(rest) != (1 if self.kind is Kind.INPUT else 2):
            # Another thread took the tap off when torch was about to call it, without keywords then; so no run of
            # this thread needs it.
            return None
        before, now.arguments = now.arguments, (args, rest[0])
        value = now.arguments if self.kind is Kind.INPUT else rest[1]
        try:
            new = self.flow(value) if not now.watches else _unwatched(self.flow, value)
        finally:
            now.arguments = before
        return None if new is value else new

    def flow(self, value: Any) -> Any:
        """What becomes of a value that passes here, in the run going on in this thread."""
        runs = active.get()
        here: Sequence[Routes]
        if len(runs) == 1 and not self.standing and torch._C._current_graph_task_id() == -1:  # nearly always
            here, is_second_run = runs if self in runs[0].steps and runs[0].is_open else (), False
        else:
            here, is_second_run = self._runs()
        if not here:
            if not runs:
                self._tell_other_threads()
            return value
        now.is_second_run = is_second_run
        if not is_second_run:
            for run in here:
                run.count.next(self)
        steps = here[0].steps.get(self, []) if len(here) == 1 else self._merged(here)
        for step in steps:
            value = step(value)
        return value

    def _runs(self) -> tuple[list[Routes], bool]:
        """The runs that act here at this moment, and whether a checkpointed region is running a second time."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        again = checkpointing.runs_in_second_run() if is_in_backward else None
        runs: Sequence[Routes] = again if again is not None else active.get()
        here = [run for run in runs if self in run.steps and (run.is_open or again is not None)]
        here += [run for run in self.standing if self in run.steps]
        return here, again is not None

    def _tell_other_threads(self) -> None:
        """No run of this thread is here. If the model started this thread, a run of another one misses a call."""
        for run in [each for user in list(self.users) if (each := blocks.find(user)) is not None]:
            if not run.is_here and not any(is_call_of(frame, run.root) for frame in callers()):
                run.note_elsewhere(self)

    def _merged(self, runs: Sequence[Routes]) -> list[Step]:
        return arrange([action for run in runs for action in run.waiting.get(self, ())])

    def waiting(self) -> list[Action]:
        """The actions that a value which passes here now would flow through."""
        return [action for run in self._runs()[0] for action in run.waiting[self]]

    def acquire(self, module: nn.Module, user: object) -> None:
        """Be on `module` for `user`."""
        self.users.add(id(user))
        hooks, flags = self._places(module)
        if self.key in hooks:
            return
        # What torch's own `register_forward_hook` does, but for the handle, which costs as much as all the rest; and
        # so that an interrupt in the middle leaves nothing that `release` does not find.
        for flag in flags:
            flag[self.key] = True
        hooks[self.key] = self
        # First in line, so that other people's hooks see what we changed; a late tap last, to see what they changed.
        if not self.late and self.kind is not Kind.END:
            hooks.move_to_end(self.key, last=False)

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`; without users the module is as it was. Doing so twice does no harm."""
        self.users.discard(id(user))
        if not self.users:
            hooks, flags = self._places(module)
            for place in (hooks, *flags):
                place.pop(self.key, None)

    def _places(self, module: nn.Module) -> tuple[Any, list[dict[int, bool]]]:
        """Where torch keeps hooks of this kind, and what it notes about them."""
        if self.kind is Kind.INPUT:
            return module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]
        flags = [module._forward_hooks_with_kwargs]
        if self.kind is Kind.END:
            flags.append(module._forward_hooks_always_called)
        return module._forward_hooks, flags

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HooklineError(
            "a model cannot be copied or pickled while hooks are on it: leave the context, or call "
            "reset_hooks(including_permanent=True), first"
        )


def _unwatched(flow: Step, value: Any) -> Any:
    """Let a value flow without being watched: what hooks compute is nothing that the model computes."""
    stack = overrides._get_current_function_mode_stack()
    if not stack or stack[-1] is not now.watches[-1]:  # a hook within a hook; or somebody else's is on top
        return flow(value)
    mode = overrides._pop_mode()
    try:
        return flow(value)
    finally:
        overrides._push_mode(mode)


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
    """Whether somebody else has torch hooks on this event; those by which transformers only takes notes do not count.

    What it notes, LLaVA reads: a gradient is to be that of the tensor noted, so ours come first.
    """
    if kind.is_inner:
        return False
    hooks = module._forward_hooks if kind is Kind.OUTPUT else module._forward_pre_hooks
    return bool(hooks) and any(not _is_ours(hook) and not _takes_notes(hook) for hook in list(hooks.values()))


def _is_ours(hook: Any) -> bool:
    """A tap, or what `inside.py` puts around a module that another run looks into."""
    return type(hook) is Tap or getattr(hook, "__module__", "") == "hookline.engine.inner"


def _takes_notes(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == "output_capturing_hook"
